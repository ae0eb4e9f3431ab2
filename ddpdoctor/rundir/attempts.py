"""The attempts of a run: an elastic launcher restarts all ranks when one dies, and a command may start several jobs one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .reader import RankRecord


@dataclass(frozen=True)
class Attempt:
    """The recordings of one attempt, at most one of each rank."""

    ranks: list[RankRecord]

    @property
    def started_ns(self) -> int | None:
        """When the first of its ranks had joined the process group, epoch ns; None where unknown."""
        starts = [record.info.get("started_ns") for record in self.ranks]
        return min((start for start in starts if isinstance(start, int)), default=None)

    @property
    def recorded_bytes(self) -> int:
        """Bytes of its step logs."""
        return sum(record.recorded_bytes for record in self.ranks)


def attempts_of(recordings: Sequence[RankRecord]) -> list[Attempt]:
    """The attempts among the ``recordings`` of a run that say of which one they are, in the order in which they started. Recordings of one
    attempt have the job's id, the launcher's restart count and the world size in common; of several of one rank, the longest counts."""
    found: dict[tuple[str, int, int], dict[int, RankRecord]] = {}
    for record in recordings:
        if record.info:
            ranks = found.setdefault(record.attempt_key, {})
            kept = ranks.get(record.rank)
            if kept is None or record.recorded_bytes > kept.recorded_bytes:
                ranks[record.rank] = record
    attempts = [Attempt([ranks[rank] for rank in sorted(ranks)]) for ranks in found.values()]
    return sorted(attempts, key=lambda attempt: attempt.started_ns or 0)
