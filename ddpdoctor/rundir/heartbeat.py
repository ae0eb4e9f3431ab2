"""A page of shared memory with a rank's step count and the ends of its last steps.

It is the only part of the rank's spool that the launcher's hang monitor needs. It is created and allocated with the spool, so a full
``/dev/shm`` does not affect it later. If the spool is removed, a process that has opened the page still reads it.

::

    <spool>/heartbeat    one page of 8-byte numbers: those of :class:`Beat` in order; from index 256 on, the ends of the last
                         256 steps, epoch ns, each at the number of the step that began then, modulo 256

A number is written by one store through a memoryview, which takes 2 us with cold CPU caches; ``struct.pack_into`` takes 6.
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
"""Index of ``Beat.steps``; ``Beat.step_end_ns`` follows."""
WRITTEN_AT = 9
"""Index of the number of steps in the step log."""
_REPORTS_AT, _ENDED_AT, _SIGNAL_AT = 4, 7, 8
ENDS_AT = 256
"""Index of the first end of a step."""
ENDS_MASK = 255
"""Mask of a step's number that gives the index, relative to ``ENDS_AT``, of the time at which it began."""
MOST_STEPS = 10**15
"""Upper limit of the step count; a page with a larger number is damaged."""


class Beat(NamedTuple):
    """The numbers of a heartbeat page."""

    version: int
    began_ns: int
    """Start of the recording, epoch ns."""
    steps: int
    """Number of finished steps."""
    step_end_ns: int
    """End of the last step, epoch ns; 0 before the first."""
    reports: int
    """Number of times the status thread has written the training thread's status."""
    own_bytes: int
    """Bytes that thread has written."""
    own_faults: int
    """Minor page faults of that thread."""
    ended: int
    """1 + the number of steps after which the recording, or the process group, ended in order; 0 before that."""
    signal: int = 0
    """Signal at which faulthandler writes the stack of the first thread; 0 if none."""

    @property
    def in_order(self) -> bool:
        """Whether the recording has ended in order, and no step or ``init_process_group`` has followed."""
        return self.ended == self.steps + 1


class Heartbeat:
    """The rank's side. The recorder writes ends of steps to ``numbers``; the status thread calls ``report_written``. No method
    raises."""

    __slots__ = ("_bytes", "_reports", "numbers")

    def __init__(self, spool: Spool) -> None:
        self.numbers: Any
        """The page, by index. Without room for it nothing is counted, and the hang monitor reports that it has no information on
        this rank."""
        self._reports = self._bytes = 0
        try:
            self.numbers = spool.shared(HEARTBEAT_FILE, _BYTES)
        except OSError:
            self.numbers = [0] * (_BYTES // 8)
        self._write(1, time.time_ns(), 0, 0, 0, 0, 0, 0)
        self._write(0, _VERSION)

    def begin_step(self, number: int, at_ns: int) -> None:
        """Record the start of step ``number`` at ``at_ns``, epoch ns, if it differs from the end of the previous one."""
        self._write(ENDS_AT + (number & ENDS_MASK), at_ns)

    def written(self, steps: int) -> None:
        """Record that the first ``steps`` steps are in the step log."""
        self._write(WRITTEN_AT, steps)

    def times_ns(self, first: int, end: int) -> list[int]:
        """Start and end, epoch ns, of each step from ``first`` to before ``end``, alternating; at most the last 255 steps."""
        return _times_ns(self.numbers, first, end)

    def report_written(self, size: int, faults: int) -> None:
        """Record that the status thread has written ``size`` bytes; ``faults``: total page faults of the calling thread."""
        self._reports += 1
        self._bytes += size
        self._write(_REPORTS_AT, self._reports, self._bytes, faults)

    def set_signal(self, signal: int) -> None:
        """Record the signal at which faulthandler writes a stack; 0 if none."""
        self._write(_SIGNAL_AT, signal)

    def end(self, steps: int) -> None:
        """Record the orderly end of the recording after ``steps`` steps."""
        self._write(_ENDED_AT, steps + 1)

    def reopen(self) -> None:
        """Record that the rank joins another process group and its recording continues."""
        self._write(_ENDED_AT, 0)

    def _write(self, at: int, *values: int) -> None:
        numbers = self.numbers
        try:
            for index, value in enumerate(values, at):
                numbers[index] = value
        except ValueError:  # the page is closed: the recording has ended
            self.numbers = [0] * (_BYTES // 8)


def _times_ns(numbers: Sequence[int], first: int, end: int) -> list[int]:
    if first >= end:
        return []
    ends = [numbers[ENDS_AT + (step & ENDS_MASK)] for step in range(first, end + 1)]
    times_ns = [0] * (2 * (end - first))
    times_ns[::2], times_ns[1::2] = ends[:-1], ends[1:]
    return times_ns


def unwritten_steps(page: bytes, first: int) -> tuple[int, list[int]]:
    """The steps that are in a page's content and not in the step log, which has those before ``first``. Returns the number of the
    first of them, and their times as of ``Heartbeat.times_ns``; no times if the content is damaged, or of a version that kept none."""
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
    """The reading side. Keeps the page open even if the spool is removed."""

    def __init__(self, spool: str) -> None:
        self._spool = spool
        self._handle = -1

    def read(self) -> Beat | None:
        """The current numbers; None if the rank has no such page yet. Never raises."""
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

    def close(self) -> None:
        """Close the page; a later ``read`` opens it again."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
