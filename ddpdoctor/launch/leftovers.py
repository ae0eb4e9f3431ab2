"""What a job leaves behind: ranks that still write, and records that are still in memory-backed storage."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddpdoctor.rundir import (
    MANIFEST_FILE,
    PATIENCE_S,
    RANK_FILE,
    OtherRunError,
    State,
    Waiting,
    carry_host_documents,
    discard,
    drain,
    is_over,
    last_change_s,
    own_roots_prefix,
    private_folder,
    read_json,
    remove_root,
    roots_of,
    run_of,
    spools_in,
    target_of,
    unsaved_sentence,
    waiting_in,
    writer_of,
)
from ddpdoctor.rundir.layout import parse_spool_name
from ddpdoctor.rundir.liveness import is_running

_SAVING_S = 2.0
_STALE_S = 24 * 3600.0


class HostRanks:
    """The ranks of a run on one host, found as they appear in the run directory."""

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
        """Process id, in this pid namespace, of each rank seen recording on this host so far; of a restarted rank the newest. From
        memory: asked once a second, it reads no storage but at first."""
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
        """Read what ranks say of themselves who were not known yet, until the deadline at most."""
        for folder in self._folders():
            if time.monotonic() > deadline_s:
                return
            if folder.name not in self._known and (folder / RANK_FILE).exists():
                info = read_json(str(folder / RANK_FILE), []) or {}
                here = info.get("host") == self._host and info.get("pid")
                self._known[folder.name] = info if here else None

    def saving(self, deadline_s: float = float("inf")) -> list[int]:
        """Process ids of ranks of this host that may run and are still saving their trace; of those that there is time to look
        for until ``deadline_s`` on the monotonic clock."""
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
        """How many recordings of ranks the run holds, on all hosts."""
        return len(self._folders())

    def _folders(self) -> list[Path]:
        try:
            with os.scandir(self._ranks) as entries:
                return sorted(Path(entry.path) for entry in entries if entry.is_dir())
        except OSError:
            return []


def drain_spools(root: Path, beat: Callable[[], None] = lambda: None, run: Path | None = None) -> list[str]:
    """Copy what ranks left below ``root`` to the run directory; spools of dead ranks are removed. ``beat`` is called while
    it gets on. ``run`` is where they belong, for what is no rank's.

    Returns a sentence where the run directory cannot take it.

    Several launchers of a host share ``root``, so a living rank's spool stays: it goes on writing there.
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
            carry_host_documents(str(root), str(run))
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
    """By process id, the ranks that have a spool below ``root``, also before they say in their run directory who they are; those
    that write last. Of another pid namespace's it is the one that they have here."""
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
    """Remove what dead ranks left in memory-backed storage for a run directory that stood at ``run`` before and was
    deleted; ``root`` is where the spools of the run lie that is there now. Never raises.

    Where the earlier run was only moved, to another name beside this one, they stay: ``recover`` finds them by its id.
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
    """Where other runs, whose launcher was killed, left records in memory-backed storage to which nobody has written for a day; ``root``
    is the run's own place there."""
    found = []
    for other in root.parent.glob(f"{own_roots_prefix()}*"):
        try:
            if other != root and _written_s(other) < time.time() - _STALE_S:
                found.append(other)
        except OSError:
            continue
    return found


def drain_stale_spools(root: Path) -> None:
    """Clear memory-backed storage of them. What finds no room in its run directory stays, and so does what a rank, however long it was
    suspended, may go on writing to. Their storage may not answer: for a process that nobody has to wait for.
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
