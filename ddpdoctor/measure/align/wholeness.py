"""Which collectives have all their members, and why others lack some."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.numerics import Array, Ints
from ddpdoctor.measure.window import Window

_LEFT = 2
"""Collectives at the end of a window that a rank lacks in a row: of one alone, its event may be lost."""


class Wholeness(msgspec.Struct, frozen=True):
    """How many collectives of several ranks were found on all of them, and why others were not.

    One that lacks several members for different reasons counts by the gravest: the first here that holds.
    """

    whole: int = 0
    left: int = 0
    """A member's window goes on, without any more collectives of the group."""
    lost: int = 0
    """A member has the collectives before and behind it: its event is missing."""
    cut: int = 0
    """A member's window does not reach it."""

    @property
    def lacking(self) -> int:
        """Those that lack members."""
        return self.left + self.lost + self.cut


class Spread(msgspec.Struct, frozen=True):
    """Of each collective of a group, [L]."""

    members: Ints
    """Ranks on which it is found."""
    reached: Ints
    """Ranks of the group whose windows reach it."""
    first: Ints
    """ns of the first member's end."""
    last: Ints
    """ns of the last member's end."""

    @property
    def apart_ns(self) -> Array:
        """From the first to the last end."""
        return (self.last - self.first).astype(float)


def spread_of(windows: Sequence[Window], table: Ints) -> Spread:
    """Of the collectives in these rows [L, R], see :func:`.merging.merged`."""
    first, last = _first_and_last_end(windows, table)
    reached = np.zeros(len(table), np.int64)
    for position in np.flatnonzero((table >= 0).any(axis=0)).tolist():
        begin, end = windows[position].span
        reached += ((first <= end) & (last >= begin)).astype(np.int64)
    return Spread((table >= 0).sum(axis=1), reached, first, last)


def wholeness(windows: Sequence[Window], shared: Sequence[tuple[Ints, Spread]]) -> Wholeness:
    """Of the collectives of groups of which several ranks are here, and where their ends lie."""
    counts = np.zeros(4, np.int64)
    for table, spread in shared:
        members = np.flatnonzero((table >= 0).any(axis=0)).tolist()
        left, lost, cut = np.zeros((3, len(table)), bool)
        for position in members:
            has = table[:, position] >= 0
            own = np.flatnonzero(has)
            begin, end = windows[position].span
            outside = (spread.last < begin) | (spread.first > end)
            behind = np.arange(len(table)) > own[-1]
            inside_behind = int((behind & ~outside).sum())
            gone = behind & ~outside & (inside_behind >= _LEFT)
            left |= ~has & gone
            lost |= ~has & ~gone & ~outside
            cut |= ~has & outside
        counts += [
            int((~left & ~lost & ~cut).sum()),
            int(left.sum()),
            int((lost & ~left).sum()),
            int((cut & ~lost & ~left).sum()),
        ]
    return Wholeness(*counts.tolist())


def _first_and_last_end(windows: Sequence[Window], table: Ints) -> tuple[Ints, Ints]:
    """[L] of the members' ends."""
    first = np.full(len(table), np.iinfo(np.int64).max)
    last = np.full(len(table), np.iinfo(np.int64).min)
    for position in np.flatnonzero((table >= 0).any(axis=0)).tolist():
        has = table[:, position] >= 0
        end = windows[position].collectives.end[table[has, position]]
        first[has], last[has] = np.minimum(first[has], end), np.maximum(last[has], end)
    return first, last
