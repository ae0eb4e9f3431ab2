"""Finds the steps in a rank's log that its trace covers; a recording may have several profiler windows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddpdoctor.measure.steplog import OPENED, PROFILED, RankLog, Step
from ddpdoctor.trace import RankTrace


def steps_of_profiler_window(trace: RankTrace, steps: Sequence[Step]) -> list[Step]:
    """The steps of the profiler window closest to the trace's events; empty for an empty trace."""
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
    median_ns = int(np.median(trace.start_ns))

    def distance_ns(window: Sequence[Step]) -> int:
        # Wall-clock times, like those of the trace.
        return max(window[0].recorded_ns[0] - median_ns, median_ns - window[-1].recorded_ns[1], 0)

    return min(windows, key=distance_ns)


def is_of_training(trace: RankTrace, log: RankLog | None) -> bool:
    """Whether a trace may be of the steps of its rank's ``log``: always, unless they are one training of several."""
    if log is None or not trace.size or not (log.follows_training or log.later_trainings_end_ns):
        return True
    return log.steps[0].recorded_ns[0] <= int(np.median(trace.start_ns)) <= log.steps[-1].recorded_ns[1]
