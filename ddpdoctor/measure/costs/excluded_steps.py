"""Price stalls in excluded steps, from the logs.

A step in which the job evaluates is excluded, as its length says nothing of training. Two stalls occur in such steps:

- Loaders that restart their workers: all ranks wait for the first batches of each epoch. Where each epoch ends with an evaluation,
  this stall is in excluded steps only. It is priced from the logs and added to that of the measured steps.
- Evaluations on some ranks, for which the others wait. Where rank 0 evaluates the whole validation set by itself, all other ranks idle
  as long, and dividing the set among all ranks would save most of that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.facts import Cost, saving
from ddpdoctor.measure.numerics import Array, Ints, Mask, persistence
from ddpdoctor.measure.places import CodeLine, Where
from ddpdoctor.measure.sourcelines import ranked
from ddpdoctor.measure.steplog import RankLog, Step, evaluated
from ddpdoctor.measure.taxonomy import SHARED_COMPONENTS, LateCause, SharedCause
from ddpdoctor.rundir import EventKind

from .context import Context, Costs
from .shared import common_work

_COMPONENTS = SHARED_COMPONENTS[SharedCause.DATA_EPOCH_START]


def epoch_starts(context: Context) -> Costs:
    """``shared.data_epoch_start`` of the measured steps and of steps with an evaluation; {} where there is none.

    The latter are spread over all steps; ``share`` then refers to the mean step with them.
    """
    measured = common_work(context, _COMPONENTS)
    stalls_ns = _evaluation_stalls(context) if context.mean_step_ms else {}
    cost = _with_evaluation_stalls(context, measured, stalls_ns) if stalls_ns else measured
    return {} if cost is None else {f"shared.{SharedCause.DATA_EPOCH_START}": cost}


def _with_evaluation_stalls(context: Context, measured: Cost | None, stalls_ns: Mapping[int, float]) -> Cost:
    numbers, lost_ns = np.array(list(stalls_ns)), np.array(list(stalls_ns.values()))
    stalled = lost_ns > 0
    extra_ms = float(lost_ns.sum()) / len(numbers) / 1e6
    whole_ms = extra_ms + (measured.ms_per_step if measured else 0.0)
    step_ms = (context.mean_step_ms or 0.0) + extra_ms
    when = persistence(numbers, stalled).as_facts()
    if measured is not None:
        when["steps_hit"] += measured.steps_hit
    where = context.lines.work(_COMPONENTS, None, numbers[stalled])
    return Cost(
        **saving(whole_ms, step_ms),
        own_ms=whole_ms,
        occurrence_ms=float(np.median(lost_ns[stalled])) / 1e6,
        **when,
        where=measured.where or where if measured is not None else where,
    )


def _evaluation_stalls(context: Context) -> dict[int, float]:
    """Step number → longest worker start of all ranks, ns, in steps in which a rank evaluates; 0 in other steps. Of all steps recorded in
    full, without the warm-up and steps that the profiler disturbed. {} where there is no such stall."""
    logs = context.logs
    evaluating = evaluated(logs)
    if not evaluating:
        return {}
    restarting = [log.main_loaders & log.loaders_with_workers for log in logs]
    stalls_ns = {
        number: max(map(_stall_ns, steps, restarting)) if number in evaluating else 0.0
        for number, steps in context.undisturbed
        if all(step.in_full for step in steps)
    }
    return stalls_ns if any(stalls_ns.values()) else {}


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


class _PartialEvaluations(msgspec.Struct, frozen=True):
    """Steps in which the same ranks, half of all at most, evaluate and the others do not."""

    positions: tuple[int, ...]
    """Of the ranks that evaluate."""
    numbers: Ints
    """[N] numbers of all steps, without the warm-up and steps that the profiler disturbed."""
    steps: list[list[Step]]
    """[N] those steps, on each rank."""
    hit: Mask
    """[N] which of them have such an evaluation."""
    longer_ns: Array
    """[N] excess of a step with such an evaluation over the median of steps without any; else 0."""


def evaluations_on_some_ranks(context: Context) -> Costs:
    """``late.evaluation``: the cost of evaluation on the same ranks, half of all at most; {} where that does not happen.

    If the E ranks that evaluate shared the work with all W ranks, they would save (W - E) / W of the time by which steps with an
    evaluation exceed the median of the others, spread over all steps. ``share`` refers to the mean step (of those
    without evaluation) with that time.
    """
    logs = context.logs
    alone = _find(context) if len(logs) > 1 and context.mean_step_ms else None
    if alone is None or not alone.longer_ns.any():
        return {}
    extra_ms = float(alone.longer_ns.mean()) / 1e6
    saved_ms = extra_ms * (len(logs) - len(alone.positions)) / len(logs)
    step_ms = (context.mean_step_ms or 0.0) + extra_ms
    cost = Cost(
        **saving(saved_ms, step_ms),
        ranks=[logs[position].rank for position in alone.positions],
        own_ms=extra_ms,
        occurrence_ms=float(np.median(alone.longer_ns[alone.hit])) / 1e6,
        **persistence(alone.numbers, alone.hit).as_facts(),
        where=_where(logs, alone),
    )
    return {f"late.{LateCause.EVALUATION}": cost}


def _find(context: Context) -> _PartialEvaluations | None:
    logs = context.logs
    if not evaluated(logs):
        return None
    undisturbed = context.undisturbed
    evaluating = [
        tuple(p for p, log in enumerate(logs) if number in log.evaluated) for number, _ in undisturbed
    ]
    if not any(evaluating):
        return None
    lengths_ns = _lengths_ns([steps for _, steps in undisturbed], evaluating)
    alone = Counter(ranks for ranks in evaluating if ranks and 2 * len(ranks) <= len(logs))
    usual = [length for length, ranks in zip(lengths_ns, evaluating, strict=True) if not ranks]
    if not alone or not usual:
        return None
    positions = alone.most_common(1)[0][0]
    hit = np.array([ranks == positions for ranks in evaluating])
    return _PartialEvaluations(
        positions,
        np.array([number for number, _ in undisturbed]),
        [steps for _, steps in undisturbed],
        hit,
        np.where(hit, np.clip(lengths_ns - np.median(usual), 0, None), 0.0),
    )


def _lengths_ns(undisturbed: Sequence[Sequence[Step]], evaluating: Sequence[tuple[int, ...]]) -> Array:
    """[N] ns of each step: median over the ranks that evaluate in it, or over all where none does."""
    each = np.array([[step.length_ns for step in steps] for steps in undisturbed], float)
    lengths: Array = np.median(each, axis=1)
    for n, ranks in enumerate(evaluating):
        if ranks:
            lengths[n] = np.median(each[n, list(ranks)])
    return lengths


def _where(logs: Sequence[RankLog], alone: _PartialEvaluations) -> list[Where]:
    """Lines that fetch the batches of these evaluations, or call the module, most frequent first."""
    training = [log.main_loaders for log in logs]
    lines: Counter[CodeLine] = Counter()
    for position in alone.positions:
        log = logs[position]
        for steps in (alone.steps[n] for n in np.flatnonzero(alone.hit)):
            for event in steps[position].events:
                where = log.where.get(event.where)
                if where is not None and (
                    event.kind == EventKind.EVALUATION
                    or (event.kind == EventKind.DATA and event.loader not in training[position])
                ):
                    lines[where.stack[0]] += 1
    return ranked(lines)
