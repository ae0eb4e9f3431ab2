"""The ranks of this host that have not joined their process group, as the files they keep meanwhile and the kernel show them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ddpdoctor.launch import procfs
from ddpdoctor.launch.rankwatch import WatchedRank
from ddpdoctor.rundir.door import AtDoor, at_door, close_door, read_door
from ddpdoctor.rundir.packages import is_library

_LINE = re.compile(r'^  File "([^"\n]*)", line ([0-9]{1,9}) in (\S+)', re.MULTILINE)
_FIRST_THREAD = "(most recent call first):"
"""Before each stack that faulthandler writes; that of Python's first thread comes last."""
_MOST_ANCESTORS = 64


@dataclass
class UnjoinedRank(WatchedRank):
    """One of them."""

    joined: ClassVar[bool] = False
    said: AtDoor = field(default_factory=AtDoor)

    def look(self) -> bool:
        """Bring all up to date; it finishes no steps."""
        if self.end is None:
            self._look_at_process()
            self.progress = {}
        if self.end is None or "raised" not in self.end:
            self.said = read_door(self.spool)
        if self.end is not None:
            self.end.update(step=None, raised=self.said.about.get("raised") or [])
        return False

    @property
    def waits(self) -> bool:
        """Whether it has asked to join."""
        return isinstance(self.said.about.get("joining_ns"), int)

    @property
    def faults(self) -> str:
        """What faulthandler wrote when it was asked."""
        return self.said.faults

    def ask(self) -> None:
        """Have faulthandler write its stacks, where it has the signal that it said, and the file is still behind its descriptor."""
        number, handle = self.said.about.get("signal"), self.said.about.get("handle")
        if not isinstance(number, int) or not isinstance(handle, int) or number <= 0:
            return
        try:
            ours = Path(f"/proc/{self.pid}/fd/{handle}").samefile(self.spool)
            if ours and procfs.catches(self.pid, number):
                os.kill(self.pid, number)
        except OSError:
            pass  # it has gone, or joined, meanwhile

    def where(self) -> str:
        """The line of the job's own code at which it is, in words; "" where it does not say."""
        places = _LINE.findall(self.faults.rpartition(_FIRST_THREAD)[2])
        own = [place for place in places if not is_library(place[0])]
        return next((f"{Path(file).name}:{line} ({name[:60]})" for file, line, name in own), "")


class Door:
    """All of them, found as they appear."""

    def __init__(self, root: str) -> None:
        self._root = root
        self.known: dict[str, UnjoinedRank] = {}

    def look(self, joined: Collection[int]) -> None:
        """Bring all up to date; ``joined`` are the process ids of ranks."""
        there = at_door(self._root)
        for rank, pid, path in there:
            if path not in self.known:
                self.known[path] = UnjoinedRank(path, rank, pid)
                self.known[path].open()
        paths = {path for _, _, path in there}
        self.known = {
            path: rank for path, rank in self.known.items() if path in paths and rank.pid not in joined
        }
        everybody = {*joined, *(rank.pid for rank in self.known.values())}
        for path, rank in list(self.known.items()):
            rank.look()
            if rank.alive and not everybody.isdisjoint(_ancestors(rank.pid)):
                # A program that a rank has started, which has its variables.
                del self.known[path]
            elif rank.end is not None and rank.end["in_order"]:
                close_door(path)
                del self.known[path]

    def current(self, joined: Collection[int]) -> list[WatchedRank]:
        """One for each rank that is not among the numbers ``joined``."""
        living_last = sorted(self.known.values(), key=lambda rank: (rank.alive, rank.pid))
        newest = {rank.rank: rank for rank in living_last if rank.rank not in joined}
        return [newest[number] for number in sorted(newest)]

    def ends(self) -> list[dict[str, Any]]:
        """How those ended that have, and not in order."""
        return [rank.end for rank in self.known.values() if rank.end is not None]


def _ancestors(pid: int) -> Iterator[int]:
    for _ in range(_MOST_ANCESTORS):
        pid = procfs.parent_of(pid)
        if pid <= 1:
            return
        yield pid
