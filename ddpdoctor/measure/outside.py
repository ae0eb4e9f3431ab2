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

from .activities import Activities
from .intervals import Intervals, complement, intersect, subtract, total, union
from .points import rank_points
from .selection import evaluates, main_loaders
from .steplog import RankLog
from .window import Window, main_lane, rows_of

_LEAST_NS = 200_000


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


def python_parts(
    logs: Sequence[RankLog], windows: Sequence[Window], shares: Mapping[int, float]
) -> list[dict[int, float]]:
    """By position: user line (id into ``sample_where``) -> part (0 to 1) of its samples that is Python, not an operator.

    Samples inside the window tell, those of the line itself and, with the weight of one sample, the operators' share of
    all host time (``shares``, see :func:`operator_shares`). Lines that the window did not sample have that share;
    where there was no window, no line is here.
    """
    by_rank = {window.rank: window for window in windows if not window.on_device}
    found: list[dict[int, float]] = []
    for position, log in enumerate(logs):
        window, usual = by_rank.get(log.rank), shares.get(position)
        if window is None or usual is None:
            found.append({})
            continue
        starts, ends = union(*_operators(window))
        seen: Counter[int] = Counter()
        computing: Counter[int] = Counter()
        for t, user, _ in log.samples:
            if window.span[0] <= t < window.span[1]:
                before = int(np.searchsorted(starts, t, side="right")) - 1
                seen[user] += 1
                computing[user] += int(before >= 0 and t < ends[before])
        found.append(
            {user: 1.0 - float(computing[user] + usual) / (seen[user] + 1.0) for user in log.sample_where}
        )
    return found
