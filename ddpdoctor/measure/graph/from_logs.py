"""Build the dependency graph of the run from the step logs of all ranks.

Host time outside forward, backward and optimizer is split into Python and operators. A step log only has the regions that torch marks;
other computation in the loop (a loss, a hand-written layer, a model without DDP) looks like host work there. The profiler window shows
the operators, and their share of that time is applied to the whole run. The same holds for source lines: a line whose stack samples in
the window are inside operators computes, and is not Python work.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import (
    Array,
    Intervals,
    Ints,
    complement,
    covered,
    intersect,
    subtract,
    total,
    union,
)
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
from ddpdoctor.measure.window import Window, event_union, main_lane
from ddpdoctor.rundir.stepevents import EventKind

from .graph import CycleGroup, Graph, RankSteps, Sync, excluded_steps
from .segments import Segments, work_in
from .standalone_times import batch_time_ns, batches_per_step, standalone_data_ns

_MOST_CELLS = 20_000_000
"""Bound on N x K x R x C (8 bytes each), so that a long run of many ranks fits in memory."""

_NO_SYNC = "no collective that all ranks share"
_THINNED = "thinned"
_NO_CYCLE_BEFORE = "no measured step before it"
_MEMORY_BOUND = "left out, to bound memory"


def graph_of_logs(logs: Sequence[RankLog], operators: Mapping[int, OperatorShares] | None = None) -> Graph:
    """Build the graph of ``logs``, which are on a common clock, one per rank, ordered by rank.

    ``operators`` (by position): the share of a rank's host time that is computation.
    """
    ranks = tuple(log.rank for log in logs)
    matched, unmatched = match_syncs([log.sync_points for log in logs])
    measured, why = select_steps(logs)
    reasons = why
    origin_ns = min((log.start_ns for log in logs if log.steps), default=0)
    if matched:
        cycles, unmeasured = _cycles(matched, measured, ranks)
        reasons = {**reasons, **unmeasured}
        times = [_times(syncs, of_syncs, len(logs), origin_ns) for syncs, of_syncs in cycles.items()]
    else:
        times = _unmatched_times(logs, measured, origin_ns)
    activities = [log.activities.since(origin_ns) for log in logs]
    groups = [_cycle_group(of_cycles, activities, operators or {}) for of_cycles in times]
    batch_times = [batch_time_ns(log) for log in logs]
    batches = [batches_per_step(log) for log in logs]
    groups = [
        group.with_standalone(LateCause.DATA, standalone_data_ns(group, batch_times, batches))
        for group in groups
    ]
    steps = [_rank_steps(log, origin_ns) for log in logs]
    full = {step.number for log in logs for step in log.steps if step.in_full}

    def reason(number: int) -> str:
        return reasons.get(number) or (_NO_SYNC if number in full else _THINNED)

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
    step: int
    before: MatchedSync
    """The synchronisation of all ranks at whose end it begins."""
    syncs: Sequence[MatchedSync]


_ARRIVAL, _END = attrgetter("arrival_ns"), attrgetter("end_ns")
_Cycles = dict[tuple[Sync, ...], list[_Cycle]]
"""Cycles by their sequence of synchronisations."""


def _cycles(
    matched: Iterable[MatchedSync], measured: set[int], ranks: Sequence[int]
) -> tuple[_Cycles, dict[int, str]]:
    """The cycles of the measured steps, and the reason for each measured step without a cycle."""
    cycles: _Cycles = defaultdict(list)
    reasons: dict[int, str] = {}
    for step, cycle in _cycles_by_step(matched, len(ranks)):
        if step in measured and cycle is not None:
            cycles[tuple(_sync(sync, ranks) for sync in cycle.syncs)].append(cycle)
        elif step in measured:
            reasons[step] = _NO_CYCLE_BEFORE
    cells = sum(len(of_syncs) * len(syncs) for syncs, of_syncs in cycles.items()) * len(ranks) * len(INDEX)
    stride = max(1, -(-cells // _MOST_CELLS))
    if stride > 1:
        reasons |= {cycle.step: _MEMORY_BOUND for of_syncs in cycles.values() for cycle in of_syncs}
    return {syncs: of_syncs[::stride] for syncs, of_syncs in cycles.items()}, reasons


def _cycles_by_step(matched: Iterable[MatchedSync], world: int) -> Iterator[tuple[int, _Cycle | None]]:
    """The cycle of each step that has a synchronisation of all ranks; None if the previous step has none."""
    by_step: dict[int, list[MatchedSync]] = defaultdict(list)
    for sync in matched:
        by_step[sync.first.step].append(sync)
    carried: list[MatchedSync] = []
    previous: tuple[int, MatchedSync] | None = None
    for step in sorted(by_step):
        syncs = by_step[step]
        # The last reduction of gradients, else the last synchronisation of all ranks.
        full = [i for i, sync in enumerate(syncs) if len(sync.points) == world and sync.first.root is None]
        cut = max(
            (i for i in full if syncs[i].first.kind == SyncKind.GRADIENTS), default=max(full, default=None)
        )
        if cut is None:
            previous, carried = None, []
            continue
        if previous is not None and previous[0] == step - 1:
            yield step, _Cycle(step, previous[1], carried + syncs[: cut + 1])
        else:
            yield step, None
        previous, carried = (step, syncs[cut]), syncs[cut + 1 :]


def _sync(matched: MatchedSync, ranks: Sequence[int]) -> Sync:
    first = matched.first
    root = ranks.index(first.root) if first.root in ranks else None
    return Sync(
        kind=first.kind,
        name=first.name,
        members=tuple(sorted(matched.points)),
        micro=first.micro,
        group=first.group,
        # A root that was not recorded as a member is ignored.
        root=root if root in matched.points else None,
        update=first.update,
    )


class _Times(NamedTuple):
    """Arrival and end of each rank, in cycles with the same synchronisations."""

    syncs: tuple[Sync, ...]
    numbers: Sequence[int]
    segments: Segments
    message_bytes: Array
    """[N, K]"""


def _times(syncs: tuple[Sync, ...], cycles: Sequence[_Cycle], world: int, origin_ns: int) -> _Times:
    """The times of these cycles, in ns since ``origin_ns`` (an epoch time)."""

    def since(parts: Sequence[MatchedSync], time: Callable[[SyncPoint], int]) -> Array:
        """[N, members] ``time`` of each member's part, for synchronisations with the same members."""
        times = [[time(point) for point in part.points.values()] for part in parts]
        return (np.array(times, np.int64) - origin_ns).astype(float)

    arrival, end = np.full((2, len(cycles), len(syncs), world), np.nan)
    message = np.full((len(cycles), len(syncs)), np.nan)
    for k, sync in enumerate(syncs):
        members, matched = list(sync.members), [cycle.syncs[k] for cycle in cycles]
        message[:, k] = [each.first.message_bytes or np.nan for each in matched]
        arrival[:, k, members] = since(matched, _ARRIVAL)
        end[:, k, members] = np.maximum(since(matched, _END), arrival[:, k, members])
    begin = since([cycle.before for cycle in cycles], _END)
    return _Times(syncs, [cycle.step for cycle in cycles], Segments(begin, arrival, end), message)


def _unmatched_times(logs: Sequence[RankLog], measured: set[int], origin_ns: int) -> list[_Times]:
    """Cycles of ranks that never synchronize, cut at the ends of steps."""
    ranks = [{step.number: step for step in log.steps} for log in logs]
    numbers = [n for n in sorted(measured) if all(n in steps for steps in ranks)]
    if not numbers:
        return []
    begin = np.array([[steps[n].start_ns - origin_ns for steps in ranks] for n in numbers], float)
    end = np.array([[[steps[n].end_ns - origin_ns for steps in ranks]] for n in numbers], float)
    syncs = (Sync(SyncKind.STEP_END, SyncKind.STEP_END, tuple(range(len(logs)))),)
    no_message = np.full((len(numbers), 1), np.nan)
    return [_Times(syncs, numbers, Segments(begin, end.copy(), end), no_message)]


def _cycle_group(
    times: _Times, activities: Sequence[Activities], operators: Mapping[int, OperatorShares]
) -> CycleGroup:
    segments = times.segments
    work = work_in(segments, [(own.sets, Component.HOST) for own in activities])
    recorded = work.sum(axis=1)
    for r, shares in operators.items():
        left, right = segments.left[:, :, r], segments.right[:, :, r]
        _apply_operator_shares(work[:, :, r], activities[r], left, right, shares)
    begin, arrival, end = segments.begin, segments.arrival, segments.end
    numbers = np.array(times.numbers)
    return CycleGroup(times.syncs, numbers, begin, arrival, end, work, times.message_bytes, recorded)


def _apply_operator_shares(
    work: Array, activities: Activities, left: Array, right: Array, shares: OperatorShares
) -> None:
    """Move the operators' share of host time to computation, in the ``work`` [N, K, C] of a rank between two times [N, K]. If the share is
    from a window, it applies only up to the median host time: the window does not show what longer cycles contain."""
    for component in BETWEEN_PHASES:
        gap = np.nan_to_num(covered(activities.unrecorded_gaps(component), left, right))
        usual = np.minimum(gap, np.median(gap, axis=0)) if shares.measured else gap
        work[..., INDEX[component]] += usual * shares.phase_gaps[component]
        work[..., INDEX[Component.HOST]] -= usual * shares.phase_gaps[component]
    if not shares.phases_marked:
        host = np.clip(work[..., INDEX[Component.HOST]], 0, None)
        operators = np.minimum(host, np.median(host, axis=0)) * shares.overall
        work[..., INDEX[Component.HOST]] -= operators
        work[..., INDEX[Component.FORWARD]] += operators


def _rank_steps(log: RankLog, origin_ns: int) -> RankSteps:
    steps = log.steps
    # If the job computes on a device, another thread runs the backward pass, and the training thread's CPU time is incomplete.
    cpu = [np.nan if step.cpu_ns is None or log.computes_on_device else step.cpu_ns for step in steps]
    batches = [_batch_sizes(step) for step in steps]
    return RankSteps(
        np.array([step.number for step in steps], np.int64),
        np.array([step.start_ns - origin_ns for step in steps], float),
        np.array([step.end_ns - origin_ns for step in steps], float),
        np.array([sum(sizes) if sizes else np.nan for sizes in batches], float),
        np.array([np.nan if step.run_delay_ns is None else step.run_delay_ns for step in steps], float),
        np.array([_backward_passes(step) for step in steps], float),
        elements=np.array([_input_elements(step) for step in steps], float),
        cpu=np.array(cpu, float),
        batch=np.array([sum(sizes) / len(sizes) if sizes else np.nan for sizes in batches], float),
    )


def _backward_passes(step: Step) -> float:
    """Backward passes of the step; NaN if only its times were recorded."""
    return float(sum(e.kind == EventKind.BACKWARD for e in step.events)) if step.in_full else float("nan")


def _batch_sizes(step: Step) -> list[int]:
    """Samples of each batch of the step whose size is known."""
    return [event.count for event in step.events if event.gives_batch and event.count >= 0]


def _input_elements(step: Step) -> float:
    """Elements of the inputs of all forward passes of the step; NaN if one is unknown."""
    sizes = [event.elements for event in step.events if event.kind == EventKind.FORWARD]
    return float(sum(sizes)) if sizes and min(sizes) > 0 else float("nan")


class Tuning(msgspec.Struct, frozen=True):
    """Resolution, and the least data needed."""

    least_ns: int = 200_000
    """Least host time in the window. In less, the rounding of edges to the microsecond matters too much."""
    parts_per_gap: int = 64
    """Number of parts into which each gap is divided to locate operators."""
    prior: float = 0.5
    """Weight, in samples, of the rank's overall share of operators."""


TUNING = Tuning()
_EDGES = np.linspace(0.0, 1.0, TUNING.parts_per_gap + 1)
_Signature = tuple[str, ...]


class OperatorShares(msgspec.Struct, frozen=True):
    """Share (0 to 1) of a rank's host time in operators."""

    overall: float
    """Share of all host time."""
    phase_gaps: Mapping[Component, float]
    """Share of the gaps between the phases, by the component of operators there."""
    phases_marked: bool
    """Whether the log marks the phases, so that gaps are known."""
    measured: bool
    """Whether it was measured in a window."""


def operator_shares(logs: Sequence[RankLog], windows: Sequence[Window]) -> dict[int, OperatorShares]:
    """Return the operator shares by position of the log, for jobs on CPUs.

    If no window shows operators, time between a forward pass and its optimizer is assumed to be the loss, and the rest is unknown.
    """
    by_rank = {window.rank: window for window in windows if not window.on_device}
    shares = {}
    for position, log in enumerate(logs):
        window, phases_marked = by_rank.get(log.rank), bool(log.activities.gaps.kinds)
        known = _window_shares(log, window, phases_marked) if window is not None and log.steps else None
        if known is not None:
            shares[position] = known
        elif phases_marked:
            shares[position] = OperatorShares(0.0, {Component.LOSS: 1.0, Component.OUTSIDE: 0.0}, True, False)
    return shares


def _window_shares(log: RankLog, window: Window, phases_marked: bool) -> OperatorShares | None:
    """The shares in the window; None if it has too little host time."""
    host, origin_ns = _host_time(log, window), window.span[0]
    if total(host) <= TUNING.least_ns:
        return None
    starts, ends = _operator_intervals(window)
    operators = (starts - origin_ns, ends - origin_ns)
    gaps = log.activities.since(origin_ns)
    whole = total(intersect(host, operators)) / total(host)
    phase_gaps = {}
    for component in BETWEEN_PHASES:
        part = intersect(host, gaps.unrecorded_gaps(component))
        shown = total(part) > TUNING.least_ns
        phase_gaps[component] = (
            total(intersect(part, operators)) / total(part) if shown else whole * phases_marked
        )
    return OperatorShares(whole, phase_gaps, phases_marked, True)


def _host_time(log: RankLog, window: Window) -> Intervals:
    """Intervals of the window, ns since its begin, in which the log marks neither work nor a synchronisation. Evaluations are excluded,
    because their operators do not represent training steps."""
    origin_ns, end_ns = window.span
    marked = list(log.activities.since(origin_ns).sets.values())
    syncs = np.array([(p.arrival_ns - origin_ns, p.end_ns - origin_ns) for p in log.sync_points], float)
    starts, ends = zip(*marked, syncs.reshape(-1, 2).T, strict=True)
    taken = union(np.concatenate(starts), np.concatenate(ends))
    evaluating = [(step.start_ns, step.end_ns) for step in log.steps if step.number in log.evaluated]
    begins, over = (np.array(evaluating, np.int64).reshape(-1, 2) - origin_ns).astype(float).T
    return subtract(complement(taken, 0.0, float(end_ns - origin_ns)), (begins, over))


def _operator_intervals(window: Window) -> Intervals:
    """Union of the operators on the training thread, epoch ns."""
    trace = window.trace
    return event_union(trace, trace.category_mask("cpu_op") & (trace.lane == main_lane(trace)))


class _OperatorPattern:
    """Where operators run in the gaps between events of the log, averaged over the steps inside the window."""

    def __init__(self, log: RankLog, window: Window) -> None:
        self.origin_ns, end_ns = window.span
        starts, ends = union(*_operator_intervals(window))
        operators = (starts - self.origin_ns, ends - self.origin_ns)
        shares: dict[_Signature, list[NDArray[np.float64]]] = defaultdict(list)
        for step in log.steps:
            if step.start_ns >= self.origin_ns and step.end_ns <= end_ns:
                signature, left, right = self._gaps(step)
                edges = left[:, None] + (right - left)[:, None] * _EDGES
                filled = covered(operators, edges[:, :-1], edges[:, 1:])
                shares[signature].append(filled / np.diff(edges, axis=1))
        self._filled = {signature: np.mean(of_steps, axis=0) for signature, of_steps in shares.items()}

    def _gaps(self, step: Step) -> tuple[_Signature, NDArray[np.float64], NDArray[np.float64]]:
        """Kinds of a step's events, in order, and begin and end of the gaps before, between and after them, ns since the origin."""
        kinds, left, right = [], [step.start_ns], []
        for event in sorted(step.events, key=lambda event: event.start_ns):
            if event.kind == EventKind.MORE:
                continue
            begin, end = step.start_of(event), step.end_of(event)
            if begin > left[-1]:
                kinds.append(event.kind)
                right.append(begin)
                left.append(end)
            else:
                left[-1] = max(left[-1], end)
        right.append(max(step.end_ns, left[-1]))
        starts, ends = np.array([left, right], float) - self.origin_ns
        return tuple(kinds), starts, np.maximum(ends, starts + 1.0)

    def operators_at(self, step: Step, times: Ints) -> NDArray[np.float64] | None:
        """Return the probability that an operator runs at each of these times (epoch ns) of a step; NaN inside an event of the log. None if
        no step of the window has the same sequence of events."""
        signature, left, right = self._gaps(step)
        filled = self._filled.get(signature)
        if filled is None:
            return None
        at = times.astype(float) - self.origin_ns
        gap = np.maximum(np.searchsorted(left, at, side="right") - 1, 0)
        place = np.floor((at - left[gap]) / (right[gap] - left[gap]) * TUNING.parts_per_gap)
        inside = (place >= 0) & (place < TUNING.parts_per_gap)
        shares: NDArray[np.float64] = filled[gap, np.clip(place, 0, TUNING.parts_per_gap - 1).astype(int)]
        return np.where(inside, shares, np.nan)


def python_parts(
    logs: Sequence[RankLog], windows: Sequence[Window], shares: Mapping[int, OperatorShares]
) -> list[dict[tuple[str, int], float]]:
    """Return by position: file and number of a user line -> share (0 to 1) of its samples that is Python, not an operator.

    A sample counts by the probability that an operator runs at its position between the events of the step log, in steps of the window
    with the same events. The operators' share of all host time (``shares``, see :func:`operator_shares`) is a prior with the weight of half
    a sample, because most lines are entirely one or the other. Without a window the result is empty.
    """
    by_rank = {window.rank: window for window in windows if not window.on_device}
    return [
        _python_parts(log, by_rank[log.rank], shares[position].overall)
        if log.rank in by_rank and position in shares and shares[position].measured
        else {}
        for position, log in enumerate(logs)
    ]


def _python_parts(log: RankLog, window: Window, usual: float) -> dict[tuple[str, int], float]:
    """:func:`python_parts` of one rank; ``usual`` is the share of its host time in operators."""
    pattern = _OperatorPattern(log, window)
    lines = {number: (place.file, place.line) for number, place in log.sample_where.items()}
    seen: Counter[tuple[str, int] | None] = Counter()
    computing: defaultdict[tuple[str, int] | None, float] = defaultdict(float)
    places = log.steps_at(log.samples[:, 0])
    order = np.argsort(places, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(places[order])) + 1):
        if not len(rows) or places[rows[0]] < 0:
            continue
        operators = pattern.operators_at(log.steps[places[rows[0]]], log.samples[rows, 0])
        if operators is None:
            continue
        for number, probability in zip(log.samples[rows, 1].tolist(), operators.tolist(), strict=True):
            if probability == probability:  # not NaN
                seen[lines.get(number)] += 1
                computing[lines.get(number)] += probability
    return {
        line: 1.0 - (computing[line] + TUNING.prior * usual) / (seen[line] + TUNING.prior)
        for line in lines.values()
    }
