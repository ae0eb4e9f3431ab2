"""The per-rank stage where the ranks ran: columns instead of traces, so that only small files travel.

A run directory or traces go in. Of a run directory a run directory comes out in which ``trace.columns`` stands for each
rank's trace; of other traces, a folder with one ``.columns`` file each. ``analyze`` takes both as it takes what they were
made of, and finds the same.
"""

from .records import Copies, copy_records, lies_within, refuse_inside_run
from .write import TRACE_DIGEST, Digest, loose_targets, trace_digest, write_digests
