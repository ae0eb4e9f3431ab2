"""One rank's recording: events are collected during a step and written, as one line, at its end.

Times inside a step are ``perf_counter_ns``; each step holds one pair of that clock and the epoch's, taken at
its start, so that
durations are exact and starts comparable between processes of a host.
"""

from __future__ import annotations

import os
from threading import get_ident, get_native_id
from time import perf_counter_ns, thread_time_ns, time_ns
from typing import Dict, List, NamedTuple, Optional, Tuple

from ..rundir import STEPS_FILE, STEPS_SCHEMA, Spool
from .thinning import Thinning
from .where import Kinds, Lines, lines_into

MOST_EVENTS = 256
"""Events of one step that are written each; the rest are counted."""
WHOLE_COST = 3
"""What recording costs the training thread in a step, as a multiple of what ends it, which is timed. Timed inside real
steps, where the caches hold the model and not our code, all calls of the hook came to 180 to 320 us, a third of that at
the end of the step; called in a row the same calls take a tenth."""
COUNTERS_NS = 30_000_000
"""Of steps shorter than this, the thread's counters are read in one of four: a system call costs as much as several events."""


class Cut(NamedTuple):
    """A moment at which a step may have ended."""

    at: int
    events: int
    cpu: int
    run_delay: int


class Recorder:
    """Records the training thread of one rank. Only that thread calls it, but for ``note``."""

    def __init__(self, spool: Spool, kinds: Kinds) -> None:
        self.spool = spool
        self.kinds = kinds
        self.pid = os.getpid()
        self.step = 0
        self.full = True
        """Whether this step's events are recorded."""
        self.always_full = False
        """Set while the profiler window is near or open: its steps are recorded whole whatever that costs."""
        self.events: List[Tuple[int, int, str]] = []
        self.marks: List[str] = []
        self.pending: List[str] = [f'{{"schema":"{STEPS_SCHEMA}"}}\n']
        """Lines to be written before the next step's."""
        self.lines: Lines = lines_into(self.pending, kinds)
        self.thinning = Thinning()
        self.sequence: Dict[str, int] = {}
        """Collectives called so far, by process group."""
        self._more = [0, 0]
        self._evaluations = [0, 0, 0]
        self._self_ns = 0
        self._schedstat = -1
        self._follow_thread()
        self._start_step(self.cut(perf_counter_ns()))

    def _follow_thread(self) -> None:
        self.thread = get_ident()
        if self._schedstat >= 0:
            os.close(self._schedstat)
        try:
            path = f"/proc/self/task/{get_native_id()}/schedstat"
            self._schedstat = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._schedstat = -1

    def follow_this_thread(self) -> None:
        """Record the calling thread from now on: the one that steps the optimizer is the training thread."""
        self._follow_thread()
        self.events.clear()
        now = self.cut(perf_counter_ns())
        self._start_step(now._replace(at=self._start.at))

    def _start_step(self, start: Cut) -> None:
        epoch, now = time_ns(), perf_counter_ns()
        self.epoch_of_zero = epoch - now
        """Epoch ns at which perf_counter_ns would have been 0."""
        self._start = start

    @property
    def start_perf_ns(self) -> int:
        """When the current step began, perf_counter_ns."""
        return self._start.at

    def add(self, start: int, duration: int, fields: str) -> None:
        """Append an event: perf_counter_ns, ns, and the inside of its JSON object from ``"k"`` on."""
        if len(self.events) < MOST_EVENTS:
            self.events.append((start, duration, fields))
        else:
            self._more[0] += 1
            self._more[1] += duration

    def add_evaluation(self, start: int, duration: int) -> None:
        """A forward without gradients; those of a step become one event."""
        if not self._evaluations[2]:
            self._evaluations[0] = start
        self._evaluations[1] += duration
        self._evaluations[2] += 1

    def cut(self, at: int) -> Cut:
        """The thread's counters now, as of ``at``; -1 where unknown, or not read because steps are short."""
        if self.step & 3 > 1 and at - self._start.at < COUNTERS_NS:
            return Cut(at, len(self.events), -1, -1)
        if self._schedstat >= 0:
            try:
                # Time on a CPU, time waited for one, number of time slices.
                times = os.pread(self._schedstat, 64, 0).split()
                return Cut(at, len(self.events), int(times[0]), int(times[1]))
            except (OSError, IndexError, ValueError):
                self._schedstat = -1
        return Cut(at, len(self.events), thread_time_ns(), -1)

    def end_step(self, end: Cut) -> None:
        """Write the step that ended at ``end``; what came after that belongs to the next one."""
        begun = perf_counter_ns()
        start = self._start
        self._fold()
        line = self._full_line(start, end) if self.full else self._short_line(start, end)
        del self.events[: end.events]
        self.pending.append(line)
        self._write()
        self.marks.clear()
        self.step += 1
        self._start_step(end)
        self._self_ns = WHOLE_COST * (perf_counter_ns() - begun)
        self.full = (
            self.thinning.next_step(self.step, self._self_ns, end.at - start.at, self.full)
            or self.always_full
        )

    def _fold(self) -> None:
        if self._evaluations[2]:
            begin, duration, number = self._evaluations
            self.events.append((begin, duration, f'"k":"eval","n":{number}'))
            self._evaluations = [0, 0, 0]
        if self._more[0]:
            self.events.append((perf_counter_ns(), self._more[1], f'"k":"more","n":{self._more[0]}'))
            self._more = [0, 0]

    def _full_line(self, start: Cut, end: Cut) -> str:
        at = start.at
        events = self.events if end.events >= len(self.events) else self.events[: end.events]
        events = sorted(events)
        text = ",".join(
            [f'{{{fields},"s":{begin - at},"d":{duration}}}' for begin, duration, fields in events]
        )
        marks = ',"marks":["' + '","'.join(self.marks) + '"]' if self.marks else ""
        ran = end.cpu - start.cpu if start.cpu >= 0 and end.cpu >= 0 else "null"
        delay = end.run_delay - start.run_delay if start.run_delay >= 0 and end.run_delay >= 0 else "null"
        zero = self.epoch_of_zero
        return (
            f'{{"step":{self.step},"t":[{at + zero},{end.at + zero}],"cpu":{ran},'
            f'"runq":{delay},"self":{self._self_ns},"ev":[{text}]{marks}}}\n'
        )

    def _short_line(self, start: Cut, end: Cut) -> str:
        zero = self.epoch_of_zero
        return f'{{"step":{self.step},"t":[{start.at + zero},{end.at + zero}],"thin":true}}\n'

    def write_now(self, line: str) -> None:
        """Write a line outside of a step's end."""
        self.pending.append(line)
        self._write()

    def _write(self) -> None:
        self.spool.write(STEPS_FILE, "".join(self.pending).encode())
        self.pending.clear()


def recording_here(recorder: Optional[Recorder]) -> bool:
    """Whether this call, on this thread, is to be recorded."""
    return recorder is not None and recorder.full and recorder.thread == get_ident()
