"""What-if analysis of stragglers in pipeline- and data-parallel jobs: which workers they are, and their cost.

After Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI '25, section 3.
All step times are means over the steps of replays without launch delays. With

    T          every operation as measured
    T_ideal    every operation at its kind's typical cost: the mean of computations, the median of communication
    T_ideal+X  the operations X as measured, all others ideal
    T-X        the operations X ideal, all others as measured

    S    = T / T_ideal                      (eq. 1)  slowdown of the job; 1 without stragglers
    S_X  = T_ideal+X / T_ideal              (eq. 2)  slowdown by X alone: replica, stage or worker
    S_w  = min(S_replica, S_stage)          (eq. 4)  slowdown by the worker there
    M_W  = (T - T-W) / (T - T_ideal)        (eq. 5)  share of the slowdown due to the slowest 3 % of workers
    M_S  = (T - T-L) / (T - T_ideal)                 share due to the last stage

S_w takes one replay per replica and per stage instead of one per worker, but is high for a normal worker in both a slow replica
and a slow stage. The workers with the highest S_w are therefore also replayed one by one. The *slow workers* are those that
alone cost at least half as much as the slowest one.

M_W near 1 means that single workers are slow, M_S near 1 that the model is divided unevenly into stages. Both may be below 0
or above 1, because removing one delay may lengthen or expose another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddpdoctor.errors import UnusableInput
from ddpdoctor.measure.facts import Cost, Facts, JobFacts, LateFacts, PipelineFacts, StepFacts, saving
from ddpdoctor.measure.numerics import persistence
from ddpdoctor.trace.operations import Operations

from .dag import Costs, Dag, Times, measured_costs, replay
from .graph import BACKWARD, COMMUNICATION, FORWARD, KINDS, pipeline_dag, whole_steps

OperationMask = NDArray[np.bool_]

SLOWEST_SHARE = 0.03
"""Share of the workers that counts as the slowest, for M_W (section 3 of the paper)."""
CULPRIT_SHARE = 0.5
"""Least cost of a slow worker, as a share of the cost of the slowest one."""
_REPLAYED_ALONE = 64
"""Most workers that are replayed one by one, those with the highest S_w. Each takes a replay of the whole job."""
_ROUNDING_SHARE = 1e-9
"""Share of the step time below which a cost is due to rounding."""
CLOCK_TOLERANCE_S = 0.01
"""Negative costs down to minus this are due to clock differences (published analysis of the paper)."""


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline stage of one replica."""

    rank: int
    replica: int
    stage: int
    slowdown: float
    """S_w."""
    alone: float | None
    """S_X of this worker alone; None if it was not replayed."""
    compute_ms: float
    """Forward and backward passes, mean per step."""


class RemovalGain(msgspec.Struct, frozen=True, kw_only=True):
    """The saving if some operations took their typical time."""

    share: float | None
    """Saved share of the job's slowdown (M_W, M_S); None without a slowdown."""
    gain_ms: list[float]
    """Saving in each step."""


class Stragglers(msgspec.Struct, frozen=True, kw_only=True):
    """The what-if analysis of one job."""

    steps: list[int]
    """Numbers of the steps analysed."""
    excluded_steps: int
    """Number of steps excluded because operations are missing in them."""
    world_size: int | None
    replicas: int
    stages: int
    measured_steps_ms: list[float]
    """Measured time of each step."""
    slowdown: float
    """S = T / T_ideal."""
    workers: list[Worker]
    """Slowest first."""
    slow_workers: list[int]
    """Ranks of the slow workers; may be empty."""
    without_slowest: RemovalGain
    """Without the slowest 3 % of workers, at least one; its share is M_W."""
    without_last_stage: RemovalGain | None
    """Its share is M_S. None if there is only one stage."""
    without_slow_workers: RemovalGain | None
    """None if there is no slow worker."""
    without_stragglers: RemovalGain
    """Every operation at its typical cost."""
    notes: list[str]


class _WhatIf:
    """Replays of the job with changed costs."""

    def __init__(self, ops: Operations, dag: Dag) -> None:
        self._dag = dag
        _, first, self._step = np.unique(ops.step, return_index=True, return_inverse=True)
        self.origin: Times = np.minimum.reduceat(ops.start_s, first)[self._step]
        self.costs = measured_costs(dag, self.origin, ops.start_s, ops.end_s, CLOCK_TOLERANCE_S)
        self.ideal = _typical_costs(ops, self.costs.work)
        self.as_measured = self.steps_s(self.costs.work)
        self.all_ideal = self.steps_s(self.ideal)

    def steps_s(self, work: Times) -> Times:
        """Return [steps] step times without launch delays."""
        _, end = replay(self._dag, self.origin, Costs(np.zeros(self._dag.size), work))
        return self.lengths_s(end)

    def lengths_s(self, end: Times) -> Times:
        """Return [steps] time from each step's origin to its last end."""
        last = np.zeros(int(self._step.max()) + 1)
        np.maximum.at(last, self._step, end - self.origin)
        return last

    def slowdown_by(self, chosen: OperationMask) -> float:
        """Return S_X of the chosen operations."""
        work = np.where(chosen, self.costs.work, self.ideal)
        return float(self.steps_s(work).mean() / self.all_ideal.mean())

    def without(self, chosen: OperationMask) -> RemovalGain:
        """Return the saving if the chosen operations took their typical time (T-X)."""
        left = self.steps_s(np.where(chosen, self.ideal, self.costs.work))
        t, t_ideal = self.as_measured.mean(), self.all_ideal.mean()
        lost = t - t_ideal
        return RemovalGain(
            share=float((t - left.mean()) / lost) if abs(lost) > _ROUNDING_SHARE * t_ideal else None,
            gain_ms=((self.as_measured - left) * 1e3).tolist(),
        )


def measure_stragglers(operations: Operations) -> Stragglers:
    """Measure the slowdown of a job by stragglers, and find the slow workers.

    Incomplete steps and operations of unknown kinds are excluded, both with a note. Raises UnusableInput if there is no complete step, or
    if operations wait for each other in a cycle.
    """
    ops, excluded_steps, notes = _usable_operations(operations)
    job = _WhatIf(ops, pipeline_dag(ops))
    by_replica = {int(r): job.slowdown_by(ops.replica == r) for r in np.unique(ops.replica)}
    by_stage = {int(s): job.slowdown_by(ops.stage == s) for s in np.unique(ops.stage)}
    workers = _workers(ops, job, by_replica, by_stage)
    slowest = [worker.rank for worker in workers[: math.ceil(len(workers) * SLOWEST_SHARE)]]
    slow_workers = _slow_workers(workers)
    return Stragglers(
        steps=np.unique(ops.step).tolist(),
        excluded_steps=excluded_steps,
        world_size=ops.world_size,
        replicas=len(by_replica),
        stages=len(by_stage),
        measured_steps_ms=(job.lengths_s(ops.end_s) * 1e3).tolist(),
        slowdown=float(job.as_measured.mean() / job.all_ideal.mean()),
        workers=workers,
        slow_workers=slow_workers,
        without_slowest=job.without(np.isin(ops.rank, slowest)),
        without_last_stage=job.without(ops.stage == max(by_stage)) if len(by_stage) > 1 else None,
        without_slow_workers=job.without(np.isin(ops.rank, slow_workers)) if slow_workers else None,
        without_stragglers=job.without(np.ones(ops.size, bool)),
        notes=notes,
    )


def _usable_operations(ops: Operations) -> tuple[Operations, int, list[str]]:
    """The operations of known kinds in complete steps, the number of excluded steps, and notes."""
    notes = list(ops.notes)
    places = _one_rank_each(ops, notes)
    known = places.of_kind(*KINDS)
    if not known.all():
        names = ", ".join(name for name in ops.kinds if name not in KINDS)
        notes.append(
            f"{ops.source}: {int((~known).sum())} operation(s) of unknown kind were skipped: {names}."
        )
    chosen = places.select(known)
    whole = whole_steps(chosen)
    if not whole.any():
        raise UnusableInput(
            f"{ops.source}: no step is whole: in each, a worker's optimizer or one end of a send and receive is "
            "missing."
        )
    steps = len(np.unique(places.step)) - len(np.unique(chosen.step[whole]))
    if steps:
        notes.append(f"{ops.source}: {steps} step(s) in which operations are missing were excluded.")
    return chosen.select(whole), steps, notes


def _one_rank_each(ops: Operations, notes: list[str]) -> Operations:
    """The operations of the lowest rank of each replica and stage. It represents all its tensor-parallel ranks, which run in lockstep."""
    place = ops.replica * (int(ops.stage.max(initial=0)) + 1) + ops.stage
    _, number = np.unique(place, return_inverse=True)
    lowest = np.full(int(number.max(initial=0)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(lowest, number, ops.rank)
    first = ops.rank == lowest[number]
    if not first.all():
        notes.append(
            f"{ops.source}: {len(np.unique(ops.rank[~first]))} rank(s) share a replica and stage with a lower "
            "one, which represents them."
        )
    return ops.select(first)


def _typical_costs(ops: Operations, work: Times) -> Times:
    """[N] cost of each operation in the ideal run."""
    ideal = np.empty(ops.size)
    for number, name in enumerate(ops.kinds):
        chosen = ops.kind == number
        if chosen.any():
            ideal[chosen] = np.median(work[chosen]) if name in COMMUNICATION else work[chosen].mean()
    return ideal


def _workers(
    ops: Operations, job: _WhatIf, by_replica: Mapping[int, float], by_stage: Mapping[int, float]
) -> list[Worker]:
    """All workers, slowest first; equally slow ones by rank."""
    ranks, rows = np.unique(ops.rank, return_index=True)
    place = {
        int(rank): (int(ops.replica[row]), int(ops.stage[row])) for rank, row in zip(ranks, rows, strict=True)
    }
    by_worker = {rank: min(by_replica[replica], by_stage[stage]) for rank, (replica, stage) in place.items()}
    order = sorted(by_worker, key=lambda rank: (-by_worker[rank], rank))
    least = CULPRIT_SHARE * (by_worker[order[0]] - 1)
    suspects = [rank for rank in order if by_worker[rank] - 1 >= least]
    alone = {rank: job.slowdown_by(ops.rank == rank) for rank in suspects[:_REPLAYED_ALONE]}
    compute = np.where(ops.of_kind(FORWARD, BACKWARD), ops.duration_s, 0.0)
    spent = np.bincount(np.searchsorted(ranks, ops.rank), compute) / len(job.all_ideal)
    compute_ms = dict(zip(ranks.tolist(), (spent * 1e3).tolist(), strict=True))
    return [
        Worker(
            rank=rank,
            replica=place[rank][0],
            stage=place[rank][1],
            slowdown=by_worker[rank],
            alone=alone.get(rank),
            compute_ms=compute_ms[rank],
        )
        for rank in order
    ]


def _slow_workers(workers: list[Worker]) -> list[int]:
    costs = {worker.rank: worker.alone - 1 for worker in workers if worker.alone is not None}
    worst = max(costs.values())
    if worst <= _ROUNDING_SHARE:
        return []
    return sorted(rank for rank, cost in costs.items() if cost >= CULPRIT_SHARE * worst)


_HIT_SHARE = 0.02
"""Least loss of a step that counts as hit, as a share of the mean step. Steps of one job vary by as much."""
_MOST_SLOW = 0.5
"""Largest share of slow workers for which single workers are named."""


def straggler_facts(stragglers: Stragglers) -> Facts:
    """Return the facts of the analysis; all other facts are None."""
    lengths = np.array(stragglers.measured_steps_ms)
    slow = [worker for worker in stragglers.workers if worker.rank in stragglers.slow_workers]
    stages = _slow_stages(stragglers, slow)
    cost = None
    if stragglers.without_slow_workers is not None and len(slow) <= _MOST_SLOW * len(stragglers.workers):
        cost = _cost(stragglers, stragglers.without_slow_workers, slow)
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
                stragglers, stragglers.without_stragglers, slow if cost is not None and not stages else None
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
    """Return a description of the result, with the quantities of the paper."""
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


def _slow_stages(stragglers: Stragglers, slow_workers: list[Worker]) -> list[int]:
    """Stages that are slow on every replica; empty if other workers are slow, too, or if there is only one replica, because a slow stage
    then cannot be distinguished from a slow machine."""
    stages = sorted({worker.stage for worker in slow_workers})
    are_whole = len(slow_workers) == len(stages) * stragglers.replicas and len(stages) < stragglers.stages
    return stages if are_whole and stragglers.replicas > 1 else []


def _cost(stragglers: Stragglers, removed: RemovalGain, slow_workers: list[Worker] | None) -> Cost:
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
