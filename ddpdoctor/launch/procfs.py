"""A process as the kernel sees it: what it waits for, how much it computed, read and wrote. Asks nothing of the process itself."""

from __future__ import annotations

import fcntl
import os
import platform
import struct
from pathlib import Path
from typing import Any, NamedTuple

_MOST_TASKS = 64
"""Threads and children that are told of one process."""
_TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
_INFO_BYTES, _INFO_EXIT = 64, 1 << 3
_GET_INFO = 3 << 30 | _INFO_BYTES << 16 | 0xFF << 8 | 11
"""PIDFD_GET_INFO and PIDFD_INFO_EXIT of <linux/pidfd.h>."""
_INFO_MASK, _INFO_CODE = struct.Struct("Q"), struct.Struct("i")
_IO = {
    "rchar": "read_chars",
    "wchar": "written_chars",
    "read_bytes": "read_bytes",
    "write_bytes": "written_bytes",
}


_READ, _POLLS = {"x86_64": (0, (7, 23, 270, 271)), "aarch64": (63, (72, 73))}.get(
    platform.machine(), (-1, ())
)
"""Numbers of system calls: read; poll, select, pselect6, ppoll."""
_POLLING = (
    "poll_schedule_timeout",
    "do_sys_poll",
    "do_poll",
    "ep_poll",
    "do_select",
    "inet_wait_for_connect",
)
"""Functions of the kernel that a signal cuts short whatever its handler asked for, see signal(7)."""
_SLEEPS = {"x86_64": (35, 230), "aarch64": (101, 115)}.get(platform.machine(), ())
_SLEEPING = ("hrtimer_nanosleep", "do_nanosleep")
"""The same of sleeps, nanosleep and clock_nanosleep. Python's own goes on after it."""

_NETWORK = (*_POLLING, "sk_wait_data", "wait_woken", "tcp_recvmsg", "unix_stream", "skb_wait")


class Usage(NamedTuple):
    """What a process, with those of its children that have ended, has used so far."""

    started_boot_s: float
    """When it was started, seconds since the machine was."""
    cpu_s: float
    faults: int
    """Pages of memory that it was the first to touch, or that came from a file."""
    bytes: int
    """Read and written, by calls and of storage, but for what sockets receive; 0 where that may not be known."""
    wakes: int
    """How often its first thread, having waited, went on."""

    def since(self, before: Usage | None) -> Usage:
        """What was used since ``before``; all of it by a process that was not there."""
        if before is None or before.started_boot_s != self.started_boot_s:
            return self
        return Usage(
            self.started_boot_s,
            max(0.0, self.cpu_s - before.cpu_s),
            max(0, self.faults - before.faults),
            max(0, self.bytes - before.bytes),
            max(0, self.wakes - before.wakes),
        )


def usage_of(pid: int) -> Usage | None:
    """None where the process is gone."""
    stat = _stat(Path(f"/proc/{pid}"))
    if stat is None:
        return None
    fields, io = (
        [int(field) if field.lstrip("-").isdecimal() else 0 for field in stat[1][:20]],
        io_counts(pid),
    )
    return Usage(
        started_boot_s=fields[19] * _TICK_MS / 1e3,
        cpu_s=sum(fields[11:15]) * _TICK_MS / 1e3,
        faults=sum(fields[7:11]),
        # A copy inside the kernel counts as characters when it is done, and as bytes of storage meanwhile.
        bytes=sum(io.values()),
        wakes=int(_status(pid, "voluntary_ctxt_switches") or 0),
    )


def waits_for_input(pid: int) -> bool:
    """Whether the process's first thread waits for somebody to type: in a read of its standard input, or a poll of it alone."""
    number, first = [*_text(Path(f"/proc/{pid}/syscall")).split(), "", ""][:2]
    if not number.isdecimal():
        return False
    return (int(number) == _READ and first == "0x0") or (
        int(number) in _POLLS and first == "0x1" and _reads_terminal(pid)
    )


def _reads_terminal(pid: int) -> bool:
    try:
        return str(Path(f"/proc/{pid}/fd/0").readlink()).startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False


def is_in_network(pid: int) -> bool:
    """Whether the process's first thread waits for a socket, or for one of several files."""
    wchan = _text(Path(f"/proc/{pid}/wchan"))
    return any(name in wchan for name in _NETWORK)


def is_interruptible(pid: int, *, sleeps: bool = False) -> bool:
    """Whether a signal with a handler may cut short what the process's first thread waits for, with ``sleeps`` a sleep, too; also where the
    kernel does not tell what that is."""
    wchan = _text(Path(f"/proc/{pid}/wchan")).strip()
    syscall = _text(Path(f"/proc/{pid}/syscall")).split()
    if not syscall and wchan in ("", "0"):
        return state_of(pid) != "R"
    if syscall and syscall[0].isdecimal() and int(syscall[0]) in (*_POLLS, *(_SLEEPS if sleeps else ())):
        return True
    return any(name in wchan for name in (*_POLLING, *(_SLEEPING if sleeps else ())))


def task_document(place: Path) -> dict[str, Any] | None:
    """Of ``/proc/<pid>``, or of a thread below it; None where it is gone. What may not be read is left out."""
    stat = _stat(place)
    if stat is None:
        return None
    name, fields = stat
    found: dict[str, Any] = {
        "name": name,
        "state": fields[0],
        "cpu_ms": (int(fields[11]) + int(fields[12])) * _TICK_MS,
    }
    for key in ("wchan", "syscall"):
        text = _text(place / key).strip()
        if text not in ("", "0"):
            found[key] = text[:200]
    try:
        found["run_delay_ms"] = int(_text(place / "schedstat").split()[1]) / 1e6
    except (IndexError, ValueError):
        pass
    return found


def process_document(pid: int) -> dict[str, Any] | None:
    """Of a process, with its threads and children; None where it is gone."""
    place = Path(f"/proc/{pid}")
    found = task_document(place)
    if found is None:
        return None
    found["rss_bytes"] = _rss_bytes(place)
    found["tracer"] = tracer_of(pid)
    found.update(io_counts(pid))
    threads = [
        (tid, task_document(place / "task" / str(tid))) for tid in _numbers(place / "task")[:_MOST_TASKS]
    ]
    found["threads"] = [{"tid": tid, **task} for tid, task in threads if task is not None]
    children = [(child, task_document(Path(f"/proc/{child}"))) for child in children_of(pid)[:_MOST_TASKS]]
    found["children"] = [{"pid": child, **task} for child, task in children if task is not None]
    return {key: value for key, value in found.items() if value is not None}


def pids() -> list[int]:
    """All processes that there are, as far as they may be seen."""
    return _numbers(Path("/proc"))


def state_of(pid: int) -> str:
    """The letter of a process's state, "" where it is gone."""
    stat = _stat(Path(f"/proc/{pid}"))
    return "" if stat is None else stat[1][0]


def io_counts(pid: int) -> dict[str, int]:
    """What a process has read and written so far; empty where that may not be known."""
    found = {}
    for line in _text(Path(f"/proc/{pid}/io")).splitlines():
        name, _, number = line.partition(": ")
        if name in _IO and number.isdecimal():
            found[_IO[name]] = int(number)
    return found


def tracer_of(pid: int) -> int:
    """Process id of the debugger that is attached, 0 for none."""
    return int(_status(pid, "TracerPid") or 0)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    return bool(int(_status(pid, "SigCgt") or "0", 16) >> (number - 1) & 1)


def user_of(pid: int) -> int:
    """The user whose process it is, -1 where it is gone."""
    return int(_status(pid, "Uid") or -1)


def parent_of(pid: int) -> int:
    """Process id of a process's parent, 0 where it is gone."""
    stat = _stat(Path(f"/proc/{pid}"))
    return 0 if stat is None else int(stat[1][1])


def children_of(pid: int) -> list[int]:
    """Process ids of a process's children, of all its threads."""
    found: list[int] = []
    for tid in _numbers(Path(f"/proc/{pid}/task")):
        found += [int(child) for child in _text(Path(f"/proc/{pid}/task/{tid}/children")).split()]
    return sorted(found)


def exit_status(pid: int, handle: int) -> int | None:
    """The wait status of a process that has ended, of which ``handle`` is the pidfd, -1 for none; None where it can't be known."""
    stat = _stat(Path(f"/proc/{pid}"))
    if stat is not None and stat[1][0] in "ZX" and len(stat[1]) > 49:
        return int(stat[1][49])
    # Its parent was faster. From Linux 6.15 on the kernel remembers it for who holds a pidfd.
    told = bytearray(_INFO_BYTES)
    _INFO_MASK.pack_into(told, 0, _INFO_EXIT)
    try:
        fcntl.ioctl(handle, _GET_INFO, told)
    except (OSError, ValueError):
        return None
    return int(_INFO_CODE.unpack_from(told, 60)[0]) if _INFO_MASK.unpack_from(told)[0] & _INFO_EXIT else None


def _status(pid: int, name: str) -> str:
    for line in _text(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith(f"{name}:"):
            return line.split()[1]
    return ""


def _stat(place: Path) -> tuple[str, list[str]] | None:
    """The name, and the fields behind it, of which the state is the first."""
    head, bracket, tail = _text(place / "stat").rpartition(")")
    return (head.partition("(")[2], tail.split()) if bracket else None


def _rss_bytes(place: Path) -> int | None:
    fields = _text(place / "statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else None


def _numbers(place: Path) -> list[int]:
    try:
        return sorted(int(entry.name) for entry in place.iterdir() if entry.name.isdecimal())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
