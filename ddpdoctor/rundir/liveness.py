"""Determines whether a process still writes to a folder in memory or temporary storage: a rank's spool or uncompressed trace.

The process holds a record lock on a file there until it ends, and a document identifies the process. Neither is enough alone: a
job that closes all its descriptors loses the lock, and a process id is meaningless in another namespace or after it was reused.

=======  ==========================================================================================  =========
lock     other evidence                                                                              state
=======  ==========================================================================================  =========
held     any (a process of any namespace, or other threads of a zombie, may hold it)                 WRITING
free     its process, of this pid namespace, runs: id and start time are the same                    WRITING
free     that process has ended, is a zombie, or its id was reused                                   OVER
free     of another namespace, but was seen here while it held the lock                              as above
free     the writer recorded its end, more than ten seconds ago                                      OVER
free     it ran on this host before the last boot (by the host's name and its boot id)               OVER
free     of another namespace and never seen, another host, or no document                           UNKNOWN
=======  ==========================================================================================  =========

A spool whose writer is UNKNOWN counts as over if the launcher of its run has closed the manifest and nothing in the spool has
changed for a minute, or if nothing has changed for a day: a launcher that is killed with its ranks, for example with their
container, closes no manifest (:func:`is_over`).
"""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple

from . import owned
from .files import read_json
from .layout import MANIFEST_FILE, opened_spool, read_target, run_of

WRITER_FILE = "writer.json"
LOCK_FILE = "writer"
SEEN_FILE = "writer.seen"
WRITER_FILES = frozenset([WRITER_FILE, LOCK_FILE, SEEN_FILE])
QUIET_S = 60.0
"""Seconds. A rank that trains writes to its spool more often: a line per step every few seconds, or once a second its status."""
GONE_S = 24 * 3600.0
"""Seconds. A running rank writes more often, and one that was suspended for long still holds its lock."""
CLOSED_S = 10.0
"""Seconds that a rank's last records are kept after its recording's end, because the hang monitor checks once a second."""


class State(Enum):
    WRITING = "writing"
    OVER = "over"
    UNKNOWN = "unknown"


class Writer(NamedTuple):
    """The writer of a folder."""

    state: State
    pid: int
    """Its process id in the caller's pid namespace; 0 if unknown."""


@functools.cache
def boot_id() -> str | None:
    """The boot id of this machine; None if unknown. Unlike a host name, it is unique."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as source:
            return source.read(64).strip()
    except OSError:
        return None


def pid_namespace() -> int:
    """The number of this process's pid namespace; 0 if unknown. Process ids are valid only within a namespace."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def started(pid: int) -> int | None:
    """Start of a process of this namespace, in the kernel's ticks; None if there is none, or it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as source:
            fields = source.read().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


class WriterMark:
    """Marks this process as the writer of a folder, until ``end``."""

    def __init__(self, folder: int) -> None:
        """Write the marks to the open ``folder``. Raises OSError if it cannot be written."""
        self._document: dict[str, Any] = {
            "pid": os.getpid(),
            "started": started(os.getpid()),
            "namespace": pid_namespace(),
            "boot": boot_id(),
            "host": socket.gethostname(),
        }
        owned.replace_file(WRITER_FILE, folder, owned.encoded(self._document))
        self._handle = owned.open_file(LOCK_FILE, folder, os.O_RDWR | os.O_CREAT)
        self._file = owned.file_identity(self._handle)
        with suppress(OSError):  # a file system without locks: only the process id counts
            owned.lock_now(self._handle)

    def is_in(self, folder: int) -> bool:
        """Whether the marks are still in ``folder`` and the lock is held. A job that closes all descriptors loses it."""
        held = owned.file_identity(self._handle) == self._file
        return (
            held
            and owned.identity_of(LOCK_FILE, folder) == self._file
            and owned.identity_of(WRITER_FILE, folder) is not None
        )

    def end(self, folder: int | None = None) -> None:
        """Record in ``folder`` that this process no longer writes. Never raises."""
        if folder is not None:
            with suppress(OSError):
                owned.replace_file(
                    WRITER_FILE, folder, owned.encoded({**self._document, "closed_ns": time.time_ns()})
                )
        # The job may have closed all files that it did not open; the descriptor may be one of the job's now.
        if self._file is not None and owned.file_identity(self._handle) == self._file:
            os.close(self._handle)
        self._file = None


def writer_in(folder: int) -> Writer:
    """The writer of an open folder, by the table above. Raises OSError if it cannot be read."""
    known, own_namespace = owned.read_object(WRITER_FILE, folder), pid_namespace()
    is_reachable = known is not None and (known.get("namespace"), known.get("boot")) == (
        own_namespace,
        boot_id(),
    )
    if known is not None and is_reachable and known.get("pid") == os.getpid():
        # Opening and closing the lock's file would lose the lock.
        pid = os.getpid()
    else:
        holder = owned.lock_holder(LOCK_FILE, folder)
        if holder is not None:
            if holder and not is_reachable:
                _note_seen(folder, holder, own_namespace)
            return Writer(State.WRITING, holder)
        if known is None:
            return Writer(State.UNKNOWN, 0)
        if not is_reachable:
            return _unreachable_writer(folder, known, own_namespace)
        pid = known.get("pid") or 0
    if _marked_ended(known):
        return Writer(State.OVER, pid)
    return _by_process(pid, known.get("started"))


def _by_process(pid: Any, began: Any) -> Writer:
    runs = isinstance(pid, int) and isinstance(began, int) and started(pid) == began
    return Writer(State.WRITING, pid) if runs else Writer(State.OVER, pid if isinstance(pid, int) else 0)


def _marked_ended(known: dict[str, Any]) -> bool:
    closed_ns = known.get("closed_ns")
    return isinstance(closed_ns, int) and time.time_ns() - closed_ns > CLOSED_S * 1e9


def _unreachable_writer(folder: int, known: dict[str, Any], own_namespace: int) -> Writer:
    """Handle a writer of another namespace, host or boot that holds no lock."""
    if _marked_ended(known):
        return Writer(State.OVER, 0)
    if known.get("boot") != boot_id():
        earlier = known.get("host") == socket.gethostname() and known.get("boot")
        return Writer(State.OVER if earlier else State.UNKNOWN, 0)
    seen = owned.read_object(SEEN_FILE, folder)
    if seen is not None and seen.get("namespace") == own_namespace:
        return _by_process(seen.get("pid"), seen.get("started"))
    return Writer(State.UNKNOWN, 0)


def _note_seen(folder: int, pid: int, own_namespace: int) -> None:
    """Record the process id, in this pid namespace, of a writer of another namespace, for when it no longer holds its lock."""
    seen = {"namespace": own_namespace, "pid": pid, "started": started(pid)}
    if seen["started"] is not None and owned.read_object(SEEN_FILE, folder) != seen:
        with suppress(OSError):  # storage is full: retried at the next check
            owned.replace_file(SEEN_FILE, folder, owned.encoded(seen))


def writer_of(spool: str) -> Writer:
    """The writer of a spool given by its path. Never raises."""
    try:
        with opened_spool(spool) as spool_fd:
            return writer_in(spool_fd)
    except OSError:
        return Writer(State.UNKNOWN, 0)


def is_over(spool: str) -> bool:
    """Whether no process will write to a spool again, confirmed by two sources (see the table above). Never raises."""
    try:
        with opened_spool(spool) as spool_fd:
            state = writer_in(spool_fd).state
            if state is not State.UNKNOWN:
                return state is State.OVER
            quiet_s = time.time() - last_change_s(spool_fd)
            if quiet_s < QUIET_S or quiet_s > GONE_S:
                return quiet_s > GONE_S
            run = run_of(read_target(spool_fd))
    except OSError:
        return False
    manifest = read_json(os.path.join(run, MANIFEST_FILE), [])
    return manifest is not None and manifest.get("ended_ns") is not None


def last_change_s(folder: int) -> float:
    """Time of the last write in an open folder, epoch seconds. Raises OSError."""
    with os.scandir(folder) as entries:
        times = [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
    return max([os.fstat(folder).st_mtime, *times])


_CLOCK_S = 60.0
"""Tolerance for changes of the clock since a process recorded its start, s. If the difference is larger, its process id was reused."""


def is_running(document: Mapping[str, Any]) -> bool | None:
    """Whether the process of a manifest, a launcher's record or ``rank.json`` runs. Never raises.

    None if unknown: another machine, boot or pid namespace, or a document without this information. Zombies do not count as
    running, nor does a process that has reused the id.
    """
    pid, this_boot = document.get("pid"), (socket.gethostname(), boot_id(), pid_namespace())
    of_this_boot = all(this_boot) and tuple(map(document.get, ("host", "boot", "pid_namespace"))) == this_boot
    if not isinstance(pid, int) or pid <= 0 or not of_this_boot:
        return None
    ticks = started(pid)
    if ticks is None:
        return False
    booted_s, started_ns = boot_time_s(), document.get("started_ns")
    if booted_s is None or not isinstance(started_ns, int):
        return True
    return booted_s + ticks / os.sysconf("SC_CLK_TCK") <= started_ns / 1e9 + _CLOCK_S


def boot_time_s() -> float | None:
    """Time of the boot, epoch seconds; None if unknown."""
    try:
        with open("/proc/stat") as source:
            return next((float(line.split()[1]) for line in source if line.startswith("btime ")), None)
    except (OSError, ValueError, IndexError):
        return None
