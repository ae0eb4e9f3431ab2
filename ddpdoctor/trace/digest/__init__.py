"""Parses traces on the machine where the ranks ran and writes their columns, so that only small files need to be copied.

A run directory becomes a run directory in which ``trace.columns`` replaces each rank's trace. Loose traces become a folder
with one ``.columns`` file each. ``analyze`` accepts both and gives the same diagnosis as for the originals.
"""

from .records import CreatedFiles, check_outside_run, copy_run_directory, is_within
from .write import TRACE_DIGEST, Digest, loose_targets, trace_digest, write_digests
