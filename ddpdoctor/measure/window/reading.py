"""Reduces a trace to a :class:`Window`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.trace import RankTrace, classify

from .amounts import amounts
from .collectives import Collectives
from .devicework import device_work
from .gloo import collectives_of_gloo
from .hostwork import host_work
from .kernels import collectives_of_kernels
from .launches import DEVICE, host_recorded
from .window import Window

Steps = Sequence[tuple[int, int, int]]


def read_window(trace: RankTrace, bounds: Steps | None = None, host: str = "") -> Window:
    """Reduce a trace.

    ``bounds`` are the steps where something better than the trace's own marks knows them, ``host`` is the rank's host where
    the trace does not tell.
    """
    on_device = bool(trace.category_mask("kernel").any())
    main = main_lane(trace)
    collectives = _collectives(trace, main)
    host_seen = not on_device or host_recorded(trace)
    steps = bounds or _steps(trace, main) or ([] if host_seen else _steps_on_device(trace))
    span = _span(trace, on_device)
    work = (
        device_work(trace, main, collectives, span, last_step_end=steps[-1][2] if steps else None)
        if on_device
        else host_work(trace, main)
    )
    forward = trace.name_mask(classify.is_ddp_forward) & trace.category_mask("user_annotation", "cpu_op")
    return Window(
        trace=trace,
        rank=trace.meta.rank or 0,
        host=trace.meta.host or host,
        on_device=on_device,
        steps=steps,
        span=span,
        collectives=collectives,
        sets=work.sets,
        compute=work.compute,
        late_launches=work.late_launches,
        host_seen=host_seen,
        waits=work.waits,
        idle_after=work.idle_after,
        in_gaps=work.in_gaps,
        forwards=np.sort(trace.start_ns[forward]),
        updates=np.sort(trace.start_ns[classify.optimizer_steps(trace)]),
        elements=amounts(trace, steps),
    )


def _collectives(trace: RankTrace, main: int) -> Collectives:
    """NCCL-like kernels where there are any, else Gloo's annotations."""
    kernels = np.flatnonzero(
        trace.category_mask("kernel") & trace.name_mask(classify.is_communication_kernel)
    )
    return collectives_of_kernels(trace, kernels, main) if len(kernels) else collectives_of_gloo(trace)


def _span(trace: RankTrace, on_device: bool) -> tuple[int, int]:
    """First start and last end of the device's events, or of what a CPU computes; of all events where there are none."""
    if not trace.size:
        return 0, 0
    relevant = trace.category_mask(*(DEVICE if on_device else ("cpu_op", "user_annotation")))
    if not relevant.any():
        relevant = np.ones(trace.size, bool)
    return int(trace.start_ns[relevant].min()), int(trace.end_ns[relevant].max())


def main_lane(trace: RankTrace) -> int:
    """The training thread: the lane with the step marks, else with the optimizer's steps, else with most host
    events."""
    for predicate in (_is_step, classify.is_optimizer_step):
        rows = trace.name_mask(predicate) & trace.category_mask("user_annotation", "cpu_op")
        if rows.any():
            return int(np.bincount(trace.lane[rows]).argmax())
    rows = trace.category_mask("cpu_op", "user_annotation", "python_function")
    return int(np.bincount(trace.lane[rows]).argmax()) if rows.any() else -1


def _is_step(name: str) -> bool:
    return classify.step_number(name) is not None


def _steps(trace: RankTrace, main: int) -> list[tuple[int, int, int]]:
    """The steps that are marked on the training thread, else from the end of one optimizer's step to the next one's."""
    on_main = trace.lane == main
    marks = np.flatnonzero(
        trace.name_mask(_is_step) & trace.category_mask("user_annotation", "cpu_op") & on_main
    )
    if len(marks):
        steps = {
            (
                int(classify.step_number(trace.name_of(int(row))) or 0),
                int(trace.start_ns[row]),
                int(trace.end_ns[row]),
            )
            for row in marks
        }
        return sorted(steps, key=lambda step: step[1])
    rows = np.flatnonzero(trace.name_mask(classify.is_optimizer_step) & on_main)
    ends = sorted(_outermost_ends(trace, rows))
    return [(i, start, end) for i, (start, end) in enumerate(pairwise(ends))]


def _steps_on_device(trace: RankTrace) -> list[tuple[int, int, int]]:
    """The steps as the device's streams went through them: from the first stream to the last."""
    rows = np.flatnonzero(trace.name_mask(_is_step) & trace.category_mask("gpu_user_annotation"))
    if not len(rows):
        return []
    numbers = np.array([classify.step_number(trace.name_of(int(row))) or 0 for row in rows], np.int64)
    order = np.argsort(numbers, kind="stable")
    of_step, first = np.unique(numbers[order], return_index=True)
    steps = [
        (int(number), int(trace.start_ns[own].min()), int(trace.end_ns[own].max()))
        for number, own in zip(of_step, np.split(rows[order], first[1:]), strict=True)
    ]
    return sorted(steps, key=lambda step: step[1])


def _outermost_ends(trace: RankTrace, rows: NDArray[np.int64]) -> set[int]:
    ends: set[int] = set()
    reach = -1
    for row in rows[np.argsort(trace.start_ns[rows], kind="stable")]:
        if trace.start_ns[row] >= reach:
            reach = int(trace.end_ns[row])
            ends.add(reach)
    return ends
