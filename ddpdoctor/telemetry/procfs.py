"""Reads from /proc what a process waits for, its CPU time and I/O, and whether a rank works.

A checkpoint written by plain ``write()``, a download, a metric or a subprocess that evaluates moves bytes, touches new memory or uses a
processor, in the rank or its children. This shows that a rank works even if the rank reports nothing. A rank that waits for a lock or for
another rank does none of this.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ddpdoctor.rundir.heartbeat import Beat

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_INFO_BYTES, _INFO_EXIT = 64, 1 << 3
_GET_INFO = 3 << 30 | _INFO_BYTES << 16 | 0xFF << 8 | 11
"""PIDFD_GET_INFO and PIDFD_INFO_EXIT of <linux/pidfd.h>."""
_INFO_MASK, _INFO_CODE = struct.Struct("Q"), struct.Struct("i")
_READ_BYTES = 1 << 16
_IO = ("rchar", "wchar", "read_bytes", "write_bytes")

_READ, _POLLS = {"x86_64": (0, (7, 23, 270, 271)), "aarch64": (63, (72, 73))}.get(
    platform.machine(), (-1, ())
)
"""System call numbers of read, and of poll, select, pselect6, ppoll."""
_POLLING = (
    *("poll_schedule_timeout", "do_sys_poll", "do_poll"),
    *("ep_poll", "do_select", "inet_wait_for_connect"),
)
"""Kernel functions that a signal interrupts, even with SA_RESTART: signal(7)."""
_SLEEPS = {"x86_64": (35, 230), "aarch64": (101, 115)}.get(platform.machine(), ())
_SLEEPING = ("hrtimer_nanosleep", "do_nanosleep")
"""System call numbers and kernel functions of nanosleep and clock_nanosleep. Python's time.sleep continues after a signal."""

_READING_TERMINAL = ("wait_woken", "n_tty_read")
"""Kernel functions in which a read of a terminal waits; one of a socket may wait in the first, too."""
_NETWORK = (*_POLLING, "sk_wait_data", "wait_woken", "tcp_recvmsg", "unix_stream", "skb_wait")


class Usage(NamedTuple):
    """Resources that a process and its ended children have used so far."""

    started_boot_s: float
    """Start of the process, seconds since boot."""
    cpu_s: float
    faults: int
    """Page faults, minor and major."""
    bytes: int
    """Bytes read and written, by system calls and on storage, without data received by sockets; 0 if not readable."""
    wakes: int
    """Voluntary context switches of the first thread."""

    def since(self, before: Usage | None) -> Usage:
        """Usage since ``before``; the total for a new process."""
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
    fields = [int(field) if field.lstrip("-").isdecimal() else 0 for field in stat_fields(pid)[:20]]
    if not fields:
        return None
    return Usage(
        started_boot_s=fields[19] / TICKS_PER_S,
        cpu_s=sum(fields[11:15]) / TICKS_PER_S,
        faults=sum(fields[7:11]),
        # Both kinds of counters are needed: a copy inside the kernel adds to rchar and wchar only at its end, to the storage bytes at once.
        bytes=_io_bytes(pid),
        wakes=int(status_field(pid, "voluntary_ctxt_switches") or 0),
    )


def waits_for_input(pid: int, reported: str = "") -> bool:
    """Whether the process's first thread waits for terminal input, in a read or poll of standard input only. ``reported``: its system call
    as the process itself has read it, for a kernel that does not show it to this process. If neither is known, True if the thread may wait
    for a terminal (or a socket) and standard input is a terminal."""
    call = _syscall_of(pid) or reported
    if not call:
        return text_of(f"/proc/{pid}/wchan").strip() in _READING_TERMINAL and _reads_terminal(pid)
    number, first = [*call.split(), "", ""][:2]
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
    wchan = text_of(f"/proc/{pid}/wchan")
    return any(name in wchan for name in _NETWORK)


def is_interruptible(pid: int, *, sleeps: bool = False) -> bool:
    """Whether a signal may interrupt the system call in which the process's first thread waits; with ``sleeps``, also if that is a sleep.
    True if the kernel does not show the call, unless the process runs."""
    wchan = text_of(f"/proc/{pid}/wchan").strip()
    syscall = _syscall_of(pid).split()
    if not syscall and wchan in ("", "0"):
        return state_of(pid) != "R"
    if syscall and syscall[0].isdecimal() and int(syscall[0]) in (*_POLLS, *(_SLEEPS if sleeps else ())):
        return True
    return any(name in wchan for name in (*_POLLING, *(_SLEEPING if sleeps else ())))


def sleeps(pid: int) -> bool:
    """Whether the process's first thread sleeps for a set time, as between two looks for a file. False if the kernel does not show it."""
    if any(name in text_of(f"/proc/{pid}/wchan") for name in _SLEEPING):
        return True
    number, first = [*_syscall_of(pid).split(), "", ""][:2]
    # Python before 3.11 sleeps in a select of no file.
    return number.isdecimal() and (int(number) in _SLEEPS or (int(number) in _POLLS and first == "0x0"))


def waits_for_own_thread(pid: int) -> bool:
    """Whether the process's first thread waits for a lock or for another thread, of which none sleeps for a set time. False if the kernel
    does not show it."""
    if "futex" not in text_of(f"/proc/{pid}/wchan"):
        return False
    threads = [text_of(f"/proc/{pid}/task/{tid}/wchan") for tid in _numbers(f"/proc/{pid}/task")]
    return not any(name in wchan for wchan in threads for name in _SLEEPING)


def process_document(pid: int, reported: str = "") -> dict[str, Any] | None:
    """State, tracer, wchan and syscall of a process's first thread, as far as readable; None if it is gone. ``reported``: see
    :func:`waits_for_input`."""
    fields = stat_fields(pid)
    if not fields:
        return None
    found: dict[str, Any] = {"state": fields[0], "tracer": tracer_of(pid)}
    for key, text in (("wchan", text_of(f"/proc/{pid}/wchan")), ("syscall", _syscall_of(pid) or reported)):
        if text.strip() not in ("", "0"):
            found[key] = text.strip()[:200]
    return found


def pids() -> list[int]:
    """Process ids of all visible processes."""
    return _numbers("/proc")


def state_of(pid: int) -> str:
    """State letter of a process; "" if the process is gone."""
    return next(iter(stat_fields(pid)), "")


def _io_bytes(pid: int) -> int:
    """Bytes that a process has read and written so far; 0 if not readable."""
    lines = (line.partition(": ") for line in text_of(f"/proc/{pid}/io").splitlines())
    return sum(int(number) for name, _, number in lines if name in _IO and number.isdecimal())


def tracer_of(pid: int) -> int:
    """Process id of the attached debugger; 0 for none."""
    return int(status_field(pid, "TracerPid") or 0)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    return number in signals_in(pid, "SigCgt")


def signals_in(pid: int, field: str) -> set[int]:
    """Numbers of the signals in a mask of a process's status, such as ``SigIgn``; empty if the process is gone."""
    mask = int(status_field(pid, field) or "0", 16)
    return {bit + 1 for bit in range(mask.bit_length()) if mask >> bit & 1}


def user_of(pid: int) -> int:
    """User id of a process; -1 if the process is gone."""
    return int(status_field(pid, "Uid") or -1)


def parent_of(pid: int) -> int:
    """Process id of a process's parent; 0 if the process is gone."""
    fields = stat_fields(pid)
    return int(fields[1]) if fields else 0


def children_of(pid: int) -> list[int]:
    """Process ids of a process's children, of all its threads."""
    found: list[int] = []
    for tid in _numbers(f"/proc/{pid}/task"):
        found += [int(child) for child in text_of(f"/proc/{pid}/task/{tid}/children").split()]
    return sorted(found)


def exit_status(pid: int, handle: int) -> int | None:
    """Wait status of a process that has ended; None if unknown. ``handle``: its pidfd, -1 for none."""
    fields = stat_fields(pid)
    if len(fields) > 49 and fields[0] in "ZX":
        return int(fields[49])
    # The parent has reaped it. From Linux 6.15 on the kernel keeps the status for holders of a pidfd.
    info = bytearray(_INFO_BYTES)
    _INFO_MASK.pack_into(info, 0, _INFO_EXIT)
    try:
        fcntl.ioctl(handle, _GET_INFO, info)
    except (OSError, ValueError):
        return None
    return int(_INFO_CODE.unpack_from(info, 60)[0]) if _INFO_MASK.unpack_from(info)[0] & _INFO_EXIT else None


def status_field(pid: int, name: str) -> str:
    """First word of a field of /proc/PID/status; "" if the process or the field does not exist."""
    return status_fields(pid, [name])[0]


def status_fields(pid: int, names: Sequence[str]) -> list[str]:
    """First words of fields of /proc/PID/status; "" for each field that does not exist."""
    text = "\n" + text_of(f"/proc/{pid}/status")
    return [_first_word(text, f"\n{name}:") for name in names]


def counts_in(path: str, names: Sequence[str]) -> dict[str, int]:
    """Numbers by name, of these names, from a file of lines with a name, an optional colon, and a number; {} if it cannot be read."""
    text = "\n" + text_of(path).replace(":", " ")
    words = {name: _first_word(text, f"\n{name} ") for name in names}
    return {name: int(word) for name, word in words.items() if word.isdecimal()}


def _first_word(text: str, after: str) -> str:
    """The first word of the line of ``text`` after these characters; "" if there is none."""
    words = text.partition(after)[2].partition("\n")[0].split(None, 1)
    return words[0] if words else ""


def stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the name, beginning with the state; empty if the process is gone."""
    return name_and_fields(pid)[1]


def command_of(pid: int) -> str:
    """A process's command with its arguments, as in /proc/PID/cmdline; "" if it is gone or not readable."""
    return text_of(f"/proc/{pid}/cmdline")


def name_and_fields(pid: int) -> tuple[str, list[str]]:
    """The name of a process's program, and the fields after it in /proc/PID/stat; "" and none if the process is gone."""
    before, _, after = text_of(f"/proc/{pid}/stat").rpartition(")")
    return before.partition("(")[2], after.split()


def _numbers(place: str) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(place) if name.isdecimal())  # noqa: PTH208
    except OSError:
        return []


def is_gone(pid: int) -> bool:
    """Whether no process has this id. False if that cannot be determined."""
    try:
        Path(f"/proc/{pid}").stat()
    except OSError as error:
        return isinstance(error, (FileNotFoundError, ProcessLookupError))
    return False


_refusals: list[OSError] = []
"""The kernel's refusal to show a system call, once there was one."""


def _syscall_of(pid: int) -> str:
    """The number and arguments of the system call of a process's first thread, as text; "" if it cannot be read.

    Once the kernel has refused it, it is not read again: where only ancestors may trace a process (Yama), the kernel logs each attempt.
    """
    if _refusals:
        return ""
    try:
        return _read_text(f"/proc/{pid}/syscall")
    except OSError as error:
        if error.errno == errno.EPERM:
            _refusals.append(error)
        return ""


def text_of(path: str) -> str:
    """The text of a file in /proc or /sys; "" if it cannot be read."""
    try:
        return _read_text(path)
    except OSError:
        return ""


def _read_text(path: str) -> str:
    """The text of a file in /proc. Python's file objects would take three times as long. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return b"".join(iter(lambda: os.read(handle, _READ_BYTES), b"")).decode(errors="replace")
    finally:
        os.close(handle)


_WINDOW_S = 10.0
MOVED_BYTES = 256 << 10
"""Bytes per window from which a rank counts as moving data. Four times what the recording writes when it begins a file, and a fiftieth of a
slow disk's rate."""
SENT_BYTES = 64 << 10
"""The same for TCP, which the recording does not use. Polling a store each second moves fewer bytes."""
CHILD_CORES = 0.2
"""CPU cores from which a child counts as working; loggers and monitors use a few hundredths."""
WAKES_PER_S = 2.0
"""Context switches per second from which a process counts as receiving data. An idle dataloader worker wakes up every five seconds."""
_SLACK_S = 2.0
"""Longest delay until a rank's progress is visible here."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MOST_PROCESSES = 256
"""Limit of the processes that are read per rank."""


class _Poll(NamedTuple):
    """Bytes moved between two polls."""

    at_s: float
    moved_bytes: float
    sent_bytes: float
    """Bytes sent and received by TCP."""


_NETLINK_SOCK_DIAG = 4
_BY_FAMILY, _DONE, _ERROR = 20, 3, 2
_DUMP = 0x301
"""NLM_F_REQUEST | NLM_F_DUMP."""
_HEAD = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI48x")
_CONNECTED = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8
"""Bit mask of TCP states: established, or closed by one side only, so that the other may still send."""
_INFO = 2
"""INET_DIAG_INFO: the attribute contains a tcp_info."""
_INODE_AT, _ATTRIBUTES_AT = 68, 72
"""Offsets in an inet_diag_msg."""
_COUNTS, _COUNTS_AT = struct.Struct("=QQ"), 120
"""tcpi_bytes_acked and tcpi_bytes_received, and their offset in a tcp_info."""
_TIMEOUT_S = 0.5
_REUSE_S = 0.5
"""Time for which a reading is reused, so that all ranks of a poll share one."""


class Sockets:
    """Reads the kernel's counts of bytes sent and received by each TCP socket of this network namespace. Uploads from memory, and downloads
    by another thread, are visible only here: ``/proc/PID/io`` counts neither ``send`` nor ``recv``."""

    def __init__(self) -> None:
        self._at_s = -_REUSE_S
        self._by_inode: dict[int, int] = {}

    def bytes_of(self, pid: int) -> dict[int, int]:
        """Bytes sent and received so far by each TCP socket of a process, by the socket's inode; empty if unknown."""
        if time.monotonic() - self._at_s >= _REUSE_S:
            self._by_inode = dict(_all_counts())
            self._at_s = time.monotonic()
        return {inode: self._by_inode[inode] for inode in _sockets_of(pid) if inode in self._by_inode}


def _sockets_of(pid: int) -> Iterator[int]:
    folder = f"/proc/{pid}/fd"
    try:
        handles = os.listdir(folder)  # noqa: PTH208
    except OSError:
        return
    for handle in handles:
        try:
            target = os.readlink(f"{folder}/{handle}")  # noqa: PTH115
        except OSError:
            continue
        if target.startswith("socket:["):
            yield int(target[8:-1])


def _all_counts() -> Iterator[tuple[int, int]]:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            yield from _counts(family)
        except (OSError, struct.error):
            continue  # not supported by this kernel or container


def _counts(family: int) -> Iterator[tuple[int, int]]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_TIMEOUT_S)
        request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _CONNECTED)
        kernel.sendto(_HEAD.pack(_HEAD.size + len(request), _BY_FAMILY, _DUMP, 1, 0) + request, (0, 0))
        while True:
            data = kernel.recv(1 << 16)
            at = 0
            while at + _HEAD.size <= len(data):
                size, kind, *_ = _HEAD.unpack_from(data, at)
                if kind in (_DONE, _ERROR) or size < _HEAD.size:
                    return
                yield from _parse_message(data[at + _HEAD.size : at + size])
                at += -(-size // 4) * 4


def _parse_message(message: bytes) -> Iterator[tuple[int, int]]:
    (inode,) = struct.unpack_from("=I", message, _INODE_AT)
    at = _ATTRIBUTES_AT
    while at + 4 <= len(message):
        size, kind = struct.unpack_from("=HH", message, at)
        if size < 4:
            return
        if kind == _INFO and size >= 4 + _COUNTS_AT + _COUNTS.size:
            yield inode, sum(_COUNTS.unpack_from(message, at + 4 + _COUNTS_AT))
        at += -(-size // 4) * 4


_sockets = Sockets()


class Meter:
    """Resource use of one rank."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.clear()

    def clear(self) -> None:
        """Discard earlier readings after the rank has made progress."""
        self.cores = 0.0
        """CPU cores that the rank itself used between the last two polls."""
        self.works = False
        """Whether the rank received data, or a child worked, between the last two polls."""
        self._polls: deque[_Poll] = deque()
        self._before: dict[int, Usage] = {}
        self._sent_before: dict[int, int] = {}
        self._own_bytes = 0.0
        self._at_s = 0.0
        self._cleared_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)

    @property
    def moves(self) -> bool:
        """Whether the rank or its children moved more data, or touched more memory, within the window than the recording does."""
        moved = sum(poll.moved_bytes for poll in self._polls) >= MOVED_BYTES
        return self.works or moved or sum(poll.sent_bytes for poll in self._polls) >= SENT_BYTES

    def update(self, beat: Beat | None) -> None:
        """Read the counters. ``beat`` has the recording's own part of them, which is subtracted."""
        now_s = time.monotonic()
        now = {pid: usage for pid in self._tree() if (usage := usage_of(pid)) is not None}
        sent = {inode: count for pid in now for inode, count in _sockets.bytes_of(pid).items()}
        own_bytes = 0.0 if beat is None else beat.own_bytes + beat.own_faults * _PAGE_BYTES
        before, passed_s = self._before, now_s - self._at_s
        sent_before, self._sent_before = self._sent_before, sent
        recording_bytes = own_bytes - self._own_bytes
        self._before, self._own_bytes, self._at_s = now, own_bytes, now_s
        if not before or passed_s <= 0:
            return
        grown = {pid: usage.since(before.get(pid)) for pid, usage in now.items()}
        own = grown.get(self._pid)
        self.cores = own.cpu_s / passed_s if own is not None else 0.0
        self.works = any(self._works(pid, now[pid], used, passed_s) for pid, used in grown.items())
        moved = sum(used.bytes + used.faults * _PAGE_BYTES for used in grown.values())
        just_sent = sum(count - sent_before.get(inode, 0) for inode, count in sent.items())
        self._polls.append(_Poll(now_s, max(0.0, moved - recording_bytes), just_sent))
        while self._polls and now_s - self._polls[0].at_s > _WINDOW_S:
            self._polls.popleft()

    def _works(self, pid: int, usage: Usage, used: Usage, passed_s: float) -> bool:
        wakes = used.wakes / passed_s >= WAKES_PER_S
        if pid == self._pid:
            return wakes and is_in_network(pid)
        if usage.started_boot_s >= self._cleared_boot_s - _SLACK_S:
            # Started since the rank last made progress, so any use of resources counts.
            return wakes or used.cpu_s > 0 or used.bytes > 0 or used.faults > 0
        return used.cpu_s / passed_s >= CHILD_CORES

    def _tree(self) -> Iterator[int]:
        waiting, seen = [self._pid], 0
        while waiting and seen < _MOST_PROCESSES:
            pid = waiting.pop()
            seen += 1
            yield pid
            waiting += children_of(pid)
