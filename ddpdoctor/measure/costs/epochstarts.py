"""Loaders whose workers start anew: what all ranks wait for the first batches of each pass.

Where each epoch ends with an evaluation, this stall lies in just the steps that are set aside: a step in which the job
evaluates is not measured, its length says nothing of training. It is priced from the logs then, and added to what the
measured steps show.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import numpy as np

from ddpdoctor.measure.facts import Cost
from ddpdoctor.measure.numerics import Array, Ints, persistence
from ddpdoctor.measure.steplog import Step, evaluated
from ddpdoctor.measure.taxonomy import SHARED_COMPONENTS, SharedCause
from ddpdoctor.rundir import EventKind

from .context import Context, Costs
from .shared import common_work

_COMPONENTS = SHARED_COMPONENTS[SharedCause.DATA_EPOCH_START]


class _Stalls(msgspec.Struct, frozen=True):
    """Epoch starts in steps with an evaluation."""

    steps: Ints
    """[N] all steps but those of the warm-up and those that the profiler disturbed."""
    ns: Array
    """[N] the longest stall over the ranks, as all meet after it; 0 in steps without."""


def epoch_starts(context: Context) -> Costs:
    """``shared.data_epoch_start``: of the measured steps, and of those with an evaluation; {} where there is none.

    The latter are spread over all steps; ``share`` then refers to the mean step with them.
    """
    measured = common_work(context, _COMPONENTS)
    stalls = _beside_evaluations(context) if context.mean_step_ms else None
    cost = measured if stalls is None else _together(context, measured, stalls)
    return {} if cost is None else {f"shared.{SharedCause.DATA_EPOCH_START}": cost}


def _together(context: Context, measured: Cost | None, stalls: _Stalls) -> Cost:
    stalled = stalls.ns > 0
    extra_ms = float(stalls.ns.sum()) / len(stalls.steps) / 1e6
    whole_ms = extra_ms + (measured.ms_per_step if measured else 0.0)
    step_ms = (context.mean_step_ms or 0.0) + extra_ms
    when = persistence(stalls.steps, stalled).as_facts()
    if measured is not None:
        when["steps_hit"] += measured.steps_hit
    where = context.lines.work(_COMPONENTS, None, stalls.steps[stalled])
    return Cost(
        ms_per_step=whole_ms,
        share=whole_ms / step_ms,
        speedup=step_ms / max(step_ms - whole_ms, 1e-3),
        own_ms=whole_ms,
        occurrence_ms=float(np.median(stalls.ns[stalled])) / 1e6,
        **when,
        where=measured.where or where if measured is not None else where,
    )


def _beside_evaluations(context: Context) -> _Stalls | None:
    """None where there is no such stall."""
    logs = context.logs
    if not logs:
        return None
    evaluating = evaluated(logs)
    restarting = [log.main_loaders & log.loaders_with_workers for log in logs]
    numbers, stalls = [], []
    for number, steps in context.undisturbed:
        numbers.append(number)
        stalls.append(max(map(_stall_ns, steps, restarting)) if number in evaluating else 0.0)
    return _Stalls(np.array(numbers), np.array(stalls)) if any(stalls) else None


def _stall_ns(step: Step, loaders: Collection[int]) -> float:
    """Time for starting the workers of these loaders, and for their first batch, in this step."""
    waits, fresh = 0.0, False
    for event in step.events:
        if event.loader not in loaders:
            continue
        if event.kind == EventKind.ITERATION:
            waits, fresh = waits + event.duration_ns, True
        elif event.kind == EventKind.DATA and fresh:
            waits, fresh = waits + event.duration_ns, False
    return waits
