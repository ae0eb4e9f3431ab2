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
            raised = self.said.about.get("raised") or []
            self.end.update(step=None, raised=raised, joined=False, waits=self.waits)
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
        self._others: set[str] = set()
        """Files of programs that ranks have started, which have their variables."""

    def look(self, joined: Collection[int]) -> None:
        """Bring all up to date; ``joined`` are the process ids of ranks."""
        there = at_door(self._root)
        everybody = {*joined, *(pid for _, pid, _ in there)}
        for rank, pid, path in there:
            if path not in self.known and path not in self._others:
                if everybody.isdisjoint(_ancestors(pid)):
                    self.known[path] = UnjoinedRank(path, rank, pid)
                    self.known[path].open()
                else:
                    self._others.add(path)
        paths = {path for _, _, path in there}
        for path, found in list(self.known.items()):
            found.look()
            ended = found.end is not None and found.end["in_order"]
            if ended:
                close_door(path)
            if ended or path not in paths or found.pid in joined:
                found.close()
                del self.known[path]

    def current(self, joined: Collection[int]) -> list[WatchedRank]:
        """One for each rank that is not among the numbers ``joined``."""
        living_last = sorted(self.known.values(), key=lambda rank: (rank.alive, rank.pid))
        newest = {rank.rank: rank for rank in living_last if rank.rank not in joined}
        return [newest[number] for number in sorted(newest)]

    def ends(self, joined: Collection[int]) -> list[dict[str, Any]]:
        """How those ended that have, and not in order; but for those whose numbers ``joined`` later."""
        return [rank.end for rank in self.known.values() if rank.end is not None and rank.rank not in joined]


def _ancestors(pid: int) -> Iterator[int]:
    for _ in range(_MOST_ANCESTORS):
        pid = procfs.parent_of(pid)
        if pid <= 1:
            return
        yield pid
