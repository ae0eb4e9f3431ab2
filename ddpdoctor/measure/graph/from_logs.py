"""Step logs of all ranks → the dependency graph of the run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

import msgspec
import numpy as np

from ddpdoctor.measure.numerics import Array, covered
from ddpdoctor.measure.steplog import (
    Activities,
    MatchedSync,
    RankLog,
    Step,
    SyncPoint,
    match_syncs,
    select_steps,
)
from ddpdoctor.measure.taxonomy import BETWEEN_PHASES, INDEX, Component, LateCause, SyncKind
from ddpdoctor.rundir import EventKind

from .graph import CycleGroup, Graph, RankSteps, Sync, excluded_steps
from .operators import OperatorShares
from .segments import Segments, work_in
from .standalone_times import batch_time_ns, batches_per_step, standalone_data_ns

_MOST_CELLS = 20_000_000
"""Bound on N x K x R x C, so that a long run of many ranks stays in memory (8 bytes each)."""

_NO_SYNC = "no collective that all ranks share"
_ONLY_TIMES = "thinned"
_NONE_BEFORE = "no measured step before it"
_BOUNDED = "left out, to bound memory"


def graph_of_logs(logs: Sequence[RankLog], operators: Mapping[int, OperatorShares] | None = None) -> Graph:
    """Build the graph; ``logs`` are on a common clock, one per rank, ordered by rank.

    ``operators`` (by position): the part of a rank's host time that is computation, see :mod:`.operators`.
    """
    ranks = tuple(log.rank for log in logs)
    matched, unmatched = match_syncs([log.sync_points for log in logs])
    measured, why = select_steps(logs)
    reasons = why
    origin_ns = min((log.start_ns for log in logs if log.steps), default=0)
    builder = _Builder(origin_ns, [log.activities.since(origin_ns) for log in logs], operators or {})
    if matched:
        cycles, unmeasured = _cycles(matched, measured, ranks)
        reasons = {**reasons, **unmeasured}
        groups = [builder.group(syncs, of_kind) for syncs, of_kind in cycles.items()]
    else:
        groups = builder.unmatched_cycles(logs, measured)
    batch_times = [batch_time_ns(log) for log in logs]
    batches = [batches_per_step(log) for log in logs]
    groups = [
        group.with_standalone(LateCause.DATA, standalone_data_ns(group, batch_times, batches))
        for group in groups
    ]
    steps = [_rank_steps(log, origin_ns) for log in logs]
    full = {step.number for log in logs for step in log.steps if step.in_full}

    def reason(number: int) -> str:
        return reasons.get(number) or (_NO_SYNC if number in full else _ONLY_TIMES)

    return Graph(
        "step-log",
        ranks,
        groups,
        steps,
        excluded_steps(steps, groups, reason),
        why,
        matched=len(matched),
        unmatched=unmatched,
    )


class _Cycle(msgspec.Struct, frozen=True):
    """From the end of one synchronisation of all ranks to the end of the one that ends the next step's cycle."""

    step: int
    before: MatchedSync
    """The synchronisation at whose end it begins."""
    syncs: Sequence[MatchedSync]


_ARRIVAL, _END = attrgetter("arrival_ns"), attrgetter("end_ns")
_Cycles = dict[tuple[Sync, ...], list[_Cycle]]
"""Cycles by their sequence of synchronisations."""


def _cycles(
    matched: Iterable[MatchedSync], measured: set[int], ranks: Sequence[int]
) -> tuple[_Cycles, dict[int, str]]:
    """The cycles of the measured steps, and for measured steps without one the reason."""
    cycles: _Cycles = defaultdict(list)
    reasons: dict[int, str] = {}
    for step, cycle in _of_steps(matched, len(ranks)):
        if step in measured and cycle is not None:
            cycles[tuple(_sync(sync, ranks) for sync in cycle.syncs)].append(cycle)
        elif step in measured:
            reasons[step] = _NONE_BEFORE
    cells = sum(len(alike) * len(syncs) for syncs, alike in cycles.items()) * len(ranks) * len(INDEX)
    stride = max(1, -(-cells // _MOST_CELLS))
    if stride > 1:
        reasons |= {cycle.step: _BOUNDED for alike in cycles.values() for cycle in alike}
    return {syncs: alike[::stride] for syncs, alike in cycles.items()}, reasons


def _of_steps(matched: Iterable[MatchedSync], world: int) -> Iterator[tuple[int, _Cycle | None]]:
    """The cycle of each step that a synchronisation of all ranks cuts; None where the step before has no cut."""
    by_step: dict[int, list[MatchedSync]] = defaultdict(list)
    for sync in matched:
        by_step[sync.first.step].append(sync)
    carried: list[MatchedSync] = []
    previous: tuple[int, MatchedSync] | None = None
    for step in sorted(by_step):
        syncs = by_step[step]
        cut = _cut(syncs, world)
        if cut is None:
            previous, carried = None, []
            continue
        if previous is not None and previous[0] == step - 1:
            yield step, _Cycle(step, previous[1], carried + syncs[: cut + 1])
        else:
            yield step, None
        previous, carried = (step, syncs[cut]), syncs[cut + 1 :]


def _cut(syncs: Sequence[MatchedSync], world: int) -> int | None:
    """Where a step's cycle ends: its last reduction of gradients, else its last synchronisation of all ranks."""
    full = [i for i, sync in enumerate(syncs) if len(sync.points) == world and sync.first.root is None]
    gradients = [i for i in full if syncs[i].first.kind == SyncKind.GRADIENTS]
    chosen = gradients or full
    return chosen[-1] if chosen else None


def _sync(matched: MatchedSync, ranks: Sequence[int]) -> Sync:
    first = matched.first
    root = ranks.index(first.root) if first.root in ranks else None
    return Sync(
        kind=first.kind,
        name=first.name,
        members=tuple(sorted(matched.points)),
        micro=first.micro,
        group=first.group,
        # As far as is known, no rank waits for a root that was not recorded as a member.
        root=root if root in matched.points else None,
        update=first.update,
    )


class _Builder(msgspec.Struct, frozen=True):
    """Builds groups of cycles: when each rank arrived and continued, and what it did in between."""

    origin_ns: int
    """Epoch ns from which all times of the graph count."""
    activities: Sequence[Activities]
    operators: Mapping[int, OperatorShares]

    def group(self, syncs: tuple[Sync, ...], cycles: Sequence[_Cycle]) -> CycleGroup:
        """The group of cycles with the same synchronisations."""
        world = len(self.activities)
        arrival = np.full((len(cycles), len(syncs), world), np.nan)
        end = np.full((len(cycles), len(syncs), world), np.nan)
        message = np.full((len(cycles), len(syncs)), np.nan)
        begin = self._since([cycle.before for cycle in cycles], _END)
        for k, sync in enumerate(syncs):
            members, alike = list(sync.members), [cycle.syncs[k] for cycle in cycles]
            message[:, k] = [each.first.message_bytes or np.nan for each in alike]
            arrived = self._since(alike, _ARRIVAL)
            arrival[:, k, members] = arrived
            end[:, k, members] = np.maximum(self._since(alike, _END), arrived)
        return self._group(syncs, [cycle.step for cycle in cycles], begin, arrival, end, message)

    def _since(self, syncs: Sequence[MatchedSync], time: Callable[[SyncPoint], int]) -> Array:
        """[N, members] ns after the origin: ``time`` of each member's part in synchronisations with the same members."""
        times = [[time(point) for point in sync.points.values()] for sync in syncs]
        return (np.array(times, np.int64) - self.origin_ns).astype(float)

    def unmatched_cycles(self, logs: Sequence[RankLog], measured: set[int]) -> list[CycleGroup]:
        """Cycles of ranks that never synchronize: cut at the ends of the optimizer's steps."""
        ranks = [{step.number: step for step in log.steps} for log in logs]
        numbers = [n for n in sorted(measured) if all(n in steps for steps in ranks)]
        if not numbers:
            return []
        begin = np.array([[steps[n].start_ns - self.origin_ns for steps in ranks] for n in numbers], float)
        end = np.array([[steps[n].end_ns - self.origin_ns for steps in ranks] for n in numbers], float)
        arrival = end[:, None, :]
        syncs = (Sync(SyncKind.STEP_END, SyncKind.STEP_END, tuple(range(len(logs)))),)
        no_message = np.full((len(numbers), 1), np.nan)
        return [self._group(syncs, numbers, begin, arrival.copy(), arrival, no_message)]

    def _group(
        self,
        syncs: tuple[Sync, ...],
        numbers: Sequence[int],
        begin: Array,
        arrival: Array,
        end: Array,
        message: Array,
    ) -> CycleGroup:
        """The group of cycles with these times, and the components of each segment."""
        segments = Segments(begin, arrival, end)
        work = work_in(segments, [(own.sets, Component.HOST) for own in self.activities])
        recorded = work.sum(axis=1)
        for r, shares in self.operators.items():
            unmarked = (self.activities[r].unmarked(component) for component in BETWEEN_PHASES)
            left, right = segments.left[:, :, r], segments.right[:, :, r]
            _count_operators(
                work[:, :, r], [np.nan_to_num(covered(gap, left, right)) for gap in unmarked], shares
            )
        return CycleGroup(syncs, np.array(numbers), begin, arrival, end, work, message, recorded)


def _count_operators(work: Array, gaps: Sequence[Array], shares: OperatorShares) -> None:
    """Count, in the ``work`` [N, K, C] of a rank, the operators' share of its usual host time as computation; the window does not show
    what a cycle has beyond the usual. ``gaps``, [N, K] ns each: the host time between marked phases."""
    for gap, component in zip(gaps, BETWEEN_PHASES, strict=True):
        share = shares.phase_gaps[component]
        usual = np.minimum(gap, np.median(gap, axis=0)) if shares.seen else gap
        work[..., INDEX[component]] += usual * share
        work[..., INDEX[Component.HOST]] -= usual * share
    if not shares.marked:
        host = np.clip(work[..., INDEX[Component.HOST]], 0, None)
        operators = np.minimum(host, np.median(host, axis=0)) * shares.whole
        work[..., INDEX[Component.HOST]] -= operators
        work[..., INDEX[Component.FORWARD]] += operators


def _rank_steps(log: RankLog, origin_ns: int) -> RankSteps:
    steps = log.steps
    # Of a job on a device, another thread runs the backward pass: the training thread's time on a CPU is a part only.
    cpu = [np.nan if step.cpu_ns is None else step.cpu_ns for step in steps]
    return RankSteps(
        np.array([step.number for step in steps], np.int64),
        np.array([step.start_ns - origin_ns for step in steps], float),
        np.array([step.end_ns - origin_ns for step in steps], float),
        np.array([_samples(step) for step in steps], float),
        np.array([np.nan if step.run_delay_ns is None else step.run_delay_ns for step in steps], float),
        np.array([sum(e.kind == EventKind.BACKWARD for e in step.events) for step in steps], float),
        elements=np.array([_input_elements(step) for step in steps], float),
        cpu=None if log.computes_on_device else np.array(cpu, float),
    )


def _samples(step: Step) -> float:
    """Samples of all batches of the step; NaN where no size is known."""
    sizes = [event.count for event in step.events if event.gives_batch and event.count >= 0]
    return float(sum(sizes)) if sizes else float("nan")


def _input_elements(step: Step) -> float:
    """Elements of the inputs of all forwards of the step; NaN where one is unknown."""
    sizes = [event.elements for event in step.events if event.kind == EventKind.FORWARD]
    return float(sum(sizes)) if sizes and min(sizes) > 0 else float("nan")
