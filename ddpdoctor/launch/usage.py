"""Resource use of a rank's processes, from the kernel's counters: evidence that a rank works, without its cooperation.

A checkpoint written by plain ``write()``, a download, a metric or a subprocess that evaluates moves bytes, touches new memory or uses a
processor, in the rank or its children. A rank that waits for a lock or for another rank does none of this.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ddpdoctor.launch import procfs
from ddpdoctor.rundir.heartbeat import Beat

_WINDOW_S = 10.0
MOVED_BYTES = 256 << 10
"""Per window. Four times what the recording writes when it begins a file, and a fiftieth of a slow disk's rate."""
SENT_BYTES = 64 << 10
"""The same for TCP, which the recording does not use. Polling a store each second moves less."""
CHILD_CORES = 0.2
"""CPU cores of a child that works; loggers and monitors use a few hundredths."""
WAKES_PER_S = 2.0
"""Context switches of a process that receives data. An idle dataloader worker wakes up every five seconds."""
_SLACK_S = 2.0
"""Longest delay until a rank's progress is visible here."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MOST_PROCESSES = 256
"""Most processes of one rank that are read."""


class _Poll(NamedTuple):
    """What was used between two polls."""

    at_s: float
    moved_bytes: float
    sent_bytes: float
    """Sent and received by TCP."""


_NETLINK_SOCK_DIAG = 4
_BY_FAMILY, _DONE, _ERROR = 20, 3, 2
_DUMP = 0x301
"""NLM_F_REQUEST | NLM_F_DUMP."""
_HEAD = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI48x")
_CONNECTED = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8
"""Established, or closed by one side, of which the other may still send."""
_INFO = 2
"""INET_DIAG_INFO: a tcp_info."""
_INODE_AT, _ATTRIBUTES_AT = 68, 72
"""In an inet_diag_msg."""
_COUNTS, _COUNTS_AT = struct.Struct("=QQ"), 120
"""tcpi_bytes_acked and tcpi_bytes_received."""
_TIMEOUT_S = 0.5
_FRESH_S = 0.5
"""All ranks of a poll share one reading."""


class Sockets:
    """Bytes that the TCP sockets of this network namespace have sent and received, which the kernel counts per socket. An upload from
    memory, or a download by another thread, is visible nowhere else: ``/proc/PID/io`` counts neither ``send`` nor ``recv``."""

    def __init__(self) -> None:
        self._at_s = -_FRESH_S
        self._by_inode: dict[int, int] = {}

    def bytes_of(self, pid: int) -> dict[int, int]:
        """Bytes sent and received so far by each TCP socket of a process, by its inode; empty if unknown."""
        if time.monotonic() - self._at_s >= _FRESH_S:
            self._by_inode = dict(_all_counts())
            self._at_s = time.monotonic()
        return {inode: self._by_inode[inode] for inode in _sockets_of(pid) if inode in self._by_inode}


def _sockets_of(pid: int) -> Iterator[int]:
    try:
        handles = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return
    for handle in handles:
        try:
            target = str(handle.readlink())
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
                yield from _of_message(data[at + _HEAD.size : at + size])
                at += -(-size // 4) * 4


def _of_message(message: bytes) -> Iterator[tuple[int, int]]:
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
        """Forget earlier readings, after the rank has made progress."""
        self.cores = 0.0
        """CPU cores that the rank itself used between the last two polls."""
        self.works = False
        """Whether, between the last two polls, it received data, or a child worked."""
        self._polls: deque[_Poll] = deque()
        self._before: dict[int, procfs.Usage] = {}
        self._sent_before: dict[int, int] = {}
        self._own_bytes = 0.0
        self._at_s = 0.0
        self._cleared_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)

    @property
    def moves(self) -> bool:
        """Whether the rank or its children lately moved more data, or touched more memory, than the recording does."""
        moved = sum(poll.moved_bytes for poll in self._polls) >= MOVED_BYTES
        return self.works or moved or sum(poll.sent_bytes for poll in self._polls) >= SENT_BYTES

    def look(self, beat: Beat | None) -> None:
        """Read the counters. ``beat``: how much of them the recording itself used."""
        now_s = time.monotonic()
        now = {pid: usage for pid in self._tree() if (usage := procfs.usage_of(pid)) is not None}
        sent = {inode: count for pid in now for inode, count in _sockets.bytes_of(pid).items()}
        own_bytes = 0.0 if beat is None else beat.own_bytes + beat.own_faults * _PAGE_BYTES
        before, passed_s = self._before, now_s - self._at_s
        sent_before, self._sent_before = self._sent_before, sent
        ours = own_bytes - self._own_bytes
        self._before, self._own_bytes, self._at_s = now, own_bytes, now_s
        if not before or passed_s <= 0:
            return
        grown = {pid: usage.since(before.get(pid)) for pid, usage in now.items()}
        own = grown.get(self._pid)
        self.cores = own.cpu_s / passed_s if own is not None else 0.0
        self.works = any(self._works(pid, now[pid], used, passed_s) for pid, used in grown.items())
        moved = sum(used.bytes + used.faults * _PAGE_BYTES for used in grown.values())
        just_sent = sum(count - sent_before.get(inode, 0) for inode, count in sent.items())
        self._polls.append(_Poll(now_s, max(0.0, moved - ours), just_sent))
        while self._polls and now_s - self._polls[0].at_s > _WINDOW_S:
            self._polls.popleft()

    def _works(self, pid: int, usage: procfs.Usage, used: procfs.Usage, passed_s: float) -> bool:
        wakes = used.wakes / passed_s >= WAKES_PER_S
        if pid == self._pid:
            return wakes and procfs.is_in_network(pid)
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
            waiting += procfs.children_of(pid)
