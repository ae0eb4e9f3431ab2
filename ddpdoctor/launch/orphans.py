"""What is left of a job once its command is gone: its ranks, and what started them. torchrun survives the shell that it was started by,
its ranks have sessions of their own, and whoever starts ranks may take the end of one for a failure and start it anew."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ddpdoctor.launch import procfs
from ddpdoctor.launch.leftovers import ranks_of_spools
from ddpdoctor.rundir.door import at_door
from ddpdoctor.rundir.liveness import started

GRACE_S = 45.0
"""From SIGTERM to SIGKILL: more than torchrun gives its ranks (30 s)."""
_LOOK_S = 0.1
_QUIET_S = 2.0
"""Without a rank, where processes of the job go on of which one may start ranks again; torchrun does within a second."""
_KILLING_S = 5.0
"""How long SIGKILL may take, which the kernel puts off while a process waits for storage."""
_RANK = b"RANK="
_OF_A_RANK = (_RANK, b"WORLD_SIZE=", b"LOCAL_RANK=")
"""What launchers of ranks set; whatever a rank starts inherits it."""


@dataclass(frozen=True)
class _Process:
    """A process of this launcher's job: one that has its mark, and its user."""

    pid: int
    started: int
    """In the kernel's ticks: with ``pid`` it names a process for ever."""
    parent: int = field(compare=False)
    number: int | None = field(compare=False)
    """Of the rank in whose environment it was started."""


class Rest(NamedTuple):
    """What became of processes that outlived the command, by their ids."""

    launchers: list[int]
    """What had started the ranks, some by way of others."""
    ranks: list[int]
    living: list[int]
    """Those of both that could not be ended."""

    def sentences(self) -> list[str]:
        """For the user; none where nobody was left."""
        ended = [pid for pid in (*self.launchers, *self.ranks) if pid not in self.living]
        what = " and ".join(
            name for name, pids in (("launchers", self.launchers), ("ranks", self.ranks)) if pids
        )
        said = []
        if ended:
            said.append(f"The command left {what} behind, which were ended: process {_listed(ended)}.")
        if self.living:
            said.append(
                f"These processes of the job could not be ended and may go on: {_listed(self.living)}."
            )
        return said


class Orphans:
    """Ranks of a job, and their ancestors as far as they belong to the job. Others of its processes, as a shell that it was started
    from, a terminal's server, or what ranks have started, are none."""

    def __init__(
        self,
        variable: str,
        value: str,
        root: Path,
        recorded: Mapping[int, int] | None,
        grace_s: float = GRACE_S,
    ) -> None:
        """The job's processes are known by ``variable`` in their environment, which holds ``value`` for those of this launcher only.

        The ranks' spools lie below ``root``. ``recorded``: the ranks of this host in the run directory by process id, dead ones
        included; None where that can't be read.
        """
        self._marker = f"{variable}={value}".encode()
        self._root, self._recorded, self._grace_s = root, recorded, grace_s
        self._begun_s = time.monotonic()
        self._ranks: set[_Process] = set()
        self._launchers: set[_Process] = set()
        self._no_ranks: set[_Process] = set()
        """What has a rank's environment, and was started by one."""
        self._sigterm_s: dict[_Process, float] = {}
        """When each was sent SIGTERM, monotonic."""

    def end(self, beat: Callable[[], None] = lambda: None, told_group: int = 0) -> Rest:
        """End all of them, also those who appear meanwhile: from the top down, so that who started ranks can end them itself, each by
        SIGTERM and after the grace by SIGKILL. Those of the process group ``told_group`` were sent a signal already.

        Takes as long as they take, at most twice the grace and some seconds. ``beat`` is called now and then.
        """
        self._begun_s = quiet_since_s = time.monotonic()
        give_up_s = self._begun_s + 2 * self._grace_s + _KILLING_S
        while True:
            beat()
            marked = {pid: each for pid in procfs.pids() if (each := self._process(pid)) is not None}
            left = self._left(marked)
            now_s = time.monotonic()
            if left:
                quiet_since_s = now_s
            if now_s > give_up_s or (not left and (not marked or now_s - quiet_since_s > _QUIET_S)):
                launchers = self._launchers - self._ranks
                return Rest(*(sorted(each.pid for each in group) for group in (launchers, self._ranks, left)))
            for process in left:
                if told_group and _group(process.pid) == told_group:
                    self._sigterm_s.setdefault(process, now_s)
            told_group = 0
            for process in self._due(left, marked):
                self._signal(process)
            time.sleep(_LOOK_S)

    def _process(self, pid: int) -> _Process | None:
        """None where it is gone, another user's, or of another job."""
        began = started(pid)
        environment = [] if began is None or pid == os.getpid() else _environment(pid)
        if began is None or self._marker not in environment or procfs.user_of(pid) != os.getuid():
            return None
        return _Process(pid, began, procfs.parent_of(pid), _number(environment))

    def _left(self, marked: dict[int, _Process]) -> list[_Process]:
        """Those who live, and are or once were ranks or ancestors of one."""
        ranks = self._living_ranks(marked)
        self._ranks.update(ranks)
        for rank in ranks:
            self._launchers.update(_ancestors(rank, marked))
        return [each for each in marked.values() if each in self._ranks or each in self._launchers]

    def _living_ranks(self, marked: dict[int, _Process]) -> list[_Process]:
        """Those who have shown themselves, and those who have not yet, most of them because they are still to import torch."""
        at_the_door = {pid: rank for rank, pid, _ in at_door(str(self._root))}
        shown = {**(self._recorded or {}), **ranks_of_spools(self._root), **at_the_door}
        living = {rank for pid, rank in shown.items() if pid in marked}
        ranks = [process for pid, process in marked.items() if pid in shown]
        for process in marked.values():
            if process.number is None or process.pid in shown or process in self._no_ranks:
                continue
            parent = marked.get(process.parent)
            by_rank = parent is not None and parent.number is not None
            # One started anew has the number of a dead one, as has what that one had started; the latter has lost its parent.
            left_by_rank = parent is None and (self._recorded is None or process.number in shown.values())
            if by_rank or left_by_rank or process.number in living:
                self._no_ranks.add(process)
            else:
                ranks.append(process)
        return ranks

    def _due(self, left: list[_Process], marked: dict[int, _Process]) -> list[_Process]:
        """Those whose turn it is: who have nobody above them any more; once the grace is over twice, all."""
        if time.monotonic() - self._begun_s > 2 * self._grace_s:
            return left
        pids = {each.pid for each in left}
        return [each for each in left if not any(above.pid in pids for above in _ancestors(each, marked))]

    def _signal(self, process: _Process) -> None:
        now_s = time.monotonic()
        if process not in self._sigterm_s:
            self._sigterm_s[process] = now_s
            self._send(process, signal.SIGTERM)
        elif now_s > min(self._sigterm_s[process] + self._grace_s, self._begun_s + 2 * self._grace_s):
            self._send(process, signal.SIGKILL)

    def _send(self, process: _Process, number: int) -> None:
        """To that process or, where it has gone meanwhile, to nobody."""
        try:
            handle = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else -1
        except ProcessLookupError:
            return
        except OSError:
            handle = -1  # the kernel is older than 5.3, or a filter refuses it
        try:
            if self._process(process.pid) != process:
                return
            if handle >= 0 and hasattr(signal, "pidfd_send_signal"):
                signal.pidfd_send_signal(handle, number)
            else:
                os.kill(process.pid, number)
        except OSError:
            pass  # gone, or not ours to signal
        finally:
            if handle >= 0:
                os.close(handle)


def _listed(pids: list[int]) -> str:
    return ", ".join(map(str, pids))


def _ancestors(process: _Process, marked: dict[int, _Process]) -> Iterator[_Process]:
    """From the parent upwards, as far as they belong to the job."""
    seen = {process.pid}
    while (above := marked.get(process.parent)) is not None and above.pid not in seen:
        seen.add(above.pid)
        yield above
        process = above


def _group(pid: int) -> int:
    """A process's group, 0 where it is gone."""
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def _number(environment: list[bytes]) -> int | None:
    """The rank's number in an environment."""
    values = [next((each for each in environment if each.startswith(name)), b"") for name in _OF_A_RANK]
    number = values[0][len(_RANK) :]
    return int(number) if all(values) and number.isdigit() and len(number) < 10 else None


def _environment(pid: int) -> list[bytes]:
    """What a process was started with; empty where it is gone, or another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
