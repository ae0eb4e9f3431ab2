"""The memory that an analysis of many ranks needs grows with their events by a small number of bytes."""

from __future__ import annotations

import tracemalloc

from ddpdoctor.analysis.driver import windows_of
from ddpdoctor.measure.flow import measure
from ddpdoctor.trace import load_traces
from ddpdoctor.trace.columns import column_types
from tests.generator import Config, generate

MOST_COLUMNS, MOST_MEASURED = 32.0, 45.0
"""Bytes per event of the columns, and of all that windows, graphs and prices add to them at their peak."""


def test_bytes_per_event_of_all_ranks(tmp_path):
    generate(Config(world_size=8, hosts=(4, 4), steps=4, forward_kernels=100, backward_kernels=200), tmp_path)
    traces = load_traces([str(file) for file in sorted(tmp_path.rglob("*.json*"))], jobs=1).traces
    events = sum(trace.size for trace in traces)
    columns = sum(getattr(trace, name).nbytes for trace in traces for name in column_types(type(trace)))
    assert columns < MOST_COLUMNS * events
    # Imports and memoized names are no part of the growth.
    measure([], windows_of(traces[:2], []), {})
    tracemalloc.start()
    try:
        measure([], windows_of(traces, []), {})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MOST_MEASURED * events
