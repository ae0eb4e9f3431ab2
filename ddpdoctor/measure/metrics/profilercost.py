"""What our own profiler window cost the job: told in the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ddpdoctor.measure.steplog import (
    AROUND_WINDOW,
    OPENED,
    PROFILED,
    SUSPENDED,
    RankLog,
    longest_ns,
    recorded_everywhere,
)
from ddpdoctor.measure.summary import WindowCost


def window_cost(logs: Sequence[RankLog], usual_ms: float | None) -> WindowCost | None:
    """Of the steps that all ranks recorded, each as long as its longest rank's, against a usual one of ``usual_ms``. None
    where no window was open, or what a usual step takes is not known.
    """
    everywhere = recorded_everywhere(logs)
    length = {number: longest_ns(steps) / 1e6 for number, steps in everywhere.items()}
    marks = {number: {mark for step in steps for mark in step.marks} for number, steps in everywhere.items()}
    inside = _first_window([n for n in everywhere if PROFILED in marks[n]], marks)
    if usual_ms is None or not inside:
        return None
    # Kernels and threads of the profiler end in the step after the one that opens, closes or saves it.
    around = {n + later for n in everywhere if marks[n].intersection(AROUND_WINDOW) for later in (0, 1)}
    stopped = {n + later for n in everywhere if SUSPENDED in marks[n] for later in (0, 1)}
    touched = around.intersection(everywhere).union(inside) - stopped
    captures = [n for n in everywhere if n > inside[-1] and OPENED in marks[n]]
    touched = {n for n in touched if not captures or n < captures[0]}
    quiet = [n for n in inside if OPENED not in marks[n]] or inside
    return WindowCost(
        first=inside[0],
        last=inside[-1],
        step_ms=float(np.median([length[n] for n in quiet])),
        extra_ms=max(0.0, sum(length[n] - usual_ms for n in touched)),
    )


def _first_window(profiled: Sequence[int], marks: Mapping[int, set[str]]) -> list[int]:
    """Those before a window that somebody asked for while the job ran: what that cost they know."""
    later = [n for n in profiled[1:] if OPENED in marks[n]]
    return [n for n in profiled if not later or n < later[0]]
