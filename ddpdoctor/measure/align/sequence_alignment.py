"""Two ranks' sequences of collectives, one beside the other: which of the one is which of the other; and of all ranks, one after another.

On each rank the collectives of a process group come in the same order. What is told apart by step and place, or by ends
that lie nearer to each other than to any neighbour's, is sure; between two sure pairs a dynamic programme takes the best
chain of the rest. Ends are evidence: what excludes a pair is that one rank came after the other had left.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import pairwise

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.numerics import Array, Ints, Mask, scatter_of

from .collective_keys import CollectiveSequence, can_be_same, steps_differ


class ChainTuning(msgspec.Struct, frozen=True):
    """What a pair is worth that is not sure."""

    of_length: float = 0.5
    """Of a collective's length: twice the spread that sends and receives show."""
    in_order: float = 0.05
    """What a pair is worth for which only the order and the step speak, where ends come when threads get a CPU."""
    block: int = 256
    """Collectives that are compared with each other at once where nothing between them is sure."""
    crossing: int = 4
    """Places by which the collectives of two streams may come in another order on another rank."""


CHAINS = ChainTuning()

Stretch = tuple[Ints, Ints]
"""Rows of one rank and of another that may belong together."""


class EndTolerance(msgspec.Struct, frozen=True):
    """What is known of clocks and ends."""

    clock_ns: float
    """By which two clocks may be apart."""
    ends_ns: float
    """By which ends of one collective may be, however short it is."""

    def credible_ns(self, a: CollectiveSequence, b: CollectiveSequence) -> Array:
        """By which the ends of these may be apart, the one's rows beside the other's."""
        length = np.minimum(a.end - a.start, b.end - b.start)
        allowed: Array = np.maximum(self.ends_ns, CHAINS.of_length * length)
        return allowed


def fill_between(
    reference: CollectiveSequence, other: CollectiveSequence, row: Ints, tolerance: EndTolerance
) -> Ints:
    """``row`` [M] with what could be paired between those that are."""
    row = _fill_all(reference, other, row, tolerance, 0)
    return row if reference.one_order else _fill_all(reference, other, row, tolerance, CHAINS.crossing)


def _fill_all(
    reference: CollectiveSequence,
    other: CollectiveSequence,
    row: Ints,
    tolerance: EndTolerance,
    crossing: int,
) -> Ints:
    row = row.copy()
    taken = np.zeros(len(reference), bool)
    taken[row[row >= 0]] = True
    for ours, theirs in list(_between(taken, row, crossing)):
        for left, theirs_left in _blocks(reference, other, (ours[~taken[ours]], theirs)):
            _fill_stretch(reference, other, row, (left, theirs_left), tolerance)
            taken[row[theirs_left[row[theirs_left] >= 0]]] = True
    return row


def _fill_stretch(
    reference: CollectiveSequence,
    other: CollectiveSequence,
    row: Ints,
    stretch: Stretch,
    tolerance: EndTolerance,
) -> None:
    """Writes into ``row`` the pairs of a stretch."""
    ours, theirs = stretch
    a, b = reference.select(ours), other.select(theirs)
    scores = _pair_scores(a, b, tolerance).reshape(len(a), len(b))
    if len(ours) == len(theirs) and scores.diagonal().all() and _enclosed(row, ours, theirs):
        row[theirs] = ours
        return
    at, there = _best_chain(scores)
    row[theirs[there]] = ours[at]


def _between(taken: Mask, row: Ints, crossing: int) -> Iterator[Stretch]:
    """The stretches where both have collectives that are not paired yet."""
    ours, theirs = np.flatnonzero(~taken), np.flatnonzero(row < 0)
    if not len(ours) or not len(theirs):
        return
    # Of what is paired before and behind each of theirs, the rows in ours.
    low = np.maximum.accumulate(row)[theirs]
    high = np.minimum.accumulate(np.where(row >= 0, row, len(taken))[::-1])[::-1][theirs]
    low, high = np.minimum(low, high) - crossing, np.maximum(low, high) + crossing
    first, last = np.searchsorted(ours, low, side="right"), np.searchsorted(ours, high)
    edges = np.flatnonzero((np.diff(first) != 0) | (np.diff(last) != 0)) + 1
    for begin, end in pairwise([0, *edges.tolist(), len(theirs)]):
        if last[begin] > first[begin]:
            yield ours[first[begin] : last[begin]], theirs[begin:end]


def _blocks(reference: CollectiveSequence, other: CollectiveSequence, stretch: Stretch) -> Iterator[Stretch]:
    """A long stretch in parts, cut at the same times on both ranks."""
    ours, theirs = stretch
    if len(theirs) <= CHAINS.block:
        yield stretch
        return
    cuts = np.arange(CHAINS.block, len(theirs), CHAINS.block)
    at = np.maximum.accumulate(other.end[theirs])[cuts - 1]
    our_cuts = np.searchsorted(np.maximum.accumulate(reference.end[ours]), at, side="right")
    yield from zip(np.split(ours, our_cuts), np.split(theirs, cuts), strict=True)


def _enclosed(row: Ints, ours: Ints, theirs: Ints) -> bool:
    """Whether what is paired beside a stretch adjoins it on both ranks: then it has the same neighbours."""
    before, behind = int(theirs[0]) - 1, int(theirs[-1]) + 1
    inside = before >= 0 and behind < len(row) and row[before] == ours[0] - 1 and row[behind] == ours[-1] + 1
    return bool(inside) and len(ours) == ours[-1] - ours[0] + 1 == behind - before - 1


def _pair_scores(a: CollectiveSequence, b: CollectiveSequence, tolerance: EndTolerance) -> Array:
    """[N * M] from 0 to 1, the nearer the ends the more; 0 of what is unlike, or where one comes after another has left."""
    ours, theirs = np.repeat(np.arange(len(a)), len(b)), np.tile(np.arange(len(b)), len(a))
    a, b = a.select(ours), b.select(theirs)
    possible = (
        (a.label == b.label)
        & ~steps_differ(a.step, b.step)
        & can_be_same(a, b, np.arange(len(a)), tolerance.clock_ns)
    )
    nearness = 1.0 - (np.abs(a.end - b.end) / tolerance.credible_ns(a, b)) ** 2
    by_order = (a.step == b.step) & (b.step >= 0) & (not b.on_device)
    least = np.where(by_order, CHAINS.in_order, 0.0)
    return np.where(possible, np.maximum(nearness, least), 0.0)


def _best_chain(scores: Array) -> Stretch:
    """(Rows, columns) of the pairs, increasing in both, that are worth the most together."""
    rows, columns = scores.shape
    best = np.zeros((rows + 1, columns + 1))
    for i in range(rows):
        taken = best[i, :-1] + scores[i]
        best[i + 1, 1:] = np.maximum.accumulate(np.maximum(best[i, 1:], taken))
    chain: list[tuple[int, int]] = []
    i, j = rows, columns
    while i and j:
        if best[i, j] == best[i - 1, j]:
            i -= 1
        elif best[i, j] == best[i, j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            chain.append((i, j))
    found = np.array(chain[::-1], np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


class SureTuning(msgspec.Struct, frozen=True):
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


SURE = SureTuning()


def align_sequences(
    reference: CollectiveSequence, other: CollectiveSequence, scatter_ns: float, clock_ns: float = 0.0
) -> Ints:
    """[M] row in ``reference`` of each collective of ``other``, on one clock; -1 where it is missing there.

    ``scatter_ns``: of ends; ``clock_ns``: by which the clock may be wrong, 0 where both ranks have the same.
    """
    if not len(reference) or not len(other):
        return np.full(len(other), -1, np.int64)
    clock_ns = max(SURE.tightest_ns, clock_ns)
    near = _nearest(reference, other, clock_ns)
    other = replace(other, step=_steps_alike(reference, other, near))
    by_step = in_equal_steps(reference, other)
    by_step[~can_be_same(reference, other, by_step, clock_ns)] = -1
    apart_ns = np.abs(reference.end[by_step] - other.end)[by_step >= 0]
    scatter_ns = max(scatter_ns, float(scatter_of(apart_ns)) if len(apart_ns) else 0.0)
    tolerance = EndTolerance(clock_ns, max(SURE.tightest_ns, SURE.scatters * scatter_ns))
    if other.on_device:
        near_ends = np.abs(reference.end[by_step] - other.end) <= tolerance.credible_ns(
            reference.select(by_step), other
        )
        by_step = np.where((by_step >= 0) & near_ends, by_step, -1)
    sure = _certain(reference, other, near, SURE.clear * scatter_ns)
    sure[(sure >= 0) & steps_differ(reference.step[sure], other.step)] = -1
    both = (sure >= 0) & (by_step >= 0) & (sure != by_step)
    row = np.where(sure >= 0, sure, by_step)
    row[both] = -1
    row = _once(row, len(reference))
    if reference.one_order:
        row = _increasing(row)
    return fill_between(reference, other, row, tolerance)


def certain_pairs(reference: CollectiveSequence, other: CollectiveSequence) -> Ints:
    """[M] as :func:`align_sequences`, but only what time alone makes sure."""
    return _certain(reference, other, _nearest(reference, other, np.inf), 0.0)


def _nearest(reference: CollectiveSequence, other: CollectiveSequence, error_ns: float) -> Ints:
    """[M] the one of the same kind whose end is the nearest, where that holds the other way round, too."""
    there, _ = _closest(reference.label, reference.end, other.label, other.end)
    back, _ = _closest(other.label, other.end, reference.label, reference.end)
    there = np.where((there >= 0) & (back[there] == np.arange(len(other))), there, -1)
    there[~can_be_same(reference, other, there, error_ns)] = -1
    return there


def _certain(reference: CollectiveSequence, other: CollectiveSequence, near: Ints, clear_ns: float) -> Ints:
    """[M] those that lie nearer to each other than to any neighbour of theirs, by far."""
    gap = np.minimum(spacing(reference.label, reference.end)[near], spacing(other.label, other.end))
    sure = (near >= 0) & (np.abs(reference.end[near] - other.end) <= SURE.near * gap) & (gap >= clear_ns)
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


def _steps_alike(reference: CollectiveSequence, other: CollectiveSequence, near: Ints) -> Ints:
    """[M] steps of ``other`` as ``reference`` counts them: profilers need not have begun to count together."""
    known = (near >= 0) & (reference.step[near] >= 0) & (other.step >= 0)
    ahead = int(np.median((reference.step[near] - other.step)[known])) if known.any() else 0
    return np.where(other.step >= 0, other.step + ahead, other.step)


def in_equal_steps(reference: CollectiveSequence, other: CollectiveSequence) -> Ints:
    """[M] as :func:`align_sequences`, by place among those of a kind in a step, where both have as many; no clock is asked."""
    row = np.full(len(other), -1, np.int64)
    ours, theirs = np.flatnonzero(reference.step >= 0), np.flatnonzero(other.step >= 0)
    if not len(ours) or not len(theirs):
        return row
    first = min(reference.step[ours].min(), other.step[theirs].min())
    steps = int(max(reference.step[ours].max(), other.step[theirs].max()) - first) + 1
    a = reference.label[ours] * steps + reference.step[ours] - first
    b = other.label[theirs] * steps + other.step[theirs] - first
    codes, a_count = np.unique(a, return_counts=True)
    b_codes, b_count = np.unique(b, return_counts=True)
    common, at, b_at = np.intersect1d(codes, b_codes, assume_unique=True, return_indices=True)
    alike = common[a_count[at] == b_count[b_at]]
    ours, theirs = ours[np.isin(a, alike)], theirs[np.isin(b, alike)]
    a = reference.label[ours] * steps + reference.step[ours] - first
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


def merge_ranks(
    members: Mapping[int, tuple[Ints, CollectiveSequence]], world: int, scatter_ns: float, clock_ns: float
) -> Ints:
    """[L, world] row of each collective in the windows of its members, in order; -1 where it is missing.

    ``members``: position → (rows in the window's collectives, the collectives on the common clock). One rank after the other
    is laid beside what those before it have; what they lack is put in where it comes.
    """
    reference: CollectiveSequence | None = None
    table = np.empty((0, world), np.int64)
    for position, (rows, own) in members.items():
        if reference is None:
            reference, table = own, np.full((len(rows), world), -1, np.int64)
            table[:, position] = rows
            continue
        row = align_sequences(reference, own, scatter_ns, clock_ns)
        has = row >= 0
        table[row[has], position] = rows[has]
        reference = _with_member(reference, own, row)
        new = np.flatnonzero(~has)
        if not len(new):
            continue
        added = np.full((len(new), world), -1, np.int64)
        added[:, position] = rows[new]
        # Behind the last of its own that the lines know, in its own order.
        behind = np.maximum.accumulate(row)[new]
        place = np.concatenate((np.arange(len(reference)), behind))
        order = np.lexsort((np.concatenate((np.full(len(reference), -1), new)), place))
        reference = reference.joined(own.select(new)).select(order)
        table = np.concatenate((table, added))[order]
    return table


def _with_member(reference: CollectiveSequence, own: CollectiveSequence, row: Ints) -> CollectiveSequence:
    """The lines with one more member in these rows: the last has come later, the first has left earlier."""
    has = row >= 0
    at = row[has]
    start, left, step = reference.start.copy(), reference.left.copy(), reference.step.copy()
    start[at] = np.maximum(start[at], own.start[has])
    left[at] = np.minimum(left[at], own.left[has])
    step[at] = np.where(step[at] < 0, own.step[has], step[at])
    return replace(reference, start=start, left=left, step=step)
