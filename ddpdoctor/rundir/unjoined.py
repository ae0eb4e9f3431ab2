"""The status files of ranks that have not joined their process group, in the root of the spools.

::

    <root>/unjoined-<rank>-<pid>     lines of JSON objects: its status, when it began to join, how it ended; between them
                                     what faulthandler wrote at the request signal
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

from .files import parsed
from .owned import lock_holder, lock_now, open_file, private_folder, read_file

_PREFIX = "unjoined-"
_MOST_BYTES = 1 << 20
"""The same limit as for the faults of a rank that has joined."""


@dataclass(frozen=True)
class UnjoinedStatus:
    """The content of one rank's file."""

    about: dict[str, Any] = field(default_factory=dict)
    """``rank``, ``world_size``, ``signal`` and ``handle`` of its faulthandler, ``joining_ns``, ``raised``; those
    that are present, of any type."""
    faults: str = ""


def create_unjoined_file(root: str, rank: int) -> tuple[int, str]:
    """Make the file of this process. Returns its descriptor and path. Raises OSError."""
    name = f"{_PREFIX}{rank}-{os.getpid()}"
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with private_folder(root) as root_fd:
        handle = open_file(name, root_fd, flags)
    try:
        lock_now(handle)  # the kernel reports the holder in the pid namespace of the process that asks
    except OSError:
        pass  # a file system without locks
    return handle, os.path.join(root, name)


def unjoined_file_holder(path: str) -> int | None:
    """The process whose file this is, by its id in the caller's pid namespace, 0 if it cannot be seen from there;
    None if no process holds it. Never raises."""
    try:
        with private_folder(os.path.dirname(path)) as root_fd:
            return lock_holder(os.path.basename(path), root_fd)
    except OSError:
        return None


def append_unjoined(handle: int, /, **about: Any) -> None:
    """Append a JSON object with ``about``. Raises OSError."""
    os.write(handle, json.dumps(about, separators=(",", ":"), default=str).encode() + b"\n")


def unjoined_files(root: str) -> list[tuple[int, int, str]]:
    """Rank, process id and path of each such file, sorted. Never raises."""
    try:
        with private_folder(root) as root_fd:
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
    """Read a rank's file; empty without one. Never raises."""
    try:
        with private_folder(os.path.dirname(path)) as root_fd:
            data = read_file(os.path.basename(path), root_fd)[-_MOST_BYTES:]
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
    """Remove the file. Never raises."""
    try:
        with private_folder(os.path.dirname(path)) as root_fd:
            os.unlink(os.path.basename(path), dir_fd=root_fd)
    except OSError:
        pass


def is_unjoined_file(name: str) -> bool:
    """Whether a file of this name in a root is such a file."""
    return name.startswith(_PREFIX)
