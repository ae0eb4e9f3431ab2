"""Whether it is proven that a job hangs, so that it may be ended: silence of our own channel proves nothing.

Each rank has to be accounted for by two witnesses that cannot fail together: the kernel (its process has ended; it and what it has
started use nothing) and the rank itself (it answered a request made during the standstill, and waits for other ranks or is still on the
same line). faulthandler, whose timer is a thread of C, stands in for a rank that cannot answer because a thread holds Python's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddpdoctor.launch.rankwatch import Activity, WatchedRank

Line = tuple[int, str]
"""A process, and the line of the job at which it is."""


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
