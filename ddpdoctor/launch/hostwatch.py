"""All ranks of this host, from one look to the next: found as they begin to record, and their ends as the kernel tells them."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddpdoctor.launch.rankwatch import WatchedRank
from ddpdoctor.rundir import spools_in
from ddpdoctor.rundir.layout import parse_spool_name
from ddpdoctor.telemetry.cgroup import Cgroup

_NEW_S = 0.1
"""Between two looks for new ranks: one that ends before it was seen leaves no exit code, and those that lose it would be blamed."""


class HostWatchedRanks:
    """All of them, found as they appear."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._listed_ns = 0
        """When the root had last changed before it was last listed."""
        self.known: dict[str, WatchedRank] = {}
        self._groups: dict[str, tuple[Cgroup, int]] = {}
        """Of each, its control group, and how often that had been short of memory when the rank was found."""

    def wait(self, seconds: float, also: list[int]) -> None:
        """Until something happens to a process, or in ``also``, or a rank begins to record, at most for so long."""
        ends_s = time.monotonic() + seconds
        with selectors.PollSelector() as selector:
            for rank in self.known.values():
                if rank.handle >= 0:
                    selector.register(rank.handle, selectors.EVENT_READ, rank)
            for handle in also:
                selector.register(handle, selectors.EVENT_READ)
            ready: list[tuple[selectors.SelectorKey, int]] = []
            while (
                not ready
                and self._listed_ns == self._changed_ns()
                and (left_s := ends_s - time.monotonic()) > 0
            ):
                ready = selector.select(min(left_s, _NEW_S))
            for key, _ in ready:
                if key.data is not None:
                    key.data.note_end()

    def _changed_ns(self) -> int:
        try:
            return Path(self._root).stat().st_mtime_ns
        except OSError:
            return 0

    def look(self, seen: Callable[[int, int], WatchedRank | None] | None = None) -> bool:
        """Whether a step was finished by one of them. ``seen``: the process of a rank, by its numbers, if it was known before it
        recorded."""
        self._listed_ns = self._changed_ns()
        for spool in spools_in(self._root):
            if spool not in self.known and (found := _watched(spool)) is not None:
                before = None if seen is None else seen(found.rank, found.pid)
                if before is None:
                    found.open()
                else:
                    found.follow(before)
                group = Cgroup(Path(f"/proc/{found.here_pid}"))
                if (kills := group.oom_kills()) is not None:
                    self._groups[spool] = group, kills
                self.known[spool] = found
        stepped = [rank.look() for rank in self.known.values()]
        for spool, rank in self.known.items():
            if rank.end is not None and rank.end["oom_kills"] is None:
                rank.end["oom_kills"] = self._kills(spool)
        return any(stepped)

    def _kills(self, spool: str) -> int | None:
        if spool not in self._groups:
            return None
        group, before = self._groups[spool]
        now = group.oom_kills()
        return None if now is None else now - before

    def ends(self, unjoined: list[dict[str, Any]]) -> dict[str, Any]:
        """How those ended that have, and others that had not joined."""
        ends = [*(rank.end for rank in self.known.values() if rank.end is not None), *unjoined]
        kills = [found for spool in self.known if (found := self._kills(spool)) is not None] if ends else []
        return {"ends": ends, "oom_kills": max(kills, default=None)}

    def current(self, started_ns: int = 0) -> list[WatchedRank]:
        """Of each rank the living or newest recording, by rank; without those of an earlier attempt, which had died before some
        rank of this one began. ``started_ns``: when the last one was started that has not joined yet."""
        newest: dict[int, WatchedRank] = {}
        for rank in self.known.values():
            if rank.alive or rank.rank not in newest or not newest[rank.rank].alive:
                newest[rank.rank] = rank
        begun_ns = max([started_ns, *(rank.began_ns for rank in newest.values() if rank.alive)])
        of_now = [rank for rank in newest.values() if rank.end is None or rank.end["seen_ns"] >= begun_ns]
        return sorted(of_now, key=lambda rank: rank.rank)


def _watched(spool: str) -> WatchedRank | None:
    named = parse_spool_name(spool)
    return None if named is None else WatchedRank(spool, *named)
