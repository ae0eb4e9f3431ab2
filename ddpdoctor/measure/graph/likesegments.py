"""Which segments of different ranks are the same part of a step, though they end at synchronisations of different ranks.

Where hosts reduce among their own ranks first, each rank is in one of several groups that do the same at the same place. What
ranks have in common, or do longer than others, is told by comparing like with like: the first segment before a reduction within
a host with the first of each other host. Segments are alike that end at as many ranks' synchronisation of one kind, of the same
backward pass, and are as many of those into the rank's own cycle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from ddpdoctor.measure.numerics import Array, Ints


class _Meeting(Protocol):
    """What of a :class:`~.graph.Sync` tells which segments are alike."""

    @property
    def kind(self) -> str: ...
    @property
    def members(self) -> tuple[int, ...]: ...
    @property
    def micro(self) -> int: ...


class LikeSegments(msgspec.Struct, frozen=True):
    """The K segments of R ranks as S parts of a step, each of which a rank has once at most."""

    part: Ints
    """[K, R] part of the step; -1 where the rank takes no part in what ends the segment."""
    segment: Ints
    """[S, R] the other way round; -1 where the rank has no such part."""

    def by_part(self, values: Array) -> Array:
        """[N, S, R, ...] of ``values`` [N, K, R, ...]; 0 where a rank has no such part."""
        return _placed(values, self.segment)

    def by_segment(self, values: Array) -> Array:
        """[N, K, R, ...] of ``values`` [N, S, R, ...]; 0 where a rank takes no part."""
        return _placed(values, self.part)


def like_segments(syncs: Sequence[_Meeting], world: int) -> LikeSegments:
    """Find the like segments of a sequence of synchronisations."""
    if all(len(sync.members) == world for sync in syncs):
        same = np.broadcast_to(np.arange(len(syncs))[:, None], (len(syncs), world))
        return LikeSegments(same, same)
    part = np.full((len(syncs), world), -1)
    numbers: dict[tuple[object, ...], int] = {}
    seen: Counter[tuple[object, ...]] = Counter()
    for k, sync in enumerate(syncs):
        what = (sync.kind, sync.micro, len(sync.members))
        for rank in sync.members:
            seen[(rank, *what)] += 1
            part[k, rank] = numbers.setdefault((*what, seen[(rank, *what)]), len(numbers))
    segment = np.full((len(numbers), world), -1)
    ends, ranks = np.nonzero(part >= 0)
    segment[part[ends, ranks], ranks] = ends
    return LikeSegments(part, segment)


def _placed(values: Array, places: Ints) -> Array:
    """``values`` [N, X, R, ...] at these places [Y, R]: [N, Y, R, ...]; 0 where a place is -1."""
    taken: Array = values[:, places, np.arange(places.shape[1])]
    taken[:, places < 0] = 0.0
    return taken
