"""What our own profiler window cost the job: told in the report, and counted in no step time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .steplog import RankLog
from .summary import WindowCost

_PROFILED = "profiled"
_OPENED = "profiler_open"
_AROUND = (_OPENED, "profiler_close", "profiler_save")


def window_cost(logs: Sequence[RankLog], usual_ms: float | None) -> WindowCost | None:
    """Of the steps that all ranks recorded, each as long as its longest rank's, against a usual one of ``usual_ms``. None
    where no window was open, or what a usual step takes is not known.
    """
    by_number = [{step.number: step for step in log.steps} for log in logs]
    everywhere = sorted(set.intersection(*(set(steps) for steps in by_number))) if by_number else []
    length = {n: max(of[n].end - of[n].start for of in by_number) / 1e6 for n in everywhere}
    marks = {n: {mark for of in by_number for mark in of[n].marks} for n in everywhere}
    inside = [n for n in everywhere if _PROFILED in marks[n]]
    if usual_ms is None or not inside:
        return None
    # Kernels and threads of the profiler end in the step after the one that opens, closes or saves it.
    around = {n + later for n in everywhere if marks[n].intersection(_AROUND) for later in (0, 1)}
    touched = around.intersection(everywhere).union(inside)
    quiet = [n for n in inside if _OPENED not in marks[n]] or inside
    return WindowCost(
        first=inside[0],
        last=inside[-1],
        step_ms=float(np.median([length[n] for n in quiet])),
        extra_ms=max(0.0, sum(length[n] - usual_ms for n in touched)),
    )
