"""Which steps of a rank's log its trace is of: a recording may have several profiler windows."""

from __future__ import annotations

from collections.abc import Sequence

from ddpdoctor.measure.steplog import OPENED, PROFILED, Step
from ddpdoctor.trace import RankTrace


def profiled_in(trace: RankTrace, steps: Sequence[Step]) -> list[Step]:
    """The steps of the window that shares most time with the trace; none where that holds nothing."""
    if not trace.size:
        return []
    windows: list[list[Step]] = []
    for step in steps:
        if PROFILED in step.marks:
            if OPENED in step.marks or not windows:
                windows.append([])
            windows[-1].append(step)
    if len(windows) <= 1:
        return windows[0] if windows else []
    begin, end = int(trace.start_ns.min()), int(trace.start_ns.max())

    def shared_ns(window: Sequence[Step]) -> int:
        # By the wall clock, as the trace has it.
        first, last = (step.moved_ns for step in (window[0], window[-1]))
        return min(end, window[-1].end_ns - last) - max(begin, window[0].start_ns - first)

    return max(windows, key=shared_ns)
