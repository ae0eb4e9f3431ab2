"""State of this host's ranks before ``init_process_group``, from their pre-init files and /proc."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ddpdoctor.launch.rankwatch import WatchedRank
from ddpdoctor.rundir.host_files import (
    UnjoinedStatus,
    read_unjoined,
    remove_unjoined_file,
    unjoined_file_holder,
    unjoined_files,
)
from ddpdoctor.rundir.packages import innermost_line
from ddpdoctor.telemetry import procfs

_FIRST_THREAD = "(most recent call first):"
"""Text before each stack that faulthandler writes."""
_MOST_ANCESTORS = 64


@dataclass
class UnjoinedRank(WatchedRank):
    """A rank that has not joined its process group; ``spool`` is its pre-init file."""

    joined: ClassVar[bool] = False
    said: UnjoinedStatus = field(default_factory=UnjoinedStatus)
    has_left: bool = False
    """Whether its file is gone, because it has joined and begins to record."""

    def update(self) -> bool:
        """Update the state. Returns False: no step is finished."""
        if self.end is None:
            self._read_process()
        if self.has_left:
            return False
        if self.end is None or "raised" not in self.end:
            self.said = read_unjoined(self.spool)
        if self.end is not None:
            raised = self.said.about.get("raised") or []
            self.end.update(step=None, raised=raised, joined=False, waits=self.waits)
        return False

    @property
    def waits(self) -> bool:
        """Whether it has called ``init_process_group``."""
        return isinstance(self.said.about.get("joining_ns"), int)

    @property
    def world_size(self) -> int | None:
        """Number of ranks of the job, from its environment; None if unknown."""
        size = self.said.about.get("world_size")
        return size if isinstance(size, int) else None

    @property
    def signs(self) -> tuple[Any, ...]:
        """Values that change when it makes progress, which is a call of ``init_process_group``."""
        return (self.waits,)

    @property
    def faults(self) -> str:
        """Stacks that faulthandler wrote on request; else the stack of the call of ``init_process_group``."""
        return self.said.faults or _faulthandler_text(self.said.about.get("frames"))

    def _found_pid(self) -> int:
        holder = unjoined_file_holder(self.spool)
        return self.pid if holder is None else holder

    @property
    def is_known(self) -> bool:
        """Whether its process is visible from here. It does not report its position."""
        return bool(self.here_pid and self.state)

    def ask(self) -> None:
        """Have faulthandler write its stacks, if its signal handler and its file's descriptor are still in place.

        Not during ``init_process_group``, nor in a system call that a signal interrupts: c10d's store treats that as a failure.
        """
        number, handle = self.said.about.get("signal"), self.said.about.get("handle")
        if not isinstance(number, int) or not isinstance(handle, int) or number <= 0 or not self.here_pid:
            return
        with suppress(OSError):  # the rank has ended or joined
            is_own = Path(f"/proc/{self.here_pid}/fd/{handle}").samefile(self.spool)
            if not is_own or not procfs.catches(self.here_pid, number):
                return
            if (
                not procfs.is_interruptible(self.here_pid)
                and "joining_ns" not in read_unjoined(self.spool).about
            ):
                os.kill(self.here_pid, number)

    def where(self) -> str:
        """Its current line of the job's own code, as text; "" if unknown."""
        return innermost_line(self.faults)


def _faulthandler_text(frames: Any) -> str:
    """Frames, innermost first, in faulthandler's format."""
    if not isinstance(frames, list):
        return ""
    lines = [
        f'  File "{frame[0]}", line {frame[1]} in {frame[2]}'
        for frame in frames
        if isinstance(frame, list) and len(frame) == 3
    ]
    return "\n".join([f"Thread 0x0 {_FIRST_THREAD}", *lines]) if lines else ""


class UnjoinedRanks:
    """All ranks of this host that have not joined a process group, found when they appear."""

    def __init__(self, root: str) -> None:
        self._root = root
        self.known: dict[str, UnjoinedRank] = {}
        self._child_files: set[str] = set()
        """Files of child processes that inherited a rank's environment variables."""

    def update(self, joined: Collection[int]) -> None:
        """Update all ranks. ``joined``: process ids of ranks that record."""
        files = unjoined_files(self._root)
        all_pids = {*joined, *(pid for _, pid, _ in files)}
        for rank, pid, path in files:
            if path not in self.known and path not in self._child_files:
                at_ns = read_unjoined(path).about.get("at_ns")
                began_ns = at_ns if isinstance(at_ns, int) else 0
                found = UnjoinedRank(path, rank, pid, began_ns=began_ns)
                found.open()
                if all_pids.isdisjoint(_ancestors(found.here_pid)):
                    self.known[path] = found
                else:
                    found.close()
                    self._child_files.add(path)
        paths = {path for _, _, path in files}
        for path, found in list(self.known.items()):
            found.has_left = path not in paths
            found.update()
            ended = found.end is not None and found.end["in_order"]
            if ended:
                remove_unjoined_file(path)
            if ended or found.pid in joined:
                found.close()
                del self.known[path]

    @property
    def handles(self) -> list[int]:
        """File descriptors that become readable when one of the processes ends."""
        return [rank.handle for rank in self.known.values() if rank.handle >= 0]

    def seen(self, rank: int, pid: int) -> WatchedRank | None:
        """The rank with this number and process id, also if it has joined since; None if it was not seen here."""
        return next((each for each in self.known.values() if each.key == (rank, pid)), None)

    def newest_start_ns(self) -> int:
        """Start of the newest running rank, epoch ns; 0 if there is none."""
        return max((rank.began_ns for rank in self._waiting() if rank.alive), default=0)

    def _waiting(self) -> list[UnjoinedRank]:
        return [rank for rank in self.known.values() if not rank.has_left]

    def current(self, joined: Collection[int]) -> list[WatchedRank]:
        """One recording of each rank that is not in ``joined`` (rank numbers)."""
        living_last = sorted(self._waiting(), key=lambda rank: (rank.alive, rank.pid))
        newest = {rank.rank: rank for rank in living_last if rank.rank not in joined}
        return [newest[number] for number in sorted(newest)]

    def ends(self, joined: Collection[int]) -> list[dict[str, Any]]:
        """Rows for ``ends.json`` of ranks that have ended, except for those in ``joined`` that still have a file."""
        ended = [rank for rank in self.known.values() if rank.end is not None]
        return [rank.end for rank in ended if rank.end and (rank.has_left or rank.rank not in joined)]


def _ancestors(pid: int) -> Iterator[int]:
    for _ in range(_MOST_ANCESTORS):
        pid = procfs.parent_of(pid)
        if pid <= 1:
            return
        yield pid
