"""What is left between sure pairs: the best chain of pairs, in order, by dynamic programming."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import msgspec
import numpy as np

from ddpdoctor.measure.numerics import Array, Ints, Mask

from .labels import Ordered, differ, meet


class Tuning(msgspec.Struct, frozen=True):
    """What a pair is worth that is not sure."""

    of_length: float = 0.5
    """Of a collective's length: twice the spread that sends and receives show."""
    in_order: float = 0.05
    """What a pair is worth for which only the order and the step speak, where ends come when threads get a CPU."""
    block: int = 256
    """Collectives that are compared with each other at once where nothing between them is sure."""
    crossing: int = 4
    """Places by which the collectives of two streams may come in another order on another rank."""


TUNING = Tuning()

Stretch = tuple[Ints, Ints]
"""Rows of one rank and of another that may belong together."""


class Limits(msgspec.Struct, frozen=True):
    """What is known of clocks and ends."""

    clock_ns: float
    """By which two clocks may be apart."""
    ends_ns: float
    """By which ends of one collective may be, however short it is."""

    def credible_ns(self, a: Ordered, b: Ordered) -> Array:
        """By which the ends of these may be apart, the one's rows beside the other's."""
        length = np.minimum(a.end - a.start, b.end - b.start)
        allowed: Array = np.maximum(self.ends_ns, TUNING.of_length * length)
        return allowed


def filled(line: Ordered, other: Ordered, row: Ints, limits: Limits) -> Ints:
    """``row`` [M] with what could be paired between those that are."""
    row = _filled(line, other, row, limits, 0)
    return row if line.one_order else _filled(line, other, row, limits, TUNING.crossing)


def _filled(line: Ordered, other: Ordered, row: Ints, limits: Limits, crossing: int) -> Ints:
    row = row.copy()
    taken = np.zeros(len(line), bool)
    taken[row[row >= 0]] = True
    for ours, theirs in list(_between(taken, row, crossing)):
        for left, theirs_left in _blocks(line, other, (ours[~taken[ours]], theirs)):
            _fill(line, other, row, (left, theirs_left), limits)
            taken[row[theirs_left[row[theirs_left] >= 0]]] = True
    return row


def _fill(line: Ordered, other: Ordered, row: Ints, stretch: Stretch, limits: Limits) -> None:
    """Writes into ``row`` the pairs of a stretch."""
    ours, theirs = stretch
    a, b = line.taken(ours), other.taken(theirs)
    worth = _worth(a, b, limits).reshape(len(a), len(b))
    if len(ours) == len(theirs) and worth.diagonal().all() and _enclosed(row, ours, theirs):
        row[theirs] = ours
        return
    at, there = _best_chain(worth)
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


def _blocks(line: Ordered, other: Ordered, stretch: Stretch) -> Iterator[Stretch]:
    """A long stretch in parts, cut at the same times on both ranks."""
    ours, theirs = stretch
    if len(theirs) <= TUNING.block:
        yield stretch
        return
    cuts = np.arange(TUNING.block, len(theirs), TUNING.block)
    at = np.maximum.accumulate(other.end[theirs])[cuts - 1]
    our_cuts = np.searchsorted(np.maximum.accumulate(line.end[ours]), at, side="right")
    yield from zip(np.split(ours, our_cuts), np.split(theirs, cuts), strict=True)


def _enclosed(row: Ints, ours: Ints, theirs: Ints) -> bool:
    """Whether what is paired beside a stretch adjoins it on both ranks: then it has the same neighbours."""
    before, behind = int(theirs[0]) - 1, int(theirs[-1]) + 1
    inside = before >= 0 and behind < len(row) and row[before] == ours[0] - 1 and row[behind] == ours[-1] + 1
    return bool(inside) and len(ours) == ours[-1] - ours[0] + 1 == behind - before - 1


def _worth(a: Ordered, b: Ordered, limits: Limits) -> Array:
    """[N * M] from 0 to 1, the nearer the ends the more; 0 of what is unlike, or where one comes after another has left."""
    ours, theirs = np.repeat(np.arange(len(a)), len(b)), np.tile(np.arange(len(b)), len(a))
    a, b = a.taken(ours), b.taken(theirs)
    possible = (a.label == b.label) & ~differ(a.step, b.step) & meet(a, b, np.arange(len(a)), limits.clock_ns)
    nearness = 1.0 - (np.abs(a.end - b.end) / limits.credible_ns(a, b)) ** 2
    by_order = (a.step == b.step) & (b.step >= 0) & (not b.on_device)
    least = np.where(by_order, TUNING.in_order, 0.0)
    return np.where(possible, np.maximum(nearness, least), 0.0)


def _best_chain(worth: Array) -> Stretch:
    """(Rows, columns) of the pairs, increasing in both, that are worth the most together."""
    rows, columns = worth.shape
    best = np.zeros((rows + 1, columns + 1))
    for i in range(rows):
        taken = best[i, :-1] + worth[i]
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
