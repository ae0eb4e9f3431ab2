"""Whether it is proven that a job hangs, so that it may be ended: silence of our own channel proves nothing.

Each rank has to be accounted for by two witnesses that cannot fail together: the kernel (its process has ended; it and what it has
started use nothing) and the rank itself (it answered a request made during the standstill, and waits for other ranks or is still on the
same line). faulthandler, which answers a signal without Python's lock, stands in for a rank that cannot answer because a thread holds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ddpdoctor.launch.rankwatch import Activity, WatchedRank

Line = tuple[int, str]
"""A process, and the line of the job at which it is."""
_APART_S = 60.0
"""Between the two looks that must both prove that the job hangs before it is ended, at most; meanwhile the report is written, which
says more of a job that still runs. If less than that was asked for as the time of a hang, as much."""


def doubts(ranks: Sequence[WatchedRank], has_answered: Callable[[WatchedRank], bool]) -> list[str]:
    """What speaks against ending the job, a clause for each rank; empty if it is proven that no rank makes progress."""
    found = [(rank, _doubt(rank, has_answered)) for rank in ranks if rank.alive]
    return [f"rank {rank.rank} {doubt}" for rank, doubt in found if doubt]


def _doubt(rank: WatchedRank, has_answered: Callable[[WatchedRank], bool]) -> str | None:
    activity = rank.activity
    if activity is Activity.HELD:
        return "is stopped, in a debugger, or waits for input"
    if activity is Activity.WORKS or rank.meter.moves:
        return "reads, writes or computes"
    if rank.state == "D":
        return "waits for storage"
    if rank.holds_gil:
        return None  # it cannot answer; faulthandler has written where it is, and the kernel sees it use nothing but a processor
    if activity is Activity.UNKNOWN or not rank.is_known:
        return "does not show what it does"
    if rank.joined and not has_answered(rank):
        return "has not answered"
    return "uses a processor" if activity is Activity.COMPUTES else None


def lines(ranks: Sequence[WatchedRank]) -> frozenset[Line]:
    """Where the ranks are that do not wait for others: between two looks at a job that hangs it does not change."""
    return frozenset((rank.pid, rank.where()) for rank in ranks if rank.alive and not rank.waits)


class Kill:
    """The end of a job that hangs, as the user wants it: after two looks that prove it, a while apart."""

    def __init__(self, after_s: float) -> None:
        self._apart_s = min(after_s, _APART_S)
        self._declared_s = self._looked_s = time.monotonic()
        self._proven_s: float | None = None
        """When a look first proved it, monotonic."""
        self._lines: frozenset[Line] = frozenset()
        self.is_doubt_reported = False
        """Whether the user knows why the job is not ended."""

    def is_due(self, being_diagnosed: bool) -> bool:
        """Whether it is time for the next look."""
        now_s = time.monotonic()
        if being_diagnosed and now_s - self._declared_s < _APART_S:
            return False
        return now_s - self._looked_s >= self._apart_s

    def look(self, doubts: list[str], current: list[WatchedRank]) -> bool:
        """Take in what a look showed; whether it is the second that proves it."""
        self._looked_s, before, self._lines = time.monotonic(), self._lines, lines(current)
        if doubts:
            self._proven_s = None
        elif self._proven_s is not None and before == self._lines:
            return True
        else:
            self._proven_s = self._looked_s
        return False
