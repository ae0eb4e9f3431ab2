"""Loaders whose workers start anew beside an evaluation: a stall of training in steps that are set aside.

A step in which the job evaluates is not measured, its length says nothing of training. Yet where each epoch
ends with an evaluation, the stall of the training loader's new workers lies in just these steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.facts import Cost
from ddpdoctor.measure.numerics import persistence
from ddpdoctor.measure.sourcelines import SourceLines
from ddpdoctor.measure.steplog import (
    RankLog,
    Step,
    evaluates,
    loaders_with_workers,
    main_loaders,
    undisturbed,
)
from ddpdoctor.measure.taxonomy import Component
from ddpdoctor.rundir import EventKind


def with_evaluations(
    measured: Cost | None, logs: Sequence[RankLog], mean_ms: float | None, lines: SourceLines
) -> Cost | None:
    """The price of epoch starts in ``measured`` steps, and of those in the steps with an evaluation.

    Of each, the longest stall over the ranks counts, as all meet after it; spread over all steps but those of
    the warm-up and those that the profiler disturbed. ``share`` refers to ``mean_ms`` with the stalls.
    """
    if not logs or not mean_ms:
        return measured
    main = main_loaders(logs)
    restarting = [loaders & loaders_with_workers(log) for log, loaders in zip(logs, main, strict=True)]
    seen, stalls = [], []
    for number, steps in undisturbed(logs):
        seen.append(number)
        aside = any(evaluates(step, loaders) for step, loaders in zip(steps, main, strict=True))
        stalls.append(max(map(_stall_ns, steps, restarting)) if aside else 0.0)
    if not any(stalls):
        return measured
    times, numbers = np.array(stalls), np.array(seen)
    when = persistence(numbers, times > 0)
    extra_ms = float(times.sum()) / len(seen) / 1e6
    whole_ms = extra_ms + (measured.ms_per_step if measured else 0.0)
    length_ms = mean_ms + extra_ms
    price = Cost(
        ms_per_step=whole_ms,
        share=whole_ms / length_ms,
        speedup=length_ms / max(length_ms - whole_ms, 1e-3),
        own_ms=whole_ms,
        occurrence_ms=float(np.median(times[times > 0])) / 1e6,
        **when.as_facts(),
        where=lines.work((Component.EPOCH_START,), None, numbers[times > 0]),
    )
    if measured is None:
        return price
    hit = measured.steps_hit + when.hit
    return msgspec.structs.replace(price, steps_hit=hit, where=measured.where or price.where)


def _stall_ns(step: Step, loaders: set[int]) -> float:
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
