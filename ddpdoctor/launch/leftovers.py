"""Handles what a job leaves: records in memory-backed storage (spools), ranks that still write, processes that outlived the command.

torchrun survives the shell that started it, and its ranks have sessions of their own. Launchers are ended before their ranks, because a
launcher may restart a rank that ends.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ddpdoctor.hook.environment import SPOOL
from ddpdoctor.rundir import layout
from ddpdoctor.rundir.draining import PATIENCE_S, Waiting, discard, drain, unsaved_sentence, waiting_in
from ddpdoctor.rundir.files import read_json
from ddpdoctor.rundir.host_files import copy_host_documents, remove_root, unjoined_files
from ddpdoctor.rundir.liveness import State, is_over, is_running, last_change_s, started, writer_of
from ddpdoctor.rundir.owned import private_folder
from ddpdoctor.rundir.spool import own_roots_prefix, roots_of, spools_in
from ddpdoctor.telemetry import procfs

_SAVING_S = 2.0
_STALE_S = 24 * 3600.0


class HostRanks:
    """The ranks of a run on one host, by their folders in the run directory."""

    def __init__(self, run: Path, host: str) -> None:
        self._ranks, self._host = run / "ranks", host
        self._known: dict[str, dict[str, Any] | None] = {}
        self._roots: list[Path] | None = None
        self._pids: dict[int, int] = {}
        self._changed_ns: dict[Path, int] = {}

    def all(self) -> list[tuple[int, int]]:
        """(Rank, process id) of all ranks recorded on this host so far, including dead ones."""
        self._read_rank_files(float("inf"))
        return [(int(info["rank"]), int(info["pid"])) for info in self._known.values() if info is not None]

    def pid_by_rank(self) -> dict[int, int]:
        """Process id, in this pid namespace, of each rank that has recorded on this host; of a restarted rank the newest. Only the first
        call reads storage."""
        if self._roots is None:
            self._roots = [Path(root) for root in roots_of(str(self._ranks.parent))]
        for root in self._roots:
            try:
                changed_ns = root.stat().st_mtime_ns
            except OSError:
                continue
            if changed_ns != self._changed_ns.get(root):
                ranks = ranks_of_spools(root)
                self._pids.update({rank: pid for pid, rank in ranks.items()})
                if len(ranks) == len(
                    spools_in(str(root))
                ):  # otherwise a rank has not written its process id yet
                    self._changed_ns[root] = changed_ns
        return dict(self._pids)

    def folders(self) -> list[str]:
        """Paths of the folders of all ranks recorded on this host so far."""
        self._read_rank_files(float("inf"))
        return [str(self._ranks / name) for name, info in self._known.items() if info is not None]

    def _read_rank_files(self, deadline_s: float) -> None:
        """Read ``rank.json`` of new ranks, until the deadline (monotonic seconds)."""
        for folder in self._folders():
            if time.monotonic() > deadline_s:
                return
            if folder.name not in self._known and (folder / layout.RANK_FILE).exists():
                info = read_json(str(folder / layout.RANK_FILE), []) or {}
                here = info.get("host") == self._host and info.get("pid")
                self._known[folder.name] = info if here else None

    def saving(self, deadline_s: float = float("inf")) -> list[int]:
        """Process ids of ranks of this host that may run and are saving their trace. The search ends at ``deadline_s`` (monotonic
        seconds)."""
        self._read_rank_files(deadline_s)
        # Only the files of living ranks are read again: there may be thousands of others, elsewhere or ended.
        alive = [(name, info) for name, info in self._known.items() if info and is_running(info) is not False]
        return [
            int(info["pid"])
            for name, info in alive
            if time.monotonic() < deadline_s and self._is_saving(name)
        ]

    def _is_saving(self, folder: str) -> bool:
        info = read_json(str(self._ranks / folder / layout.RANK_FILE), []) or {}
        window = info.get("window")
        return isinstance(window, dict) and window.get("state") == "saving"

    def wait_for_traces(self) -> None:
        """Wait up to ``_SAVING_S`` for traces that are being saved."""
        deadline_s = time.monotonic() + _SAVING_S
        while time.monotonic() < deadline_s and self.saving(deadline_s):
            time.sleep(0.05)

    def recorded(self) -> int:
        """Number of rank recordings in the run directory, of all hosts."""
        return len(self._folders())

    def _folders(self) -> list[Path]:
        try:
            with os.scandir(self._ranks) as entries:
                return sorted(Path(entry.path) for entry in entries if entry.is_dir())
        except OSError:
            return []


def drain_spools(root: Path, beat: Callable[[], None] = lambda: None, run: Path | None = None) -> list[str]:
    """Copy the ranks' records below ``root`` to their run directories, and the host's documents to ``run``. Remove spools of dead ranks.

    ``beat`` is called during progress. Returns a sentence for each run directory that cannot be written. Spools of living ranks stay:
    several launchers of a host share ``root``.
    """
    waiting: dict[str, list[Waiting]] = {}
    failure = None
    gone = set()
    deadline_s = time.monotonic() + PATIENCE_S
    for spool in spools_in(str(root)):
        target = _target_of(spool)
        dead = is_over(spool)
        try:
            drain(spool, remove=dead, deadline_s=deadline_s, beat=beat)
        except OSError as error:
            if not dead or not Path(spool).exists():
                continue  # the rank lives, or another launcher of this host has removed the spool
            is_missing = isinstance(error, FileNotFoundError) and not os.path.lexists(target)
            if is_missing or isinstance(error, layout.OtherRunError):
                with suppress(OSError):
                    discard(spool)
                gone.add(target)
            else:
                waiting.setdefault(layout.run_of(target), []).append(waiting_in(spool, target))
                failure = error
    if run is not None:
        try:
            copy_host_documents(str(root), str(run))
        except OSError as error:
            failure = failure or error
    remove_root(str(root))
    sentences = [
        f"What was recorded last could not be copied: {target} is gone." for target in sorted(gone) if target
    ]
    if failure is not None:
        sentences += [unsaved_sentence(run, each, failure) for run, each in waiting.items()]
    return sentences


def ranks_of_spools(root: Path) -> dict[int, int]:
    """Ranks that have a spool below ``root``, by process id in this pid namespace; those that still write come last."""
    found = []
    for spool in spools_in(str(root)):
        named = layout.parse_spool_name(spool)
        state, pid = writer_of(spool)
        if named is not None and pid:
            found.append((state is State.WRITING, pid, named[0]))
    return {pid: rank for _, pid, rank in sorted(found)}


def _target_of(spool: str) -> str:
    try:
        return layout.target_of(spool)
    except OSError:
        return ""


def clear_spools_of_earlier_runs(run: Path, root: Path) -> None:
    """Remove the spools of dead ranks of an earlier run whose directory had the path ``run`` and was deleted. ``root`` holds the spools of
    the present run. Never raises.

    If the earlier run was only renamed within its folder, its spools stay: ``recover`` finds them by the run's id.
    """
    with suppress(OSError):
        for other in root.parent.glob(f"{own_roots_prefix()}*"):
            if other == root:
                continue
            spools = [s for s in spools_in(str(other)) if Path(_target_of(s)).is_relative_to(run)]
            # The runs beside this one are read only if necessary: their storage may not answer.
            if not spools or any(
                str(other) in roots_of(str(path))
                for path in run.parent.iterdir()
                if path != run and (path / layout.MANIFEST_FILE).is_file()
            ):
                continue
            for spool in spools:
                if is_over(spool):
                    with suppress(OSError):
                        discard(spool)
            remove_root(str(other))


def stale_roots(root: Path) -> list[Path]:
    """Spool roots of other runs that have not changed for a day, which killed launchers left. ``root``: the present run's root."""
    found = []
    for other in root.parent.glob(f"{own_roots_prefix()}*"):
        try:
            if other != root and _last_write_s(other) < time.time() - _STALE_S:
                found.append(other)
        except OSError:
            continue
    return found


def drain_stale_spools(root: Path) -> None:
    """Copy the spools of :func:`stale_roots` to their run directories and remove them. Spools of living ranks, and those that cannot be
    copied, stay. The storage may not answer, so call this in a helper process.
    """
    for other in stale_roots(root):
        try:
            drain_spools(other)
        except OSError:
            continue


def _last_write_s(root: Path) -> float:
    """Time of the last write below a root, epoch seconds. Raises OSError."""
    times = [root.lstat().st_mtime]
    for spool in spools_in(str(root)):
        with private_folder(spool) as here:
            times.append(last_change_s(here))
    return max(times)


GRACE_S = 45.0
"""Time between SIGTERM and SIGKILL, longer than torchrun's timeout for its ranks (30 s)."""
_POLL_S = 0.1
_QUIET_S = 2.0
"""Time without a rank after which no restart is expected, although other processes of the job run; torchrun restarts within a second."""
_KILLING_S = 5.0
"""Time that SIGKILL may take: the kernel delays it while a process waits for storage."""
_RANK = b"RANK="
_RANK_VARIABLES = (_RANK, b"WORLD_SIZE=", b"LOCAL_RANK=")
"""Variables that launchers set for ranks; children of ranks inherit them."""


@dataclass(frozen=True)
class _Process:
    """A process of this launcher's job: it has the launcher's variable in its environment, and the same user."""

    pid: int
    started: int
    """Start in the kernel's ticks; identifies a process together with ``pid``."""
    parent: int = field(compare=False)
    number: int | None = field(compare=False)
    """RANK in its environment."""


class EndedOrphans(NamedTuple):
    """Process ids of processes that outlived the command."""

    launchers: list[int]
    """Ancestors of ranks."""
    ranks: list[int]
    living: list[int]
    """Launchers and ranks that could not be ended."""

    def sentences(self) -> list[str]:
        """Sentences for the user; none if there was no such process."""
        ended = [pid for pid in (*self.launchers, *self.ranks) if pid not in self.living]
        what = " and ".join(
            name for name, pids in (("launchers", self.launchers), ("ranks", self.ranks)) if pids
        )
        sentences = []
        if ended:
            sentences.append(f"The command left {what} behind, which were ended: process {_listed(ended)}.")
        if self.living:
            sentences.append(
                f"These processes of the job could not be ended and may go on: {_listed(self.living)}."
            )
        return sentences


class Orphans:
    """Ends the ranks of a job, and their ancestors that belong to the job. Other processes of the job (a shell, a terminal server,
    children of ranks) are not ended."""

    def __init__(
        self,
        variable: str,
        value: str,
        root: Path,
        recorded: Mapping[int, int] | None,
        grace_s: float = GRACE_S,
    ) -> None:
        """The job's processes have ``variable=value`` in their environment.

        ``root``: folder of the ranks' spools. ``recorded``: ranks of this host in the run directory by process id, including dead ones;
        None if unknown.
        """
        self._marker = f"{variable}={value}".encode()
        self._root, self._recorded, self._grace_s = root, recorded, grace_s
        self._begun_s = time.monotonic()
        self._ranks: set[_Process] = set()
        self._launchers: set[_Process] = set()
        self._rank_children: set[_Process] = set()
        """Children of ranks, which inherit a rank's environment."""
        self._sigterm_s: dict[_Process, float] = {}
        """Time of SIGTERM by process, monotonic seconds."""

    def end(self, beat: Callable[[], None] = lambda: None, signalled_group: int = 0) -> EndedOrphans:
        """End the processes, including those that appear meanwhile, by SIGTERM and after the grace period by SIGKILL. Launchers are ended
        first, so that they can end their ranks. Processes of the process group ``signalled_group`` already got a signal.

        Takes at most twice the grace period and some seconds. ``beat`` is called repeatedly.
        """
        self._begun_s = quiet_since_s = time.monotonic()
        give_up_s = self._begun_s + 2 * self._grace_s + _KILLING_S
        while True:
            beat()
            marked = {pid: each for pid in procfs.pids() if (each := self._process(pid)) is not None}
            left = self._remaining(marked)
            now_s = time.monotonic()
            if left:
                quiet_since_s = now_s
            if now_s > give_up_s or (not left and (not marked or now_s - quiet_since_s > _QUIET_S)):
                launchers = self._launchers - self._ranks
                return EndedOrphans(
                    *(sorted(each.pid for each in group) for group in (launchers, self._ranks, left))
                )
            for process in left:
                if signalled_group and _process_group(process.pid) == signalled_group:
                    self._sigterm_s.setdefault(process, now_s)
            signalled_group = 0
            for process in self._to_signal(left, marked):
                self._signal(process)
            time.sleep(_POLL_S)

    def _process(self, pid: int) -> _Process | None:
        """None if the process is gone, or belongs to another user or job."""
        began = started(pid)
        environment = [] if began is None or pid == os.getpid() else _environment(pid)
        if began is None or self._marker not in environment or procfs.user_of(pid) != os.getuid():
            return None
        return _Process(pid, began, procfs.parent_of(pid), _rank_number(environment))

    def _remaining(self, marked: dict[int, _Process]) -> list[_Process]:
        """Running ranks, and running ancestors of ranks, which may have ended."""
        ranks = self._living_ranks(marked)
        self._ranks.update(ranks)
        for rank in ranks:
            self._launchers.update(_ancestors(rank, marked))
        return [each for each in marked.values() if each in self._ranks or each in self._launchers]

    def _living_ranks(self, marked: dict[int, _Process]) -> list[_Process]:
        """Ranks that have a record, and processes that have a rank's variables but no record yet (before they import torch)."""
        unjoined = {pid: rank for rank, pid, _ in unjoined_files(str(self._root))}
        shown = {**(self._recorded or {}), **ranks_of_spools(self._root), **unjoined}
        living = {rank for pid, rank in shown.items() if pid in marked}
        ranks = [process for pid, process in marked.items() if pid in shown]
        for process in marked.values():
            if process.number is None or process.pid in shown or process in self._rank_children:
                continue
            parent = marked.get(process.parent)
            by_rank = parent is not None and parent.number is not None
            # A restarted rank and the children of a dead rank both have the dead rank's number; only the children have lost their parent.
            left_by_rank = parent is None and (self._recorded is None or process.number in shown.values())
            if by_rank or left_by_rank or process.number in living:
                self._rank_children.add(process)
            else:
                ranks.append(process)
        return ranks

    def _to_signal(self, left: list[_Process], marked: dict[int, _Process]) -> list[_Process]:
        """Processes without a running ancestor; after twice the grace period all of them."""
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
        """Send the signal, unless the process id has been reused."""
        try:
            handle = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else -1
        except ProcessLookupError:
            return
        except OSError:
            handle = -1  # the kernel is older than 5.3, or a seccomp filter refuses the call
        try:
            if self._process(process.pid) != process:
                return
            if handle >= 0 and hasattr(signal, "pidfd_send_signal"):
                signal.pidfd_send_signal(handle, number)
            else:
                os.kill(process.pid, number)
        except OSError:
            pass  # the process is gone, or may not be signalled
        finally:
            if handle >= 0:
                os.close(handle)


def _listed(pids: list[int]) -> str:
    return ", ".join(map(str, pids))


def _ancestors(process: _Process, marked: dict[int, _Process]) -> Iterator[_Process]:
    """Ancestors that belong to the job, from the parent upwards."""
    seen = {process.pid}
    while (above := marked.get(process.parent)) is not None and above.pid not in seen:
        seen.add(above.pid)
        yield above
        process = above


def _process_group(pid: int) -> int:
    """Process group of a process; 0 if the process is gone."""
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def _rank_number(environment: list[bytes]) -> int | None:
    """RANK if the environment has all variables of a rank, else None."""
    values = [next((each for each in environment if each.startswith(name)), b"") for name in _RANK_VARIABLES]
    number = values[0][len(_RANK) :]
    return int(number) if all(values) and number.isdigit() and len(number) < 10 else None


def running_ranks(root: str) -> set[int]:
    """Numbers of the ranks of a run that have a process on this host, as far as visible, also before they import torch. ``root``: folder of
    the run's spools."""
    marker = f"{SPOOL}={root}".encode()
    of_job = (each for each in map(_environment, procfs.pids()) if marker in each)
    return {number for each in of_job if (number := _rank_number(each)) is not None}


def _environment(pid: int) -> list[bytes]:
    """Environment of a process at its start; empty if the process is gone or belongs to another user."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
