"""Operators outside forward, backward and optimizer: is a rank's own time in its loop Python, or computation?

A step log knows the regions that torch marks; what a loop computes besides (a loss, a hand-written layer, a
model without DDP) looks like host work there. The profiled window shows the operators, and their share of
that time is taken for the whole run. The same for source lines: one that stack samples in the window meet inside operators
computes, and is not what a loop's Python does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import Intervals, complement, covered, intersect, subtract, total, union
from ddpdoctor.measure.steplog import (
    Activities,
    RankLog,
    Step,
    evaluates,
    main_loaders,
    rank_points,
    samples_by_step,
)
from ddpdoctor.measure.window import Window, main_lane, rows_of
from ddpdoctor.rundir import EventKind

_LEAST_NS = 200_000
_PLACES = 64
"""Parts of each gap in which operators are looked for."""
_EDGES = np.linspace(0.0, 1.0, _PLACES + 1)
_PRIOR = 0.5
"""Samples' worth of what is known of all lines together."""
_Signature = tuple[str, ...]


def _evaluations(log: RankLog, main: set[int], origin: int) -> Intervals:
    """Steps in which the job evaluates: what it computes there outside of DDP says nothing of training steps."""
    steps = [step for step in log.steps if evaluates(step, main)]
    starts = np.array([step.start - origin for step in steps], float)
    return starts, np.array([step.end - origin for step in steps], float)


def operator_shares(logs: Sequence[RankLog], windows: Sequence[Window]) -> dict[int, float]:
    """Position of the log → share (0 to 1) of its host time that operators fill. Only CPU jobs with a window
    have one."""
    by_rank = {window.rank: window for window in windows if not window.on_device}
    shares = {}
    for position, (log, main) in enumerate(zip(logs, main_loaders(logs), strict=True)):
        window = by_rank.get(log.rank)
        if window is None or not log.steps:
            continue
        origin = window.span[0]
        sets = list(Activities(log, origin).sets.values())
        points = rank_points(log)
        starts = [s for s, _ in sets] + [np.array([p.arrival - origin for p in points], float)]
        ends = [e for _, e in sets] + [np.array([p.end - origin for p in points], float)]
        taken = union(np.concatenate(starts), np.concatenate(ends))
        host = subtract(
            complement(taken, 0.0, float(window.span[1] - origin)), _evaluations(log, main, origin)
        )
        a, b = _operators(window)
        whole = total(host)
        if whole > _LEAST_NS:
            shares[position] = total(intersect(host, (a - origin, b - origin))) / whole
    return shares


def _operators(window: Window) -> Intervals:
    """Starts and ends, epoch ns, of the operators on the training thread."""
    trace = window.trace
    return rows_of(trace, trace.category_mask("cpu_op") & (trace.lane == main_lane(trace)))


class _Pattern:
    """Where operators run in the gaps between what the log marks, as the steps inside the window show it."""

    def __init__(self, log: RankLog, window: Window) -> None:
        self.origin = window.span[0]
        starts, ends = union(*_operators(window))
        operators = (starts - self.origin, ends - self.origin)
        found: dict[_Signature, list[NDArray[np.float64]]] = {}
        for step in log.steps:
            if step.start >= window.span[0] and step.end <= window.span[1]:
                signature, left, right = self._gaps(step)
                edges = left[:, None] + (right - left)[:, None] * _EDGES
                filled = covered(operators, edges[:, :-1], edges[:, 1:])
                found.setdefault(signature, []).append(filled / np.diff(edges, axis=1))
        self._filled = {signature: np.mean(shares, axis=0) for signature, shares in found.items()}

    def _gaps(self, step: Step) -> tuple[_Signature, NDArray[np.float64], NDArray[np.float64]]:
        """Kinds of what is marked in a step, in order, and the gaps before, between and after, in ns since the origin."""
        kinds, left, right = [], [step.start], []
        for event in sorted(step.events, key=lambda event: event.start_ns):
            if event.kind == EventKind.MORE:
                continue
            if event.start_ns > left[-1]:
                kinds.append(event.kind)
                right.append(event.start_ns)
                left.append(event.end_ns)
            else:
                left[-1] = max(left[-1], event.end_ns)
        right.append(max(step.end, left[-1]))
        gaps = np.array([left, right], float) - self.origin
        return tuple(kinds), gaps[0], np.maximum(gaps[1], gaps[0] + 1.0)

    def operators_at(self, step: Step, times: Sequence[int]) -> NDArray[np.float64] | None:
        """Probability that an operator runs at each of these times of a step, epoch ns; NaN inside of what is marked. None
        where no step of the window is like it.
        """
        signature, left, right = self._gaps(step)
        filled = self._filled.get(signature)
        if filled is None:
            return None
        at = np.array(times, float) - self.origin
        gap = np.maximum(np.searchsorted(left, at, side="right") - 1, 0)
        place = np.floor((at - left[gap]) / (right[gap] - left[gap]) * _PLACES)
        inside = (place >= 0) & (place < _PLACES)
        found: NDArray[np.float64] = filled[gap, np.clip(place, 0, _PLACES - 1).astype(int)]
        return np.where(inside, found, np.nan)


def python_parts(
    logs: Sequence[RankLog], windows: Sequence[Window], shares: Mapping[int, float]
) -> list[dict[int, float]]:
    """By position: user line (id into ``sample_where``) -> part (0 to 1) of its samples that is Python, not an operator.

    A sample tells by its place between what the step log marks: whether operators run there in the steps of the window
    that are marked alike. With the weight of half a sample, the operators' share of all host time (``shares``, see
    :func:`operator_shares`) counts beside them: a line is mostly one or the other. Lines without such samples have that
    share; where there was no window, no line is here.
    """
    by_rank = {window.rank: window for window in windows if not window.on_device}
    found: list[dict[int, float]] = []
    for position, log in enumerate(logs):
        window, usual = by_rank.get(log.rank), shares.get(position)
        if window is None or usual is None:
            found.append({})
            continue
        pattern = _Pattern(log, window)
        seen: Counter[int] = Counter()
        computing: dict[int, float] = {}
        for step, samples in samples_by_step(log, log.steps):
            operators = pattern.operators_at(step, [t for t, _, _ in samples])
            if operators is None:
                continue
            for (_, user, _), probability in zip(samples, operators.tolist(), strict=True):
                if probability == probability:  # not NaN
                    seen[user] += 1
                    computing[user] = computing.get(user, 0.0) + probability
        found.append(
            {
                user: 1.0 - (computing.get(user, 0.0) + _PRIOR * usual) / (seen[user] + _PRIOR)
                for user in log.sample_where
            }
        )
    return found
