"""Ends processes of a job that outlived its command: ranks, and the launchers that started them.

torchrun survives the shell that started it, and its ranks have sessions of their own. Launchers are ended before their ranks: a
launcher may take the end of a rank for a failure and restart it."""

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
from ddpdoctor.rundir.host_files import unjoined_files
from ddpdoctor.rundir.liveness import started

GRACE_S = 45.0
"""From SIGTERM to SIGKILL: more than torchrun gives its ranks (30 s)."""
_LOOK_S = 0.1
_QUIET_S = 2.0
"""Time without a rank after which no restart is expected while other processes of the job run; torchrun restarts within a second."""
_KILLING_S = 5.0
"""Time that SIGKILL may take: the kernel delays it while a process waits for storage."""
_RANK = b"RANK="
_OF_A_RANK = (_RANK, b"WORLD_SIZE=", b"LOCAL_RANK=")
"""Variables that launchers set for ranks; children of ranks inherit them."""


@dataclass(frozen=True)
class _Process:
    """A process of this launcher's job: it has the launcher's variable in its environment, and the same user."""

    pid: int
    started: int
    """In the kernel's ticks: identifies a process together with ``pid``."""
    parent: int = field(compare=False)
    number: int | None = field(compare=False)
    """RANK in its environment."""


class Rest(NamedTuple):
    """Processes that outlived the command, by process id."""

    launchers: list[int]
    """Ancestors of ranks."""
    ranks: list[int]
    living: list[int]
    """Those of both that could not be ended."""

    def sentences(self) -> list[str]:
        """Sentences for the user; none if there was no such process."""
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
    """The ranks of a job, and their ancestors that belong to the job. Its other processes (a shell, a terminal's server, children of ranks)
    are not ended."""

    def __init__(
        self,
        variable: str,
        value: str,
        root: Path,
        recorded: Mapping[int, int] | None,
        grace_s: float = GRACE_S,
    ) -> None:
        """The job's processes have ``variable=value`` in their environment.

        ``root``: folder of the ranks' spools. ``recorded``: ranks of this host in the run directory by process id, also dead ones;
        None if unknown.
        """
        self._marker = f"{variable}={value}".encode()
        self._root, self._recorded, self._grace_s = root, recorded, grace_s
        self._begun_s = time.monotonic()
        self._ranks: set[_Process] = set()
        self._launchers: set[_Process] = set()
        self._no_ranks: set[_Process] = set()
        """Children of ranks, which inherit a rank's environment."""
        self._sigterm_s: dict[_Process, float] = {}
        """When each was sent SIGTERM, monotonic seconds."""

    def end(self, beat: Callable[[], None] = lambda: None, signalled_group: int = 0) -> Rest:
        """End all of them, also those that appear meanwhile, each by SIGTERM and after the grace period by SIGKILL. Launchers are ended
        first, so that they can end their ranks. Processes of the process group ``signalled_group`` have had a signal already.

        Takes at most twice the grace period and some seconds. ``beat`` is called in between.
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
                if signalled_group and _group(process.pid) == signalled_group:
                    self._sigterm_s.setdefault(process, now_s)
            signalled_group = 0
            for process in self._due(left, marked):
                self._signal(process)
            time.sleep(_LOOK_S)

    def _process(self, pid: int) -> _Process | None:
        """None if it is gone, another user's, or of another job."""
        began = started(pid)
        environment = [] if began is None or pid == os.getpid() else _environment(pid)
        if began is None or self._marker not in environment or procfs.user_of(pid) != os.getuid():
            return None
        return _Process(pid, began, procfs.parent_of(pid), _number(environment))

    def _left(self, marked: dict[int, _Process]) -> list[_Process]:
        """Living ranks and ancestors of ranks, also of ranks that have ended."""
        ranks = self._living_ranks(marked)
        self._ranks.update(ranks)
        for rank in ranks:
            self._launchers.update(_ancestors(rank, marked))
        return [each for each in marked.values() if each in self._ranks or each in self._launchers]

    def _living_ranks(self, marked: dict[int, _Process]) -> list[_Process]:
        """Ranks that have a record, and processes with a rank's variables that have none yet, as before they import torch."""
        before_init = {pid: rank for rank, pid, _ in unjoined_files(str(self._root))}
        shown = {**(self._recorded or {}), **ranks_of_spools(self._root), **before_init}
        living = {rank for pid, rank in shown.items() if pid in marked}
        ranks = [process for pid, process in marked.items() if pid in shown]
        for process in marked.values():
            if process.number is None or process.pid in shown or process in self._no_ranks:
                continue
            parent = marked.get(process.parent)
            by_rank = parent is not None and parent.number is not None
            # A restarted rank has the number of a dead one, as do children of the dead one; those have lost their parent.
            left_by_rank = parent is None and (self._recorded is None or process.number in shown.values())
            if by_rank or left_by_rank or process.number in living:
                self._no_ranks.add(process)
            else:
                ranks.append(process)
        return ranks

    def _due(self, left: list[_Process], marked: dict[int, _Process]) -> list[_Process]:
        """Those without a living ancestor; all of them after twice the grace period."""
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
        """Send the signal, only if the process id is still that process."""
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
    """From the parent upwards, those that belong to the job."""
    seen = {process.pid}
    while (above := marked.get(process.parent)) is not None and above.pid not in seen:
        seen.add(above.pid)
        yield above
        process = above


def _group(pid: int) -> int:
    """Process group of a process, 0 if it is gone."""
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def _number(environment: list[bytes]) -> int | None:
    """RANK in an environment that has all variables of a rank, else None."""
    values = [next((each for each in environment if each.startswith(name)), b"") for name in _OF_A_RANK]
    number = values[0][len(_RANK) :]
    return int(number) if all(values) and number.isdigit() and len(number) < 10 else None


def _environment(pid: int) -> list[bytes]:
    """The environment at a process's start; empty if it is gone or another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
