"""A page of memory in which a rank counts its steps, and when its last ones ended; the launcher's hang monitor needs nothing
else of the rank's spool.

It is made with the spool and given its storage at once, so that neither a full ``/dev/shm`` stops it later, nor the
removal of the spool: a process that has opened it still reads the same page.

::

    <spool>/heartbeat    one page: numbers of eight bytes, in the order of :class:`Beat`; from number 256 on, the ends of the
                         last 256 steps, epoch ns, each at the number of the step that began then, modulo 256

A number is written by one store through a memoryview: of all ways to do so it is the one that takes least where the caches are
cold, 2 us where ``struct.pack_into`` takes 6.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .layout import opened_spool
from .owned import open_file

if TYPE_CHECKING:
    from .spool import Spool

HEARTBEAT_FILE = "heartbeat"
_BYTES = 4096
_VERSION = 1
_ALL = struct.Struct("=9q")
STEPS_AT = 2
"""Index of ``Beat.steps``; behind it ``Beat.step_end_ns``."""
WRITTEN_AT = 9
"""Index of the number of steps that are in the step log."""
_REPORTS_AT, _ENDED_AT, _SIGNAL_AT = 4, 7, 8
ENDS_AT = 256
"""Index of the first of the steps' ends."""
ENDS_MASK = 255
"""What of a step's number says where among them the time is at which it began."""
MOST_STEPS = 10**15
"""More than any rank finishes: a page with a larger number is damaged."""


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
    """The rank's side. The recorder writes ends of steps to ``numbers``; ``report_written`` is for the status thread. None raises."""

    def __init__(self, spool: Spool) -> None:
        self.numbers: Any
        """The page, by index. Without room for it nothing is counted: the hang monitor reports that it knows nothing of this rank."""
        self._reports = self._bytes = 0
        try:
            self.numbers = spool.shared(HEARTBEAT_FILE, _BYTES)
        except OSError:
            self.numbers = [0] * (_BYTES // 8)
        self._write(1, time.time_ns(), 0, 0, 0, 0, 0, 0)
        self._write(0, _VERSION)

    def begin_step(self, number: int, at_ns: int) -> None:
        """The step of this number begins at ``at_ns``, epoch ns, not where the one before ended."""
        self._write(ENDS_AT + (number & ENDS_MASK), at_ns)

    def written(self, steps: int) -> None:
        """The first ``steps`` are in the step log."""
        self._write(WRITTEN_AT, steps)

    def times_ns(self, first: int, end: int) -> list[int]:
        """Start and end of each of the steps from ``first`` on and before ``end``, at most the last 255, epoch ns, in pairs."""
        return _times_ns(self.numbers, first, end)

    def report_written(self, size: int, faults: int) -> None:
        """The status thread has written ``size`` bytes; ``faults``: all page faults of the calling thread so far."""
        self._reports += 1
        self._bytes += size
        self._write(_REPORTS_AT, self._reports, self._bytes, faults)

    def set_signal(self, signal: int) -> None:
        """faulthandler writes a stack at this signal, 0 for none."""
        self._write(_SIGNAL_AT, signal)

    def end(self, steps: int) -> None:
        """The recording ends in order, after so many steps."""
        self._write(_ENDED_AT, steps + 1)

    def reopen(self) -> None:
        """The rank joins a process group again after it ended one: its recording goes on."""
        self._write(_ENDED_AT, 0)

    def _write(self, at: int, *values: int) -> None:
        numbers = self.numbers
        try:
            for index, value in enumerate(values, at):
                numbers[index] = value
        except ValueError:  # the recording has ended, and the page is closed
            self.numbers = [0] * (_BYTES // 8)


def _times_ns(numbers: Sequence[int], first: int, end: int) -> list[int]:
    return [numbers[ENDS_AT + (each & ENDS_MASK)] for step in range(first, end) for each in (step, step + 1)]


def unwritten_steps(page: bytes, first: int) -> tuple[int, list[int]]:
    """The steps that a page's content has and the step log has not, which has those before ``first``: the number of the first of them, and
    their times as ``Heartbeat.times_ns`` gives them; no times if the content is damaged, or of a version that kept none."""
    numbers = memoryview(page).cast("q") if len(page) == _BYTES else [0]
    if numbers[0] != _VERSION:
        return first, []
    steps, written = numbers[STEPS_AT], numbers[WRITTEN_AT]
    if not 0 <= written <= steps <= MOST_STEPS:
        return first, []
    first = max(first, written, steps - ENDS_MASK)
    times_ns = _times_ns(numbers, first, steps)
    is_whole = times_ns == sorted(times_ns) and (not times_ns or times_ns[0] > 0)
    return first, times_ns if is_whole else []


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
