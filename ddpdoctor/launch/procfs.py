"""Readings from /proc: what a process waits for, and how much it computed, read and wrote."""

from __future__ import annotations

import fcntl
import os
import platform
import struct
from pathlib import Path
from typing import Any, NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_INFO_BYTES, _INFO_EXIT = 64, 1 << 3
_GET_INFO = 3 << 30 | _INFO_BYTES << 16 | 0xFF << 8 | 11
"""PIDFD_GET_INFO and PIDFD_INFO_EXIT of <linux/pidfd.h>."""
_INFO_MASK, _INFO_CODE = struct.Struct("Q"), struct.Struct("i")
_IO = ("rchar", "wchar", "read_bytes", "write_bytes")

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
"""Kernel functions that a signal interrupts, also with SA_RESTART, see signal(7)."""
_SLEEPS = {"x86_64": (35, 230), "aarch64": (101, 115)}.get(platform.machine(), ())
_SLEEPING = ("hrtimer_nanosleep", "do_nanosleep")
"""The same for nanosleep and clock_nanosleep. Python's own sleep continues after a signal."""

_NETWORK = (*_POLLING, "sk_wait_data", "wait_woken", "tcp_recvmsg", "unix_stream", "skb_wait")


class Usage(NamedTuple):
    """What a process and its ended children have used so far."""

    started_boot_s: float
    """Start, seconds since boot."""
    cpu_s: float
    faults: int
    """Page faults, minor and major."""
    bytes: int
    """Read and written, by system calls and on storage, without data received by sockets; 0 if not readable."""
    wakes: int
    """Voluntary context switches of its first thread."""

    def since(self, before: Usage | None) -> Usage:
        """What was used since ``before``; all of it for a new process."""
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
    """Usage of a process; None if it is gone."""
    fields = [int(field) if field.lstrip("-").isdecimal() else 0 for field in _stat(pid)[:20]]
    if not fields:
        return None
    return Usage(
        started_boot_s=fields[19] / _TICKS_PER_S,
        cpu_s=sum(fields[11:15]) / _TICKS_PER_S,
        faults=sum(fields[7:11]),
        # A copy inside the kernel counts as characters when it is done, and as bytes of storage meanwhile.
        bytes=_io_bytes(pid),
        wakes=int(_status(pid, "voluntary_ctxt_switches") or 0),
    )


def waits_for_input(pid: int) -> bool:
    """Whether the process's first thread waits for terminal input: in a read of its standard input, or a poll of it alone."""
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
    """Whether a signal may interrupt the system call in which the process's first thread waits, with ``sleeps`` also a sleep. True if the
    kernel does not show the call."""
    wchan = _text(Path(f"/proc/{pid}/wchan")).strip()
    syscall = _text(Path(f"/proc/{pid}/syscall")).split()
    if not syscall and wchan in ("", "0"):
        return state_of(pid) != "R"
    if syscall and syscall[0].isdecimal() and int(syscall[0]) in (*_POLLS, *(_SLEEPS if sleeps else ())):
        return True
    return any(name in wchan for name in (*_POLLING, *(_SLEEPING if sleeps else ())))


def process_document(pid: int) -> dict[str, Any] | None:
    """State, tracer, wchan and syscall of a process's first thread, as far as readable; None if it is gone."""
    fields = _stat(pid)
    if not fields:
        return None
    found: dict[str, Any] = {"state": fields[0], "tracer": tracer_of(pid)}
    for key in ("wchan", "syscall"):
        text = _text(Path(f"/proc/{pid}/{key}")).strip()
        if text not in ("", "0"):
            found[key] = text[:200]
    return found


def pids() -> list[int]:
    """Process ids of all visible processes."""
    return _numbers(Path("/proc"))


def state_of(pid: int) -> str:
    """The letter of a process's state, "" if it is gone."""
    return next(iter(_stat(pid)), "")


def _io_bytes(pid: int) -> int:
    """Bytes that a process has read and written so far; 0 if not readable."""
    lines = (line.partition(": ") for line in _text(Path(f"/proc/{pid}/io")).splitlines())
    return sum(int(number) for name, _, number in lines if name in _IO and number.isdecimal())


def tracer_of(pid: int) -> int:
    """Process id of the debugger that is attached, 0 for none."""
    return int(_status(pid, "TracerPid") or 0)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    return bool(int(_status(pid, "SigCgt") or "0", 16) >> (number - 1) & 1)


def user_of(pid: int) -> int:
    """User id of a process, -1 if it is gone."""
    return int(_status(pid, "Uid") or -1)


def parent_of(pid: int) -> int:
    """Process id of a process's parent, 0 if it is gone."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def children_of(pid: int) -> list[int]:
    """Process ids of a process's children, of all its threads."""
    found: list[int] = []
    for tid in _numbers(Path(f"/proc/{pid}/task")):
        found += [int(child) for child in _text(Path(f"/proc/{pid}/task/{tid}/children")).split()]
    return sorted(found)


def exit_status(pid: int, handle: int) -> int | None:
    """Wait status of a process that has ended; None if unknown. ``handle``: its pidfd, -1 for none."""
    fields = _stat(pid)
    if len(fields) > 49 and fields[0] in "ZX":
        return int(fields[49])
    # Its parent has reaped it. From Linux 6.15 on the kernel keeps the status for holders of a pidfd.
    info = bytearray(_INFO_BYTES)
    _INFO_MASK.pack_into(info, 0, _INFO_EXIT)
    try:
        fcntl.ioctl(handle, _GET_INFO, info)
    except (OSError, ValueError):
        return None
    return int(_INFO_CODE.unpack_from(info, 60)[0]) if _INFO_MASK.unpack_from(info)[0] & _INFO_EXIT else None


def _status(pid: int, name: str) -> str:
    for line in _text(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith(f"{name}:"):
            return line.split()[1]
    return ""


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, the state first; empty if the process is gone."""
    return _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


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
