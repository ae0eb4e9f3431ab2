"""What a rank's processes use, as the kernel counts it: evidence that a rank works which it need not give itself.

A checkpoint written by plain ``write()``, a download, a metric, a subprocess that evaluates: each moves bytes, touches new memory or
uses a processor, in the rank or in what it has started. A rank that waits for a lock or for another rank does none of this.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from ddpdoctor.launch import procfs
from ddpdoctor.launch.sockets import Sockets
from ddpdoctor.rundir import Beat

_WINDOW_S = 10.0
MOVED_BYTES = 256 << 10
"""Within the window: four times what a recording writes at once when it begins a new file, and a fiftieth of a slow disk's pace."""
SENT_BYTES = 64 << 10
"""The same by TCP, of which a recording uses nothing: what looks at a store each second, or reports now and then, moves less."""
CHILD_CORES = 0.2
"""What a child that works uses: loggers and monitors that run beside a job use a few hundredths."""
WAKES_PER_S = 2.0
"""What receives data wakes up for each piece of it. A loader's worker that has nothing to do wakes up every five seconds."""
_SLACK_S = 2.0
"""By how much later than it was made a rank's progress may be seen."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MOST_PROCESSES = 256
"""Of one rank that are looked at."""


class _Poll(NamedTuple):
    """What was used between two looks."""

    at_s: float
    moved_bytes: float
    sent_bytes: float
    """By TCP, or received."""


_sockets = Sockets()


class Meter:
    """Of one rank."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.clear()

    def clear(self) -> None:
        """The rank has made progress: what it did before does not count."""
        self.cores = 0.0
        """Processors that the rank itself used between the last two looks."""
        self.works = False
        """Whether, between the last two looks, it received data, or a process that it has started worked."""
        self._polls: deque[_Poll] = deque()
        self._before: dict[int, procfs.Usage] = {}
        self._sent_before: dict[int, int] = {}
        self._own_bytes = 0.0
        self._at_s = 0.0
        self._cleared_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)

    @property
    def moves(self) -> bool:
        """Whether the rank or its children have lately read, written, sent or touched more memory than recording does."""
        moved = sum(poll.moved_bytes for poll in self._polls) >= MOVED_BYTES
        return self.works or moved or sum(poll.sent_bytes for poll in self._polls) >= SENT_BYTES

    def look(self, beat: Beat | None) -> None:
        """Read the counters. ``beat`` says how much of them is our own doing."""
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
            # It was started since the rank last made progress, so for what the rank does now: anything it does counts.
            return wakes or used.cpu_s > 0 or used.bytes > 0 or used.faults > 0
        return used.cpu_s / passed_s >= CHILD_CORES

    def _tree(self) -> Iterator[int]:
        waiting, seen = [self._pid], 0
        while waiting and seen < _MOST_PROCESSES:
            pid = waiting.pop()
            seen += 1
            yield pid
            waiting += procfs.children_of(pid)
