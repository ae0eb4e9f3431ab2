"""Decides whether a hang is proven, so that ``--on-hang kill`` may end the job. A rank that does not answer proves nothing.

Two independent sources must agree for each rank: the kernel (its process has ended, or it and its children use no resources) and the
rank itself (it answered a request during the hang, and waits for other ranks or is still at the same line). If a thread holds the GIL,
faulthandler, which needs no GIL, answers for the rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ddpdoctor.launch.rankwatch import Activity, WatchedRank

Line = tuple[int, int, str]
"""Rank, process id, and the line of the job's code at which it is."""
_APART_S = 60.0
"""Longest time between the two polls that must both prove the hang before the job is ended (less with a shorter ``--hang-after``). The
report is written meanwhile: it shows more while the job still runs."""


def doubts(ranks: Sequence[WatchedRank], has_answered: Callable[[WatchedRank], bool]) -> list[str]:
    """Reasons not to end the job, a clause per rank; empty if it is proven that no rank makes progress."""
    alive = [rank for rank in ranks if rank.alive]
    found = [(rank, _doubt(rank, has_answered)) for rank in alive]
    if all(rank.waits for rank in alive):
        # Each of them may wait for what its own device still computes: a thread of CUDA that waits uses a core.
        found += [
            (rank, "may compute on its device") for rank in alive if rank.busy and not rank.waits_in_call
        ]
    return [f"rank {rank.rank} {doubt}" for rank, doubt in found if doubt]


def _doubt(rank: WatchedRank, has_answered: Callable[[WatchedRank], bool]) -> str | None:
    activity = rank.activity
    if activity is Activity.HELD:
        return "is stopped, in a debugger, or waits for input"
    # A rank that waits by its own report may move data all the same.
    if activity is Activity.WORKS or rank.meter.moves:
        return "reads, writes or computes"
    if rank.state == "D":
        return "waits for storage"
    if activity is Activity.COMPUTES:
        return "uses a processor"
    if rank.holds_gil:
        return None  # it cannot answer; faulthandler has written where it is
    if activity is Activity.UNKNOWN or not rank.is_known:
        return "does not show what it does"
    return "has not answered" if rank.joined and not has_answered(rank) else None


def lines(ranks: Sequence[WatchedRank]) -> frozenset[Line]:
    """Positions of the ranks that do not wait for others; unchanged between two polls if the job hangs."""
    return frozenset((*rank.key, rank.where()) for rank in ranks if rank.alive and not rank.waits)


class Kill:
    """Decides when ``--on-hang kill`` ends the job: after two polls, some time apart, that prove the hang."""

    def __init__(self, after_s: float) -> None:
        self._apart_s = min(after_s, _APART_S)
        self._declared_s = self._looked_s = time.monotonic()
        self._is_proven = False
        """Whether the last poll proved the hang."""
        self._lines: frozenset[Line] = frozenset()
        self.is_doubt_reported = False
        """Whether the user was warned why the job is not ended."""

    def is_due(self, being_diagnosed: bool) -> bool:
        """Whether it is time for the next poll."""
        now_s = time.monotonic()
        if being_diagnosed and now_s - self._declared_s < _APART_S:
            return False
        return now_s - self._looked_s >= self._apart_s

    def start_again(self) -> None:
        """A rank has made progress: two further polls have to prove the hang."""
        self._is_proven = False

    def look(self, doubts: list[str], current: list[WatchedRank]) -> bool:
        """Evaluate a poll; True if it is the second one in a row that proves the hang, with all ranks at the same lines."""
        self._looked_s, before, self._lines = time.monotonic(), self._lines, lines(current)
        was_proven, self._is_proven = self._is_proven, not doubts
        return self._is_proven and was_proven and before == self._lines
