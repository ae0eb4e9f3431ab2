"""A process as the kernel sees it: what it waits for, how much it computed, read and wrote. Asks nothing of the process itself."""

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


def process_document(pid: int) -> dict[str, Any] | None:
    """What a process's first thread does; None where it is gone. What may not be read is left out."""
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
    """All processes that there are, as far as they may be seen."""
    return _numbers(Path("/proc"))


def state_of(pid: int) -> str:
    """The letter of a process's state, "" where it is gone."""
    return next(iter(_stat(pid)), "")


def _io_bytes(pid: int) -> int:
    """What a process has read and written so far; 0 where that may not be known."""
    lines = (line.partition(": ") for line in _text(Path(f"/proc/{pid}/io")).splitlines())
    return sum(int(number) for name, _, number in lines if name in _IO and number.isdecimal())


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
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def children_of(pid: int) -> list[int]:
    """Process ids of a process's children, of all its threads."""
    found: list[int] = []
    for tid in _numbers(Path(f"/proc/{pid}/task")):
        found += [int(child) for child in _text(Path(f"/proc/{pid}/task/{tid}/children")).split()]
    return sorted(found)


def exit_status(pid: int, handle: int) -> int | None:
    """The wait status of a process that has ended, of which ``handle`` is the pidfd, -1 for none; None where it can't be known."""
    fields = _stat(pid)
    if len(fields) > 49 and fields[0] in "ZX":
        return int(fields[49])
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


def _stat(pid: int) -> list[str]:
    """The fields behind the name, of which the state is the first; none where the process is gone."""
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
