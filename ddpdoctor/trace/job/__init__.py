"""Finds the traces at some paths, reads them, and selects one recording of one job.

Takes folders, patterns, files and URLs. Returns :class:`LoadedTraces`: one trace per rank, recorded together, sorted by
rank, and notes on all that was skipped. Unreadable files, traces of another recording and further windows of a rank are
skipped with a note. Traces of different jobs are an error until the user chooses one.
"""

from .find import TraceSet, find_traces
from .load import LoadedTraces, load_traces, read_traces
