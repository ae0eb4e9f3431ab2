"""Profiler traces → columns. Knows file formats, knows nothing of diagnosis."""

from ddpdoctor.trace.columns import Collectives, Lane, RankTrace, TraceMeta
from ddpdoctor.trace.find import TraceSet, find_traces
from ddpdoctor.trace.load import LoadedTraces, load_traces
from ddpdoctor.trace.read import load_trace

__all__ = [
    "Collectives",
    "Lane",
    "LoadedTraces",
    "RankTrace",
    "TraceMeta",
    "TraceSet",
    "find_traces",
    "load_trace",
    "load_traces",
]
