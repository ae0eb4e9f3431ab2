"""What a job leaves behind: ranks that still write, and records that are still in memory-backed storage (spools)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddpdoctor.rundir.draining import PATIENCE_S, Waiting, discard, drain, unsaved_sentence, waiting_in
from ddpdoctor.rundir.files import read_json
from ddpdoctor.rundir.host_files import copy_host_documents, remove_root
from ddpdoctor.rundir.layout import (
    MANIFEST_FILE,
    RANK_FILE,
    OtherRunError,
    parse_spool_name,
    run_of,
    target_of,
)
from ddpdoctor.rundir.liveness import State, is_over, is_running, last_change_s, writer_of
from ddpdoctor.rundir.owned import private_folder
from ddpdoctor.rundir.spool import own_roots_prefix, roots_of, spools_in

_SAVING_S = 2.0
_STALE_S = 24 * 3600.0


class HostRanks:
    """The ranks of a run on one host, by their folders in the run directory."""

    def __init__(self, run: Path, host: str) -> None:
        self._ranks, self._host = run / "ranks", host
        self._known: dict[str, dict[str, Any] | None] = {}
        self._roots: list[Path] | None = None
        self._pids: dict[int, int] = {}

    def all(self) -> list[tuple[int, int]]:
        """Number and process id of all ranks recorded on this host so far, dead ones included."""
        self._look(float("inf"))
        return [(int(info["rank"]), int(info["pid"])) for info in self._known.values() if info is not None]

    def pid_by_rank(self) -> dict[int, int]:
        """Process id, in this pid namespace, of each rank that has recorded on this host; of a restarted rank the newest. Reads memory
        only, except in the first call."""
        if self._roots is None:
            self._roots = [Path(root) for root in roots_of(str(self._ranks.parent))]
        for root in self._roots:
            self._pids.update({rank: pid for pid, rank in ranks_of_spools(root).items()})
        return dict(self._pids)

    def folders(self) -> list[str]:
        """Paths of the folders of all ranks recorded on this host so far."""
        self._look(float("inf"))
        return [str(self._ranks / name) for name, info in self._known.items() if info is not None]

    def _look(self, deadline_s: float) -> None:
        """Read ``rank.json`` of ranks that are not known yet, until the deadline (monotonic seconds)."""
        for folder in self._folders():
            if time.monotonic() > deadline_s:
                return
            if folder.name not in self._known and (folder / RANK_FILE).exists():
                info = read_json(str(folder / RANK_FILE), []) or {}
                here = info.get("host") == self._host and info.get("pid")
                self._known[folder.name] = info if here else None

    def saving(self, deadline_s: float = float("inf")) -> list[int]:
        """Process ids of ranks of this host that may run and are saving their trace, as far as found until ``deadline_s`` (monotonic
        seconds)."""
        self._look(deadline_s)
        # Of thousands of ranks, most of them elsewhere or ended, only the files of living ones are read again.
        alive = [(name, info) for name, info in self._known.items() if info and is_running(info) is not False]
        return [
            int(info["pid"])
            for name, info in alive
            if time.monotonic() < deadline_s and self._is_saving(name)
        ]

    def _is_saving(self, folder: str) -> bool:
        info = read_json(str(self._ranks / folder / RANK_FILE), []) or {}
        window = info.get("window")
        return isinstance(window, dict) and window.get("state") == "saving"

    def wait_for_traces(self) -> None:
        """Give traces that are being saved two more seconds."""
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
    """Copy what ranks left below ``root`` to their run directories, and the host's documents to ``run``; remove the spools of dead ranks.

    ``beat`` is called during progress. Returns a sentence for each run directory that cannot be written.

    Several launchers of a host share ``root``, so the spool of a living rank stays.
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
                continue  # in the second case another launcher of this host was faster
            if isinstance(error, (FileNotFoundError, OtherRunError)):
                with suppress(OSError):
                    discard(spool)
                gone.add(target)
            else:
                waiting.setdefault(run_of(target), []).append(waiting_in(spool, target))
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
    """By process id, the ranks that have a spool below ``root``, those that still write last. Process ids of other pid namespaces are
    translated to this one."""
    found = []
    for spool in spools_in(str(root)):
        named = parse_spool_name(spool)
        state, pid = writer_of(spool)
        if named is not None and pid:
            found.append((state is State.WRITING, pid, named[0]))
    return {pid: rank for _, pid, rank in sorted(found)}


def _target_of(spool: str) -> str:
    try:
        return target_of(spool)
    except OSError:
        return ""


def clear_spools_of_earlier_runs(run: Path, root: Path) -> None:
    """Remove the spools of dead ranks of an earlier run whose directory had the path ``run`` and was deleted. ``root`` holds the spools of
    the present run. Never raises.

    If the earlier run was only renamed within its folder, its spools stay: ``recover`` finds them by its id.
    """
    try:
        for other in root.parent.glob(f"{own_roots_prefix()}*"):
            if other == root:
                continue
            spools = [s for s in spools_in(str(other)) if Path(_target_of(s)).is_relative_to(run)]
            # The runs beside this one are looked at only if they have to be: their storage may not answer.
            if not spools or any(
                str(other) in roots_of(str(path))
                for path in run.parent.iterdir()
                if path != run and (path / MANIFEST_FILE).is_file()
            ):
                continue
            for spool in spools:
                if is_over(spool):
                    with suppress(OSError):
                        discard(spool)
            remove_root(str(other))
    except OSError:
        pass


def stale_roots(root: Path) -> list[Path]:
    """Roots of other runs in memory-backed storage, of a killed launcher, unchanged for a day. ``root``: the present run's root."""
    found = []
    for other in root.parent.glob(f"{own_roots_prefix()}*"):
        try:
            if other != root and _written_s(other) < time.time() - _STALE_S:
                found.append(other)
        except OSError:
            continue
    return found


def drain_stale_spools(root: Path) -> None:
    """Copy the spools of :func:`stale_roots` to their run directories and remove them. What cannot be copied stays, as do spools of living
    ranks. Their storage may not answer: call it in a helper process that can be abandoned.
    """
    for other in stale_roots(root):
        try:
            drain_spools(other)
        except OSError:
            continue


def _written_s(root: Path) -> float:
    """When something in a root was last written, epoch seconds. Raises OSError."""
    times = [root.lstat().st_mtime]
    for spool in spools_in(str(root)):
        with private_folder(spool) as here:
            times.append(last_change_s(here))
    return max(times)
