"""Match synchronisations across the step logs of all ranks, by their keys."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from .log import RankLog
from .syncpoints import Key, SyncPoint


class MatchedSync(msgspec.Struct, frozen=True):
    """The same synchronisation on all its ranks."""

    key: Key
    points: Mapping[int, SyncPoint]
    """By position of the log, in rising order."""
    first: SyncPoint
    """The point of the lowest position, for fields that are the same on all ranks."""

    @property
    def last_arrival_ns(self) -> int:
        """Epoch ns."""
        return max(point.arrival_ns for point in self.points.values())


def match_syncs(logs: Sequence[RankLog]) -> tuple[list[MatchedSync], int]:
    """Synchronisations with all their members, in order of last arrival, and how many points had no counterpart on another
    rank.

    The members of a group are the ranks on which any of its synchronisations was seen.
    """
    by_key: dict[Key, dict[int, SyncPoint]] = defaultdict(dict)
    members: dict[tuple[str, str], set[int]] = defaultdict(set)
    for position, log in enumerate(logs):
        for point in log.sync_points:
            by_key[point.key][position] = point
            members[point.key[:2]].add(position)
    matched, unmatched = [], 0
    for key, points in by_key.items():
        if len(points) == len(members[key[:2]]) and _alike(points):
            matched.append(MatchedSync(key, points, next(iter(points.values()))))
        else:
            unmatched += len(points)
    matched.sort(key=lambda sync: sync.last_arrival_ns)
    return matched, unmatched


def _alike(points: Mapping[int, SyncPoint]) -> bool:
    """Whether the operation is the same on all ranks. A call that one rank misses shifts its sequence, and pairs different operations."""
    return len({point.name for point in points.values()}) == 1
