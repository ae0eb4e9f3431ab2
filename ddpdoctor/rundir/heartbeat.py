"""A page of memory in which a rank counts its steps; the launcher's hang monitor needs nothing else of the rank's
spool.

It is made with the spool and given its storage at once, so that neither a full ``/dev/shm`` stops it later, nor the
removal of the spool: a process that has opened it still reads the same page.

::

    <spool>/heartbeat    one page: numbers of eight bytes, in the order of :class:`Beat`, little-endian
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

from .layout import opened_spool
from .owned import open_file

if TYPE_CHECKING:
    from .spool import Spool

HEARTBEAT_FILE = "heartbeat"
_BYTES = 4096
_VERSION = 1
_ALL = struct.Struct("<9q")
_STEP, _REPORT, _ONE = struct.Struct("<2q"), struct.Struct("<3q"), struct.Struct("<q")
_STEP_AT, _REPORT_AT, _ENDED_AT, _SIGNAL_AT = 16, 32, 56, 64


class Beat(NamedTuple):
    """The numbers of a heartbeat page."""

    version: int
    began_ns: int
    """When the recording began, epoch ns."""
    steps: int
    """Finished so far."""
    step_end_ns: int
    """When the last one ended, epoch ns; 0 before the first."""
    reports: int
    """How often the status thread has written the training thread's status."""
    own_bytes: int
    """What that thread has written so far."""
    own_faults: int
    """Pages of memory that it was the first to touch."""
    ended: int
    """One more than the steps after which the recording, or the process group, ended in order; 0 before."""
    signal: int = 0
    """At which faulthandler writes the stack of its first thread, 0 for none."""

    @property
    def in_order(self) -> bool:
        """Whether the recording has ended in order, and neither a step nor another ``init_process_group`` has followed."""
        return self.ended == self.steps + 1


class Heartbeat:
    """The rank's side. ``step`` is for the training thread, ``report_written`` for the status thread; neither raises."""

    def __init__(self, spool: Spool) -> None:
        self._memory: mmap.mmap | None = None
        self._reports = self._bytes = 0
        first = Beat(_VERSION, time.time_ns(), 0, 0, 0, 0, 0, 0)
        try:
            memory = spool.shared(HEARTBEAT_FILE, _BYTES)
            _ALL.pack_into(memory, 0, *first)
            self._memory = memory
        except OSError:
            pass  # storage is short: the hang monitor reports that it knows nothing of this rank

    def step(self, steps: int, end_ns: int) -> None:
        """``steps`` are finished, the last one at ``end_ns``, epoch ns."""
        memory = self._memory
        if memory is not None:
            try:
                _STEP.pack_into(memory, _STEP_AT, steps, end_ns)
            except (TypeError, ValueError):  # the recording has ended, and the page is closed
                self._memory = None

    def report_written(self, size: int, faults: int) -> None:
        """The status thread has written ``size`` bytes; ``faults``: all page faults of the calling thread so far."""
        self._reports += 1
        self._bytes += size
        self._write(_REPORT_AT, _REPORT.pack(self._reports, self._bytes, faults))

    def set_signal(self, signal: int) -> None:
        """faulthandler writes a stack at this signal, 0 for none."""
        self._write(_SIGNAL_AT, _ONE.pack(signal))

    def end(self, steps: int) -> None:
        """The recording ends in order, after so many steps."""
        self._write(_ENDED_AT, _ONE.pack(steps + 1))

    def reopen(self) -> None:
        """The rank joins a process group again after it ended one: its recording goes on."""
        self._write(_ENDED_AT, _ONE.pack(0))

    def _write(self, at: int, data: bytes) -> None:
        memory = self._memory
        if memory is not None:
            try:
                memory[at : at + len(data)] = data
            except ValueError:
                self._memory = None


class HeartbeatReader:
    """The reading side. Keeps the page open, also when the spool is removed."""

    def __init__(self, spool: str) -> None:
        self._spool = spool
        self._handle = -1

    def read(self) -> Beat | None:
        """The numbers now; None if the rank has no such page, or not yet. Never raises."""
        try:
            if self._handle < 0:
                with opened_spool(self._spool) as spool_fd:
                    self._handle = open_file(HEARTBEAT_FILE, spool_fd, os.O_RDONLY)
            data = os.pread(self._handle, _ALL.size, 0)
        except OSError:
            return None
        if len(data) < _ALL.size:
            return None
        beat = Beat(*_ALL.unpack(data))
        return beat if beat.version == _VERSION else None
