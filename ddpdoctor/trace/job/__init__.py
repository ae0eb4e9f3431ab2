"""Paths → the traces of one job: find them, read them, choose one recording of one job.

Folders, patterns, files and URLs go in; :class:`LoadedTraces` comes out: one trace a rank, recorded together, sorted by
rank, and a sentence on whatever was left out. A bad file, a stranger among the files or a second window of a rank costs
itself and a note; only traces of different jobs are refused until one is chosen.
"""

from .find import TraceSet, find_traces
from .load import LoadedTraces, load_traces, read_traces
