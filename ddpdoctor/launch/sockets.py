"""What TCP sockets have sent and received: the kernel counts that with each socket, not with the process that has it.

An upload from memory, or a download by other threads than the first, shows nowhere else: ``/proc/PID/io`` knows neither ``send`` nor
``recv``.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

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
"""All ranks of a look share one answer."""


class Sockets:
    """All of this network namespace."""

    def __init__(self) -> None:
        self._at_s = -_FRESH_S
        self._by_inode: dict[int, int] = {}

    def bytes_of(self, pid: int) -> dict[int, int]:
        """By the inode of each TCP socket of a process, what it has sent and received so far; empty where that can't be known."""
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
            continue  # not a kernel, or a container, that tells


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
