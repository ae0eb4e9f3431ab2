"""Files in the root of a run's spools, shared by all processes of a host: the launcher's documents on ranks that stopped, status
files of ranks before ``init_process_group``, and locks.

The documents are written next to the spools, because the hang monitor must not wait for storage. They are copied with the spools.

::

    <root>/stall.json, ends.json, asked.json    the launcher's documents
    <root>/unjoined-<rank>-<pid>                JSON lines: a rank's status, when it began to join, how it ended; between them the
                                                text that faulthandler wrote at the request signal
    <root>/storage, hang-monitor, metrics       locks, each held by at most one process per host and run: the process that copies
                                                the ranks' records, the hang monitor, the metrics server

If no process copies, each rank copies its own records.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from . import owned
from .files import parsed
from .layout import ASKED_FILE, ENDS_FILE, STALL_FILE, host_directory

_PREFIX = "unjoined-"
_MOST_BYTES = 1 << 20
"""Upper limit of a status file; the same as for the faults of a rank that has joined."""


@dataclass(frozen=True)
class UnjoinedStatus:
    """The content of one rank's status file."""

    about: dict[str, Any] = field(default_factory=dict)
    """Those present of ``rank``, ``world_size``, ``signal`` and ``handle`` of its faulthandler, ``joining_ns``, ``raised``; of any type."""
    faults: str = ""


def create_unjoined_file(root: str, rank: int) -> tuple[int, str]:
    """Create the status file of this process. Returns its descriptor and path. Raises OSError."""
    name = f"{_PREFIX}{rank}-{os.getpid()}"
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with owned.private_folder(root) as root_fd:
        handle = owned.open_file(name, root_fd, flags)
    with suppress(OSError):  # a file system without locks
        owned.lock_now(handle)  # the kernel gives the holder's id in the reader's pid namespace
    return handle, os.path.join(root, name)


def unjoined_file_holder(path: str) -> int | None:
    """The id, in the caller's pid namespace, of the process that holds a status file; 0 if it is not visible there; None if no
    process holds it. Never raises."""
    try:
        with owned.private_folder(os.path.dirname(path)) as root_fd:
            return owned.lock_holder(os.path.basename(path), root_fd)
    except OSError:
        return None


def append_unjoined(handle: int, /, **about: Any) -> None:
    """Append a JSON object with ``about``. Raises OSError."""
    os.write(handle, json.dumps(about, separators=(",", ":"), default=str).encode() + b"\n")


def unjoined_files(root: str) -> list[tuple[int, int, str]]:
    """Rank, process id and path of each status file, sorted. Never raises."""
    try:
        with owned.private_folder(root) as root_fd:
            names = os.listdir(root_fd)
    except OSError:
        return []
    found = []
    for name in names:
        rank, _, pid = name[len(_PREFIX) :].partition("-")
        if name.startswith(_PREFIX) and rank.isdecimal() and pid.isdecimal() and len(name) < 40:
            found.append((int(rank), int(pid), os.path.join(root, name)))
    return sorted(found)


def read_unjoined(path: str) -> UnjoinedStatus:
    """Read a rank's status file; empty if there is none. Never raises."""
    try:
        with owned.private_folder(os.path.dirname(path)) as root_fd:
            data = owned.read_file(os.path.basename(path), root_fd)[-_MOST_BYTES:]
    except OSError:
        return UnjoinedStatus()
    about: dict[str, Any] = {}
    faults = []
    for line in data.decode(errors="replace").splitlines():
        if not line.startswith("{"):
            faults.append(line)
            continue
        try:
            document = parsed(line.encode())[0]
        except ValueError:
            continue
        about.update(document if isinstance(document, dict) else {})
    return UnjoinedStatus(about, "\n".join(faults))


def remove_unjoined_file(path: str) -> None:
    """Remove a status file. Never raises."""
    with suppress(OSError), owned.private_folder(os.path.dirname(path)) as root_fd:
        os.unlink(os.path.basename(path), dir_fd=root_fd)


HOST_DOCUMENTS = (STALL_FILE, ENDS_FILE, ASKED_FILE)


def host_document(root: str, name: str) -> dict[str, Any]:
    """Read a document written by another launcher of this host; empty if there is none, or it is another user's. Never raises."""
    try:
        with owned.private_folder(root) as root_fd:
            return owned.read_object(name, root_fd) or {}
    except OSError:
        return {}


def keep_host_document(root: str, name: str, document: dict[str, Any]) -> None:
    """Write ``document`` under ``name``; its field ``host`` gives the host. Raises OSError."""
    owned.make_private_folder(root)
    with owned.private_folder(root) as root_fd:
        owned.replace_file(name, root_fd, owned.encoded(document))


def copy_host_documents(root: str, run: str, known: dict[str, int] | None = None) -> None:
    """Copy the documents in ``root`` to the folders of their hosts. ``known`` holds what earlier calls copied. Raises OSError."""
    with owned.private_folder(root) as root_fd:
        for name in HOST_DOCUMENTS:
            try:
                changed_ns = os.stat(name, dir_fd=root_fd, follow_symlinks=False).st_mtime_ns
                if known is not None and known.get(name) == changed_ns:
                    continue
                data = owned.read_file(name, root_fd)
                host = json.loads(data).get("host")
            except (FileNotFoundError, ValueError, AttributeError):
                continue
            host_folder = host_directory(run, str(host))
            os.makedirs(host_folder, exist_ok=True)
            with owned.folder(host_folder) as handle:
                owned.replace_file(name, handle, data, mode=0o666)
            if known is not None:
                known[name] = changed_ns


STORAGE = "storage"
"""Lock file of the process that copies the ranks' records to storage."""
HANG_MONITOR = "hang-monitor"
"""Lock file of the hang monitor."""
METRICS_SERVER = "metrics"
"""Lock file of the metrics server."""


class HostLock:
    """An exclusive lock on ``file`` in the root of a run's spools; by default that of the process that copies them."""

    def __init__(self, root: str, file: str = STORAGE) -> None:
        self._root, self._file = root, file
        self._handle = -1

    def take(self) -> bool:
        """Take the lock. Returns True if this process holds it, also from before; False if another process does, or the root cannot
        be used."""
        try:
            with owned.private_folder(self._root) as root_fd:
                if self._handle >= 0 and owned.file_identity(self._handle) == owned.identity_of(
                    self._file, root_fd
                ):
                    return True
                # The file was removed, so other processes would not find the lock.
                self.release()
                handle = owned.open_file(self._file, root_fd, os.O_RDWR | os.O_CREAT)
                if owned.lock_now(handle):
                    self._handle = handle
                else:
                    os.close(handle)
        except OSError:
            return False
        return self._handle >= 0

    def release(self) -> None:
        """Release the lock."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            owned.unlock(handle)
            os.close(handle)


def copier_lock_is_held(root: str) -> bool:
    """Whether another process copies the spools in ``root``. Never raises."""
    try:
        with owned.private_folder(root) as root_fd:
            return owned.lock_holder(STORAGE, root_fd) is not None
    except OSError:
        return False


def remove_root(root: str) -> None:
    """Remove the root of a run's spools if it has no spool. Never raises."""
    with suppress(OSError):
        with owned.private_folder(root) as root_fd:
            names = os.listdir(root_fd)
            if all(
                name in (STORAGE, HANG_MONITOR, METRICS_SERVER, *HOST_DOCUMENTS) or name.startswith(_PREFIX)
                for name in names
            ):
                for name in names:
                    os.unlink(name, dir_fd=root_fd)
        os.rmdir(root)
