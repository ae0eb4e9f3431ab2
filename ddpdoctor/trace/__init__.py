"""Reads profiler traces of any format into columns, one :class:`RankTrace` per rank. Independent of rules and diagnoses.

::

    paths ─► find ─► load ─► processes or clusters ─► cache ─► formats ─► columns ─► masks by classify
                                                              sources

``formats`` has one module or package per format. ``archive`` reads and writes files of columns. ``operations`` reads a table of a whole
job. ``digest`` writes columns to files, on the machine on which the ranks ran.
"""

from .columns import CUDA_CALLS, RUNTIME_CALLS, Collectives, RankTrace, TraceMeta
from .find import TraceSet, find_traces
from .formats import load_trace
from .load import LoadedTraces, load_traces
