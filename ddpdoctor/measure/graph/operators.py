"""Split host time outside forward, backward and optimizer into Python and operators.

A step log has the regions that torch marks; other computation of the loop (a loss, a hand-written layer, a model without DDP) looks
like host work there. The profiler window shows the operators, and their share of that time is applied to the whole run. Likewise for
source lines: a line that stack samples in the window find inside operators computes, and is not Python work.
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
    """Resolution and minimum of data."""

    least_ns: int = 200_000
    """Least host time in the window: of less, edges rounded to the microsecond are too large a part."""
    places: int = 64
    """Number of parts of each gap in which operators are located."""
    prior: float = 0.5
    """Weight, in samples, of the share over all lines."""


TUNING = Tuning()
_EDGES = np.linspace(0.0, 1.0, TUNING.places + 1)
_Signature = tuple[str, ...]


class OperatorShares(msgspec.Struct, frozen=True):
    """Share (0 to 1) of a rank's host time in operators."""

    whole: float
    """Share of all host time."""
    phase_gaps: Mapping[Component, float]
    """Share of the gaps between the phases, by the component of operators there."""
    marked: bool
    """Whether the log marks the phases, so that gaps are known."""
    seen: bool
    """Whether a window shows it."""


def operator_shares(logs: Sequence[RankLog], windows: Sequence[Window]) -> dict[int, OperatorShares]:
    """Operator shares by position of the log, for jobs on CPUs.

    Where no window shows operators, time between a forward pass and its optimizer is assumed to be the loss, and the rest is unknown.
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
    """The shares that the window shows; None where it has too little host time."""
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
    """Share of host time in operators; None for too little host time."""
    whole = total(host)
    return total(intersect(host, operators)) / whole if whole > TUNING.least_ns else None


def _on_hosts(windows: Sequence[Window]) -> dict[int, Window]:
    """The windows of hosts that compute, by rank."""
    return {window.rank: window for window in windows if not window.on_device}


def _host_time(log: RankLog, window: Window) -> Intervals:
    """Intervals, ns since the window's begin, in which the log marks neither work nor a synchronisation, within the window and outside
    of evaluations: operators there say nothing about training steps."""
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
    """Where operators run in the gaps between what the log marks, in the steps inside the window."""

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
        """Kinds of the marked events in a step, in order, and the gaps before, between and after them, ns since the origin."""
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
        """Probability that an operator runs at each of these times of a step, epoch ns; NaN inside a marked event. None where no step
        of the window has the same marks."""
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
    """By position: file and number of a user line -> share (0 to 1) of its samples that is Python, not an operator.

    A sample counts by whether operators run at its place, between the marks of the step log, in steps of the window with the same
    marks. With the weight of half a sample, the operators' share of all host time (``shares``, see :func:`operator_shares`) is added: a
    line is mostly one or the other. Lines without such samples have that share; without a window the result is empty.
    """
    by_rank = _on_hosts(windows)
    return [
        _python_parts(log, by_rank[log.rank], shares[position].whole)
        if log.rank in by_rank and position in shares and shares[position].seen
        else {}
        for position, log in enumerate(logs)
    ]


def _python_parts(log: RankLog, window: Window, usual: float) -> dict[tuple[str, int], float]:
    """The same for one rank; ``usual`` is the share of its host time in operators."""
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
