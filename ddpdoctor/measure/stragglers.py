"""How much of a pipeline- and data-parallel job's step time is stragglers' and whose, by what-if analysis.

After Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI '25, section 3.
All step times are means over the steps of replays without launch delays; with

    T          every operation as measured
    T_ideal    every operation at its kind's typical cost: the mean of computations, the median of communication
    T_ideal+X  the operations X as measured, all others ideal
    T-X        the operations X ideal, all others as measured

    S    = T / T_ideal                      (eq. 1)  slowdown of the job; 1 where nothing straggles
    S_X  = T_ideal+X / T_ideal              (eq. 2)  slowdown by X alone: kind, replica or stage
    S_w  = min(S_replica, S_stage)          (eq. 4)  slowdown by the worker there
    M_W  = (T - T-W) / (T - T_ideal)        (eq. 5)  share of the slowdown that goes with the slowest 3 % of workers
    M_S  = (T - T-L) / (T - T_ideal)                 share that goes with the last stage

M_W near 1 says that single workers are slow, M_S near 1 that the stages are cut unevenly. Neither is bounded by
0 and 1: taking one delay away may lengthen or uncover another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddpdoctor.errors import UnusableInput
from ddpdoctor.measure.dag import Costs, Dag, Times, measured, replay
from ddpdoctor.measure.pipelinedag import COMMUNICATION, KINDS, PEER_TO_PEER, pipeline_dag, whole_steps
from ddpdoctor.trace.operations import Operations

Chosen = NDArray[np.bool_]

SLOWEST_SHARE = 0.03
"""Share of the workers that counts as the slowest, for M_W. Source: the paper, section 3."""
CLOCK_TOLERANCE_S = 0.01
"""Costs this far below 0 are taken for differences between clocks. Source: the paper's published analysis."""


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline stage of one replica."""

    rank: int
    replica: int
    stage: int
    slowdown: float
    """S_w: step time with this worker's replica and stage as measured over the ideal one."""


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """What is gained where some operations take their typical time."""

    share: float | None
    """Share of the job's slowdown that goes (M_W, M_S); None where there is no slowdown to share."""
    step_ms: float
    """Mean step time that is left."""
    speedup: float
    """Mean step time as replayed, over that."""


class Stragglers(msgspec.Struct, frozen=True, kw_only=True):
    """The what-if analysis of one job."""

    steps: int
    """Steps analysed."""
    set_aside: int
    """Steps left out because operations are missing in them."""
    world_size: int | None
    replicas: int
    stages: int
    measured_step_ms: float
    """Mean step time as measured."""
    step_ms: float
    """T: the same without the launch delays, that is the time in which the graph explains no operation."""
    ideal_step_ms: float
    """T_ideal."""
    slowdown: float
    """S = T / T_ideal."""
    launch_slowdown: float
    """Measured step time over T."""
    workers: list[Worker]
    """Slowest first."""
    slowest: list[int]
    """Ranks of the slowest 3 % of workers (at least one)."""
    by_replica: dict[int, float]
    """S of each replica."""
    by_stage: dict[int, float]
    """S of each pipeline stage."""
    by_kind: dict[str, float]
    """S of each kind of operation; both ends of the messages between stages together, as ``forward-pp-comm``
    and ``backward-pp-comm``."""
    without_slowest: Removed
    """Its share is M_W."""
    without_last_stage: Removed | None
    """Its share is M_S. None where there is one stage."""
    notes: list[str]


class _WhatIf:
    """The job under changed costs."""

    def __init__(self, ops: Operations, dag: Dag) -> None:
        self._dag = dag
        _, first, self._step = np.unique(ops.step, return_index=True, return_inverse=True)
        self.origin: Times = np.minimum.reduceat(ops.start_s, first)[self._step]
        self.costs = measured(dag, self.origin, ops.start_s, ops.end_s, CLOCK_TOLERANCE_S)
        self.ideal = _typical(ops, self.costs.work)
        self.as_measured = self.step_s(self.costs.work)
        self.all_ideal = self.step_s(self.ideal)

    def step_s(self, work: Times) -> float:
        """Mean step time without launch delays."""
        _, end = replay(self._dag, self.origin, Costs(np.zeros(self._dag.size), work))
        return self.mean_step_s(end)

    def mean_step_s(self, end: Times) -> float:
        """Mean over the steps of the last end, counted from the step's origin."""
        last = np.zeros(int(self._step.max()) + 1)
        np.maximum.at(last, self._step, end - self.origin)
        return float(last.mean())

    def slowdown_by(self, chosen: Chosen) -> float:
        """S_X"""
        return self.step_s(np.where(chosen, self.costs.work, self.ideal)) / self.all_ideal

    def without(self, chosen: Chosen) -> Removed:
        """T-X and what follows from it."""
        left = self.step_s(np.where(chosen, self.ideal, self.costs.work))
        lost = self.as_measured - self.all_ideal
        share = (self.as_measured - left) / lost if abs(lost) > 1e-9 * self.all_ideal else None
        return Removed(share=share, step_ms=left * 1e3, speedup=self.as_measured / left)


def measure_stragglers(operations: Operations) -> Stragglers:
    """The slowdown of a job by stragglers, and by whom.

    Steps that are not whole are set aside, operations of kinds that are not known are left out, both with a
    note. Raises UnusableInput where no whole step is left or the order of operations contradicts itself.
    """
    ops, set_aside, notes = _usable(operations)
    job = _WhatIf(ops, pipeline_dag(ops))
    by_replica = {int(r): job.slowdown_by(ops.replica == r) for r in np.unique(ops.replica)}
    by_stage = {int(s): job.slowdown_by(ops.stage == s) for s in np.unique(ops.stage)}
    workers = _workers(ops, by_replica, by_stage)
    slowest = [worker.rank for worker in workers[: math.ceil(len(workers) * SLOWEST_SHARE)]]
    measured_s = job.mean_step_s(ops.end_s)
    return Stragglers(
        steps=len(np.unique(ops.step)),
        set_aside=set_aside,
        world_size=ops.world_size,
        replicas=len(by_replica),
        stages=len(by_stage),
        measured_step_ms=measured_s * 1e3,
        step_ms=job.as_measured * 1e3,
        ideal_step_ms=job.all_ideal * 1e3,
        slowdown=job.as_measured / job.all_ideal,
        launch_slowdown=measured_s / job.as_measured,
        workers=workers,
        slowest=slowest,
        by_replica=by_replica,
        by_stage=by_stage,
        by_kind={name: job.slowdown_by(ops.of_kind(*kinds)) for name, kinds in _families(ops).items()},
        without_slowest=job.without(np.isin(ops.rank, slowest)),
        without_last_stage=job.without(ops.stage == max(by_stage)) if len(by_stage) > 1 else None,
        notes=notes,
    )


def _usable(ops: Operations) -> tuple[Operations, int, list[str]]:
    """The operations of known kinds in whole steps, the number of other steps, and notes."""
    notes = list(ops.notes)
    ops = _one_rank_each(ops, notes)
    known = ops.of_kind(*KINDS)
    if not known.all():
        names = ", ".join(name for name in ops.kinds if name not in KINDS)
        notes.append(
            f"{ops.source}: {int((~known).sum())} operation(s) of unknown kind were left out: {names}."
        )
    chosen = ops.only(known)
    whole = whole_steps(chosen)
    if not whole.any():
        raise UnusableInput(
            f"{ops.source}: no step is whole: in each, a worker's optimizer or one end of a send and receive is "
            "missing."
        )
    steps = len(np.unique(ops.step)) - len(np.unique(chosen.step[whole]))
    if steps:
        notes.append(f"{ops.source}: {steps} step(s) in which operations are missing were set aside.")
    return chosen.only(whole), steps, notes


def _one_rank_each(ops: Operations, notes: list[str]) -> Operations:
    """The lowest rank of each replica and stage: tensor-parallel ranks go in lockstep, one stands for all."""
    place = ops.replica * (int(ops.stage.max(initial=0)) + 1) + ops.stage
    _, number = np.unique(place, return_inverse=True)
    lowest = np.full(int(number.max(initial=0)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(lowest, number, ops.rank)
    first = ops.rank == lowest[number]
    if not first.all():
        notes.append(
            f"{ops.source}: {len(np.unique(ops.rank[~first]))} rank(s) share a replica and stage with a lower "
            "one, which stands for them."
        )
    return ops.only(first)


def _families(ops: Operations) -> dict[str, list[str]]:
    """Kinds of operations that are weighed together."""
    families: dict[str, list[str]] = {}
    for name in ops.kinds:
        if ops.of_kind(name).any():
            family = f"{name.partition('-')[0]}-pp-comm" if name in PEER_TO_PEER else name
            families.setdefault(family, []).append(name)
    return families


def _typical(ops: Operations, work: Times) -> Times:
    """[N] what each operation costs in the ideal run."""
    ideal = np.empty(ops.size)
    for number, name in enumerate(ops.kinds):
        chosen = ops.kind == number
        if chosen.any():
            ideal[chosen] = np.median(work[chosen]) if name in COMMUNICATION else work[chosen].mean()
    return ideal


def _workers(ops: Operations, by_replica: Mapping[int, float], by_stage: Mapping[int, float]) -> list[Worker]:
    """Slowest first; of equals, the lower rank."""
    _, rows = np.unique(ops.rank, return_index=True)
    workers = [
        Worker(
            rank=int(ops.rank[row]),
            replica=int(ops.replica[row]),
            stage=int(ops.stage[row]),
            slowdown=min(by_replica[int(ops.replica[row])], by_stage[int(ops.stage[row])]),
        )
        for row in rows
    ]
    return sorted(workers, key=lambda worker: (-worker.slowdown, worker.rank))
