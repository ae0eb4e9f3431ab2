"""The what-if analysis of a pipeline- and data-parallel job as the facts that rules read.

Slow workers are ``late.compute``, as in a data-parallel job, unless they are whole pipeline stages: then the
model is divided unevenly, and they are ``pipeline.stage``. ``late.total`` is the saving if every operation took its typical time.
"""

from __future__ import annotations

import numpy as np

from ddpdoctor.measure.facts import Cost, Facts, JobFacts, LateFacts, PipelineFacts, StepFacts, saving
from ddpdoctor.measure.numerics import persistence

from .stragglers import SLOWEST_SHARE, Removed, Stragglers, Worker

_HIT_SHARE = 0.02
"""A step counts as hit where it loses this share of the mean step: steps of one job differ by as much."""
_MOST_SLOW = 0.5
"""Largest share of slow workers: where more are slow, no single worker is named."""


def straggler_facts(stragglers: Stragglers) -> Facts:
    """The facts of the analysis; all others are absent."""
    lengths = np.array(stragglers.measured_steps_ms)
    slow_workers = _slow_workers(stragglers)
    stages = slow_stages(stragglers)
    cost = None
    if stragglers.without_slow_workers is not None and len(slow_workers) <= _MOST_SLOW * len(
        stragglers.workers
    ):
        cost = _cost(stragglers, stragglers.without_slow_workers, slow_workers)
    return Facts(
        job=JobFacts(world_size=stragglers.world_size, ranks_seen=len(stragglers.workers)),
        steps=StepFacts(
            source="trace",
            seen=len(lengths) + stragglers.excluded_steps,
            measured=len(lengths),
            mean_ms=float(lengths.mean()),
            median_ms=float(np.median(lengths)),
            p95_ms=float(np.quantile(lengths, 0.95)),
        ),
        late=LateFacts(
            compute=None if stages else cost,
            total=_cost(
                stragglers, stragglers.without_any, slow_workers if cost is not None and not stages else None
            ),
        ),
        pipeline=PipelineFacts(
            stages=stragglers.stages,
            replicas=stragglers.replicas,
            slowdown=stragglers.slowdown,
            slow_stages=stages or None,
            stage=cost if stages else None,
        ),
    )


def summary_of(stragglers: Stragglers) -> str:
    """The analysis in words, with the quantities of the paper."""
    removals = {
        f"the slowest {100 * SLOWEST_SHARE:g} % of the workers (M_W)": stragglers.without_slowest,
        "the last stage (M_S)": stragglers.without_last_stage,
    }
    shares = ", ".join(
        f"{max(100 * removed.share, 0.0):.0f} % by {name}"
        for name, removed in removals.items()
        if removed is not None and removed.share is not None
    )
    return (
        f"What-if analysis of {len(stragglers.workers)} traced workers ({stragglers.replicas} replicas of {stragglers.stages} "
        f"pipeline stages): the job takes {stragglers.slowdown:.2f} times as long as if every operation took "
        f"its typical time (S).{f' Of the excess, {shares}.' if shares else ''}"
    )


def _slow_workers(stragglers: Stragglers) -> list[Worker]:
    return [worker for worker in stragglers.workers if worker.rank in stragglers.slow_workers]


def slow_stages(stragglers: Stragglers) -> list[int]:
    """Stages that are slow on every replica; empty where other workers are slow too, and where there is one replica, as a slow stage
    then looks like a slow machine."""
    if stragglers.replicas < 2:
        return []
    slow_workers = _slow_workers(stragglers)
    stages = sorted({worker.stage for worker in slow_workers})
    return (
        stages
        if len(slow_workers) == len(stages) * stragglers.replicas and len(stages) < stragglers.stages
        else []
    )


def _cost(stragglers: Stragglers, removed: Removed, slow_workers: list[Worker] | None) -> Cost:
    mean_ms = float(np.mean(stragglers.measured_steps_ms))
    gain = np.array(removed.gain_ms)
    hit = gain > _HIT_SHARE * mean_ms
    when = persistence(np.array(stragglers.steps), hit)
    gain_ms = max(0.0, float(gain.mean()))
    named = slow_workers or []
    others = [worker.compute_ms for worker in stragglers.workers if worker not in named]
    return Cost(
        **saving(gain_ms, mean_ms),
        ranks=None if slow_workers is None else sorted(worker.rank for worker in slow_workers),
        own_ms=float(np.mean([worker.compute_ms for worker in named])) if named else None,
        typical_ms=float(np.median(others)) if named and others else None,
        occurrence_ms=float(np.median(gain[hit])) if hit.any() else None,
        **when.as_facts(),
    )
