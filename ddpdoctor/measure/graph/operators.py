"""Operators outside forward, backward and optimizer: is a rank's own time in its loop Python, or computation?

A step log knows the regions that torch marks; what a loop computes besides (a loss, a hand-written layer, a
model without DDP) looks like host work there. The profiled window shows the operators, and their share of
that time is taken for the whole run. The same for source lines: one that stack samples in the window meet inside operators
computes, and is not what a loop's Python does.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import Intervals, Ints, complement, covered, intersect, subtract, total, union
from ddpdoctor.measure.steplog import RankLog, Step
from ddpdoctor.measure.taxonomy import BETWEEN_PHASES, Component
from ddpdoctor.measure.window import Window, event_union, main_lane
from ddpdoctor.rundir import EventKind


class Tuning(msgspec.Struct, frozen=True):
    """How finely operators are looked for, and how much is needed to tell."""

    least_ns: int = 200_000
    """Host time in the window: of less, edges of events that are read to the microsecond are too large a part."""
    places: int = 64
    """Parts of each gap in which operators are looked for."""
    prior: float = 0.5
    """Samples' worth of what is known of all lines together."""


TUNING = Tuning()
_EDGES = np.linspace(0.0, 1.0, TUNING.places + 1)
_Signature = tuple[str, ...]


class OperatorShares(msgspec.Struct, frozen=True):
    """Which part (0 to 1) of a rank's host time operators fill."""

    whole: float
    """Of all of it."""
    phase_gaps: Mapping[Component, float]
    """Of the gaps between the phases, by the kind of work that operators are there."""
    marked: bool
    """Whether the log marks the phases, so that a gap is one."""
    seen: bool
    """Whether a window showed it."""


def operator_shares(logs: Sequence[RankLog], windows: Sequence[Window]) -> dict[int, OperatorShares]:
    """By position of the log. Of jobs on CPUs only.

    Where no window shows operators, what lies between a forward pass and its optimizer is taken for the loss that a step
    needs there, and all else for unknown.
    """
    by_rank = _on_hosts(windows)
    shares = {}
    for position, log in enumerate(logs):
        window, marked = by_rank.get(log.rank), bool(log.activities.gaps.kinds)
        known = _seen(log, window, marked) if window is not None and log.steps else None
        if known is not None:
            shares[position] = known
        elif marked:
            shares[position] = OperatorShares(0.0, {Component.LOSS: 1.0, Component.OUTSIDE: 0.0}, True, False)
    return shares


def _seen(log: RankLog, window: Window, marked: bool) -> OperatorShares | None:
    """What the window shows; None where there is too little host time in it."""
    host, origin_ns = _host_time(log, window), window.span[0]
    if total(host) <= TUNING.least_ns:
        return None
    starts, ends = _operators(window)
    operators = (starts - origin_ns, ends - origin_ns)
    gaps = log.activities.since(origin_ns)
    parts = {component: intersect(host, gaps.unmarked(component)) for component in BETWEEN_PHASES}
    whole = _filled(host, operators) or 0.0
    phase_gaps = {component: _filled(part, operators) for component, part in parts.items()}
    known = {component: whole * marked if share is None else share for component, share in phase_gaps.items()}
    return OperatorShares(whole, known, marked, True)


def _filled(host: Intervals, operators: Intervals) -> float | None:
    """The part of host time that operators fill; None of next to nothing."""
    whole = total(host)
    return total(intersect(host, operators)) / whole if whole > TUNING.least_ns else None


def _on_hosts(windows: Sequence[Window]) -> dict[int, Window]:
    """By rank: those in which the host computes."""
    return {window.rank: window for window in windows if not window.on_device}


def _host_time(log: RankLog, window: Window) -> Intervals:
    """Where the log marks neither work nor a synchronisation, within the window and outside of evaluations: what a job
    computes there outside of DDP says nothing of training steps. In ns since the window's begin."""
    origin_ns, end_ns = window.span
    marked = list(log.activities.since(origin_ns).sets.values())
    syncs = np.array([(p.arrival_ns - origin_ns, p.end_ns - origin_ns) for p in log.sync_points], float)
    starts, ends = zip(*marked, syncs.reshape(-1, 2).T, strict=True)
    taken = union(np.concatenate(starts), np.concatenate(ends))
    evaluating = [(step.start_ns, step.end_ns) for step in log.steps if step.number in log.evaluated]
    begins, over = (np.array(evaluating, np.int64).reshape(-1, 2) - origin_ns).astype(float).T
    return subtract(complement(taken, 0.0, float(end_ns - origin_ns)), (begins, over))


def _operators(window: Window) -> Intervals:
    """Starts and ends, epoch ns, of the operators on the training thread."""
    trace = window.trace
    return event_union(trace, trace.category_mask("cpu_op") & (trace.lane == main_lane(trace)))


class _Pattern:
    """Where operators run in the gaps between what the log marks, as the steps inside the window show it."""

    def __init__(self, log: RankLog, window: Window) -> None:
        self.origin_ns, end_ns = window.span
        starts, ends = union(*_operators(window))
        operators = (starts - self.origin_ns, ends - self.origin_ns)
        shares: dict[_Signature, list[NDArray[np.float64]]] = defaultdict(list)
        for step in log.steps:
            if step.start_ns >= self.origin_ns and step.end_ns <= end_ns:
                signature, left, right = self._gaps(step)
                edges = left[:, None] + (right - left)[:, None] * _EDGES
                filled = covered(operators, edges[:, :-1], edges[:, 1:])
                shares[signature].append(filled / np.diff(edges, axis=1))
        self._filled = {signature: np.mean(alike, axis=0) for signature, alike in shares.items()}

    def _gaps(self, step: Step) -> tuple[_Signature, NDArray[np.float64], NDArray[np.float64]]:
        """Kinds of what is marked in a step, in order, and the gaps before, between and after, in ns since the origin."""
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
        """Probability that an operator runs at each of these times of a step, epoch ns; NaN inside of what is marked. None
        where no step of the window is like it.
        """
        signature, left, right = self._gaps(step)
        filled = self._filled.get(signature)
        if filled is None:
            return None
        at = times.astype(float) - self.origin_ns
        gap = np.maximum(np.searchsorted(left, at, side="right") - 1, 0)
        place = np.floor((at - left[gap]) / (right[gap] - left[gap]) * TUNING.places)
        inside = (place >= 0) & (place < TUNING.places)
        shares: NDArray[np.float64] = filled[gap, np.clip(place, 0, TUNING.places - 1).astype(int)]
        return np.where(inside, shares, np.nan)


def python_parts(
    logs: Sequence[RankLog], windows: Sequence[Window], shares: Mapping[int, OperatorShares]
) -> list[dict[tuple[str, int], float]]:
    """By position: file and number of a user line -> part (0 to 1) of its samples that is Python, not an operator.

    A sample tells by its place between what the step log marks: whether operators run there in the steps of the window
    that are marked alike. With the weight of half a sample, the operators' share of all host time (``shares``, see
    :func:`operator_shares`) counts beside them: a line is mostly one or the other. Lines without such samples have that
    share; where there was no window, no line is here.
    """
    by_rank = _on_hosts(windows)
    return [
        _python_parts(log, by_rank[log.rank], shares[position].whole)
        if log.rank in by_rank and position in shares and shares[position].seen
        else {}
        for position, log in enumerate(logs)
    ]


def _python_parts(log: RankLog, window: Window, usual: float) -> dict[tuple[str, int], float]:
    """Of one rank, whose host time operators fill by the share ``usual``."""
    pattern = _Pattern(log, window)
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
