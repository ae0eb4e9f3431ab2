"""Profiler traces → columns. Knows file formats, knows nothing of diagnosis.

::

    paths ─► job: find, read, choose ─► engines ─► cache ─► formats ─► columns ─► masks by classify
                                                            sources

``formats`` has a folder for each format; ``operations`` reads tables of whole jobs; ``digest`` makes files of columns where
the ranks ran.
"""

from .columns import Collectives, RankTrace, TraceMeta
from .formats import load_trace
from .job import LoadedTraces, TraceSet, find_traces, load_traces
