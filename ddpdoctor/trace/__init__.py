"""Reads profiler traces of any format into columns, one :class:`RankTrace` per rank. Knows nothing of rules or diagnoses.

::

    paths ─► job: find, read, select ─► engines ─► cache ─► formats ─► columns ─► masks by classify
                                                            sources

``formats`` has one package per format. ``operations`` reads a table of a whole job. ``digest`` writes columns to files on
the machine where the ranks ran.
"""

from .columns import CUDA_CALLS, RUNTIME_CALLS, Collectives, RankTrace, TraceMeta
from .formats import load_trace
from .job import LoadedTraces, TraceSet, find_traces, load_traces
