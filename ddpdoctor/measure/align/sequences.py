"""Two ranks' sequences of collectives, one beside the other: which of the one is which of the other.

On each rank the collectives of a process group come in the same order. What is told apart by step and place, or by ends
that lie nearer to each other than to any neighbour's, is sure; between two sure pairs a dynamic programme takes the best
chain of the rest. Ends are evidence: what excludes a pair is that one rank came after the other had left.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.numerics import Array, Ints, scatter_of

from .chains import Limits, filled
from .labels import Ordered, differ, meet


class Tuning(msgspec.Struct, frozen=True):
    """What makes a pair sure, and what it is worth where it is not."""

    near: float = 0.25
    """Of the distance to the nearest neighbour of the same kind: ends that lie nearer are no neighbour's. Unrelated
    sequences have half of their ends there, but no two in a row."""
    clear: float = 12.0
    """Neighbours closer than so many times the ends' scatter are not told apart by time."""
    scatters: float = 6.0
    """So many times the clocks' error may lie between two ends: of normal errors, none in a million is left out."""
    tightest_ns: float = 150_000.0
    """Above the 90 microseconds by which ends scatter within a host, and of the order of what a device's clock is off."""


TUNING = Tuning()


def paired(line: Ordered, other: Ordered, scatter_ns: float, clock_ns: float = 0.0) -> Ints:
    """[M] row in ``line`` of each collective of ``other``, on one clock; -1 where it is missing there.

    ``scatter_ns``: of ends; ``clock_ns``: by which the clock may be wrong, 0 where both ranks have the same.
    """
    if not len(line) or not len(other):
        return np.full(len(other), -1, np.int64)
    clock_ns = max(TUNING.tightest_ns, clock_ns)
    near = _nearest(line, other, clock_ns)
    other = replace(other, step=_steps_alike(line, other, near))
    by_step = in_equal_steps(line, other)
    by_step[~meet(line, other, by_step, clock_ns)] = -1
    apart_ns = np.abs(line.end[by_step] - other.end)[by_step >= 0]
    scatter_ns = max(scatter_ns, float(scatter_of(apart_ns)) if len(apart_ns) else 0.0)
    limits = Limits(clock_ns, max(TUNING.tightest_ns, TUNING.scatters * scatter_ns))
    if other.on_device:
        beside = np.abs(line.end[by_step] - other.end) <= limits.credible_ns(line.taken(by_step), other)
        by_step = np.where((by_step >= 0) & beside, by_step, -1)
    sure = _sure(line, other, near, TUNING.clear * scatter_ns)
    sure[(sure >= 0) & differ(line.step[sure], other.step)] = -1
    both = (sure >= 0) & (by_step >= 0) & (sure != by_step)
    row = np.where(sure >= 0, sure, by_step)
    row[both] = -1
    row = _once(row, len(line))
    if line.one_order:
        row = _increasing(row)
    return filled(line, other, row, limits)


def surely_paired(line: Ordered, other: Ordered) -> Ints:
    """[M] as :func:`paired`, but only what time alone makes sure."""
    return _sure(line, other, _nearest(line, other, np.inf), 0.0)


def _nearest(line: Ordered, other: Ordered, error_ns: float) -> Ints:
    """[M] the one of the same kind whose end is the nearest, where that holds the other way round, too."""
    there, _ = _closest(line.label, line.end, other.label, other.end)
    back, _ = _closest(other.label, other.end, line.label, line.end)
    there = np.where((there >= 0) & (back[there] == np.arange(len(other))), there, -1)
    there[~meet(line, other, there, error_ns)] = -1
    return there


def _sure(line: Ordered, other: Ordered, near: Ints, clear_ns: float) -> Ints:
    """[M] those that lie nearer to each other than to any neighbour of theirs, by far."""
    gap = np.minimum(spacing(line.label, line.end)[near], spacing(other.label, other.end))
    sure = (near >= 0) & (np.abs(line.end[near] - other.end) <= TUNING.near * gap) & (gap >= clear_ns)
    return np.where(sure, near, -1)


def spacing(label: Ints, end: Ints) -> Array:
    """[M] ns to the nearest end of the same kind on the same rank; infinite where it is the only one."""
    order = np.lexsort((end, label))
    step = np.diff(end[order]).astype(float)
    step[np.diff(label[order]) != 0] = np.inf
    gaps = np.concatenate(([np.inf], step, [np.inf]))
    found = np.empty(len(label))
    found[order] = np.minimum(gaps[:-1], gaps[1:])
    return found


def _closest(label: Ints, end: Ints, at_label: Ints, at: Ints) -> tuple[Ints, Array]:
    """([N] the row of the same label whose end is the nearest to each time, -1 without any; [N] ns between them)."""
    count = len(label)
    labels, times = np.concatenate((label, at_label)), np.concatenate((end, at))
    order = np.lexsort((np.arange(len(labels)) >= count, times, labels))
    places = np.where(order < count, np.arange(len(order)), -1)
    before = np.maximum.accumulate(places)
    places = np.where(order < count, np.arange(len(order)), len(order))
    after = np.minimum.accumulate(places[::-1])[::-1]
    best, distance = np.full(len(order), -1, np.int64), np.full(len(order), np.inf)
    for side in (before, after):
        valid = (side >= 0) & (side < len(order))
        rows = order[np.where(valid, side, 0)]
        valid &= labels[rows] == labels[order]
        away = np.where(valid, np.abs(times[rows] - times[order]).astype(float), np.inf)
        best, distance = np.where(away < distance, rows, best), np.minimum(away, distance)
    asked = order >= count
    row, away = np.empty(len(at), np.int64), np.empty(len(at))
    row[order[asked] - count], away[order[asked] - count] = best[asked], distance[asked]
    return row, away


def _steps_alike(line: Ordered, other: Ordered, near: Ints) -> Ints:
    """[M] steps of ``other`` as ``line`` counts them: profilers need not have begun to count together."""
    known = (near >= 0) & (line.step[near] >= 0) & (other.step >= 0)
    ahead = int(np.median((line.step[near] - other.step)[known])) if known.any() else 0
    return np.where(other.step >= 0, other.step + ahead, other.step)


def in_equal_steps(line: Ordered, other: Ordered) -> Ints:
    """[M] as :func:`paired`, by place among those of a kind in a step, where both have as many; no clock is asked."""
    row = np.full(len(other), -1, np.int64)
    ours, theirs = np.flatnonzero(line.step >= 0), np.flatnonzero(other.step >= 0)
    if not len(ours) or not len(theirs):
        return row
    first = min(line.step[ours].min(), other.step[theirs].min())
    steps = int(max(line.step[ours].max(), other.step[theirs].max()) - first) + 1
    a = line.label[ours] * steps + line.step[ours] - first
    b = other.label[theirs] * steps + other.step[theirs] - first
    codes, a_count = np.unique(a, return_counts=True)
    b_codes, b_count = np.unique(b, return_counts=True)
    common, at, b_at = np.intersect1d(codes, b_codes, assume_unique=True, return_indices=True)
    alike = common[a_count[at] == b_count[b_at]]
    ours, theirs = ours[np.isin(a, alike)], theirs[np.isin(b, alike)]
    a = line.label[ours] * steps + line.step[ours] - first
    b = other.label[theirs] * steps + other.step[theirs] - first
    row[theirs[np.argsort(b, kind="stable")]] = ours[np.argsort(a, kind="stable")]
    return row


def _once(row: Ints, count: int) -> Ints:
    """``row`` without those that are asked for twice."""
    asked = np.bincount(row[row >= 0], minlength=count)
    return np.where((row >= 0) & (asked[row] == 1), row, -1)


def _increasing(row: Ints) -> Ints:
    """The longest part of ``row`` that increases; the rest is -1."""
    at = np.flatnonzero(row >= 0)
    if (np.diff(row[at]) > 0).all():
        return row
    tails: list[int] = []
    ends: list[int] = []
    before = np.full(len(row), -1, np.int64)
    for j in at.tolist():
        place = bisect_left(tails, int(row[j]))
        before[j] = ends[place - 1] if place else -1
        tails[place : place + 1], ends[place : place + 1] = [int(row[j])], [j]
    kept = np.full(len(row), -1, np.int64)
    j = ends[-1]
    while j >= 0:
        kept[j] = row[j]
        j = int(before[j])
    return kept
