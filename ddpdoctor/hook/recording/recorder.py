"""Writes the step log of one rank. Events are collected during a step, and written as one line when it ends.

Times inside a step are ``perf_counter_ns``. At the start of each step, that clock and the epoch time are read together. So
durations are exact, and starts can be compared between processes of a host. The format of the lines is in
:mod:`ddpdoctor.rundir.stepevents`.
"""

from __future__ import annotations

import os
import re
from threading import RLock, get_ident
from time import perf_counter_ns, process_time_ns, thread_time_ns, time_ns
from typing import Any, Callable

from ...rundir import STEPS_FILE, STEPS_SCHEMA
from ...rundir.heartbeat import ENDS_AT, ENDS_MASK, STEPS_AT, WRITTEN_AT, Heartbeat
from ...rundir.spool import Spool
from ...rundir.stepevents import EventField, EventKind, LineField, brief_lines
from ..job import CodeKinds, Lines
from ..patching import is_from_job_handler
from .active import EveryStep, active
from .crash_records import Calls
from .thread_times import ThreadTimes

MOST_EVENTS = 256
"""Upper limit of the events written per step (some 20 kB of text); of the rest, only number and total duration are written."""
FULL_COST_FACTOR = 7
"""Extra cost of recording a step in full instead of only its times, as a multiple of the measured duration of ``end_step``. Timed
inside real steps: all calls of the hook take 270 to 300 us in a full step and 80 to 90 us in a brief one, ``end_step`` 30 us."""
COUNTERS_EVERY_NS = 250_000_000
"""The thread's counters are read at both ends of about one step in this many ns, because that takes a system call. These are the steps
whose number is 1 modulo a power of two, the same on all ranks."""
_MOST_COUNTERS_MASK = 63
"""At the lowest rate, the counters are read at two successive step ends in 64."""

MOST_DRIFT_NS = 50_000
"""Largest plausible change of the offset between the two clocks from one reading to the next, ns. If it is larger, the clock was set,
or the thread lost its CPU between the two clocks."""
_MOST_LOST = 10
Cut = tuple[int, int, int, int]
"""A possible end of a step: perf_counter_ns, number of events before it, and the thread's total ns on a CPU and waiting for one (-1:
unknown)."""
_CLOCK, _CPU, _DELAY = 0, 2, 3
"""Indices of a ``Cut``."""
_FORWARD_END = re.compile(f"{EventField.FORWARD_END_NS.key}(-?[0-9]+)")
"""The only field of an event, other than its start, with a time relative to the step's start."""

_SCHEMA_LINE = f'{{{LineField.SCHEMA.key}"{STEPS_SCHEMA}"}}\n'
_DEFINITIONS = tuple("{" + field.key for field in (LineField.WHERE, LineField.SCHEMA))
"""Beginnings of lines that later lines refer to."""
_STEP, _TIME = "{" + LineField.STEP.key, LineField.TIME_NS.next_key
_CPU_NS, _DELAY_NS = LineField.CPU_NS.next_key, LineField.RUN_DELAY_NS.next_key
_EVENTS, _MARKS = LineField.EVENTS.next_key, LineField.MARKS.next_key
_START, _DURATION = EventField.START_NS.next_key, EventField.DURATION_NS.next_key
_EVALUATIONS = EventKind.EVALUATION.opening + EventField.COUNT.next_key
_MORE = EventKind.MORE.opening + EventField.COUNT.next_key


class Recorder(EveryStep):
    """Records the training thread of one rank. Only that thread calls its methods; other threads use only ``write_brief_steps``
    and ``pending``."""

    def __init__(self, spool: Spool, kinds: CodeKinds) -> None:
        self.spool = spool
        spool.is_from_job_handler = is_from_job_handler
        self.kinds = kinds
        self.pid = os.getpid()
        self.step = 0
        active.record(full=True)
        self.full_since = 0
        """Start of the current uninterrupted series of steps recorded in full, perf_counter_ns."""
        self.always_full = False
        """Set while the profiler window is near or open: its steps are always recorded in full."""
        self.events: list[tuple[int, int, str]] = []
        self.marks: list[str] = []
        self.pending: list[str] = [_SCHEMA_LINE]
        """Lines to write before the next step's."""
        self.lines: Lines = Lines(kinds, self.pending.append)
        self.calls = Calls(spool)
        self.heartbeat = Heartbeat(spool)
        self.brief_until = 0
        """Steps before this one may be brief: their times are kept in the heartbeat's page, and written together."""
        self._written = 0
        """Number of the first step that is not yet in the log."""
        self._writing: Any = RLock()
        """Held while lines are written. A signal handler of the job that interrupts the writing may own it (``_is_owned``)."""
        self.thinning = Thinning()
        self.lost: list[tuple[int, int]] = []
        """First and last number of each series of steps that were not written for lack of room; the last pair may include others."""
        self._overflow = [0, 0]
        self._saved = -1
        self._evaluations = [0, 0, 0]
        self._full_block = True
        self._trainings = self._blocks_until_describe = 0
        self.describe: Callable[[], None] | None = None
        """Called some steps after a training began, when its model is known; describes the job in rank.json."""
        self._block_start = self._block_cost_ns = self._block_full = self._block_first = 0
        """The current block of steps: start, recording cost, number of full steps, first step."""
        self._times: ThreadTimes | None = None
        self._counters_mask = 1
        """Bit mask: the thread's counters are read at the end of steps whose number is 0 or 1 in these bits."""
        self._follow_thread()
        now = self.cut(perf_counter_ns())
        self.start_step(now)
        self._block_start = now[_CLOCK]

    def _follow_thread(self) -> None:
        self.thread = get_ident()
        self.close()
        self._times = ThreadTimes()

    def close(self) -> None:
        """Stop recording."""
        times, self._times = self._times, None
        if times is not None:
            times.close()

    def switch_to_this_thread(self) -> None:
        """Record the calling thread from now on: the thread that steps the optimizer is the training thread."""
        self._follow_thread()
        self.events.clear()
        self.write_brief_steps()  # the epoch offset that they share is about to change
        now = self.cut(perf_counter_ns())
        self.start_step((self.start_perf_ns, *now[1:]))

    def start_step(self, start: Cut) -> None:
        """Set the start of the current step."""
        epoch, now = time_ns(), perf_counter_ns()
        self.epoch_offset_ns = epoch - now
        """Offset from perf_counter_ns to epoch ns."""
        self._start = start
        self.heartbeat.begin_step(self.step, start[_CLOCK] + self.epoch_offset_ns)

    @property
    def start_perf_ns(self) -> int:
        """When the current step began, perf_counter_ns."""
        return self._start[_CLOCK]

    @property
    def evaluations(self) -> int:
        """Number of forward passes without gradients recorded so far in the current step."""
        return self._evaluations[2]

    def record_all_events(self) -> None:
        """Record the current step, which has just begun, and later ones in full, until ``always_full`` is unset."""
        if not active.full:
            self.full_since = self.start_perf_ns
        self.always_full = True
        active.record(full=True)

    def record_new_training(self) -> None:
        """Record the next steps in full, because they may be of another model. For the first few trainings, thinning starts again;
        for later ones, only the rest of the current block is full, so that many trainings cost no more."""
        if self._trainings < _MOST_TRAININGS:
            self._trainings += 1
            self.thinning.restart(self.step)
        self._full_block = True
        self._blocks_until_describe = 2
        if not active.full:
            self.full_since = perf_counter_ns()
            active.record(full=True)

    def add(self, start: int, duration: int, fields: str) -> None:
        """Append an event: start (perf_counter_ns), duration (ns), and its other fields as JSON text, its kind first."""
        if len(self.events) < MOST_EVENTS:
            self.events.append((start, duration, fields))
        else:
            self.count(duration)

    def count(self, duration: int) -> None:
        """Count an event of which only the duration, ns, is kept."""
        self._overflow[0] += 1
        self._overflow[1] += duration

    def add_evaluation(self, start: int, duration: int) -> None:
        """Add a forward without gradients. Those of a step become one event."""
        if not self._evaluations[2]:
            self._evaluations[0] = start
        self._evaluations[1] += duration
        self._evaluations[2] += 1

    def cut(self, at: int) -> Cut:
        """Return a cut at ``at``, perf_counter_ns, with the thread's counters now; -1 if unknown, or not read to save time."""
        if self._evaluations[2] or self._overflow[0]:
            self._append_totals()
        if self.step & self._counters_mask > 1:
            return at, len(self.events), -1, -1
        times = self._times.read_ns() if self._times is not None else None
        if times is not None:
            return at, len(self.events), *times
        return at, len(self.events), thread_time_ns(), -1

    def awake_ns(self) -> int:
        """CPU time of the process, plus the time that its training thread has waited for a CPU, so far, ns. -1 if unknown, or not
        read to save time: it is read only in steps whose number is 1 in the bits of ``_counters_mask``."""
        if self._times is None or not self._times.known or self.step & self._counters_mask != 1:
            return -1
        # CPU time of all threads of the process, because another thread may prepare the batch.
        computed_ns, times = process_time_ns(), self._times.read_ns()
        return -1 if times is None else computed_ns + times[1]

    def add_overhead(self, ns: int) -> None:
        """Count time spent on recording outside of ``end_step``."""
        self._block_cost_ns += ns

    def end_step(self, end: Cut) -> None:  # noqa: C901
        """Write the step that ended at ``end``; later events belong to the next one. If a signal handler of the job ends another
        step while this is running, that step is merged into this one."""
        # Called in every step, when the CPU caches contain the model and not this code, so each function call costs some us.
        # Hence the length.
        if self._writing._is_owned():
            return
        with self._writing:
            start, full, zero = self._start, active.full, self.epoch_offset_ns
            if end[_CLOCK] < start[_CLOCK]:
                return  # a signal handler ended the step before this call
            number, next_zero = self.step + 1, zero
            if full:
                begun = perf_counter_ns()
                data = self._full_line(start, end)
            else:
                data = brief_lines(self.step, [start[0] + zero, end[0] + zero])
                if self.events and end[1]:
                    # Checkpoints are recorded in all steps.
                    data = data[:-2] + f"{_EVENTS}[{self._event_texts(start, end)}]}}\n"
            if full or not number % BLOCK_STEPS:
                next_zero = time_ns() - perf_counter_ns()
                if abs(next_zero - zero) > MOST_DRIFT_NS:
                    next_zero = max(next_zero, time_ns() - perf_counter_ns())
            waiting = len(self.pending)
            if waiting:
                data = "".join(self.pending[:waiting]) + data
            if self._written != self.step:
                data = self._brief_steps(self.step) + data
            is_written = self.spool.write(STEPS_FILE, data.encode())
            # Call nothing from here until the step's number is set: a signal handler of the job could run during a call and
            # raise, and then the step would be written twice.
            written, numbers = self._written, self.heartbeat.numbers
            if is_written:
                # The status thread may have added one in the meantime.
                del self.pending[:waiting]
            del self.marks[:], self.events[: end[1]]
            try:
                numbers[STEPS_AT + 1] = end[0] + zero
                # All times in the page have the same epoch offset, so the end of this step gets that of the next one.
                numbers[ENDS_AT + (number & ENDS_MASK)] = end[0] + next_zero
                numbers[WRITTEN_AT] = numbers[STEPS_AT] = number
            except ValueError:  # the page is closed: the recording has ended
                pass
            self.step = self._written = number
            self._start, self.epoch_offset_ns = end, next_zero
            if not is_written:
                self._keep_definitions()
                self._note_lost(written, number - 1)
            if self.events:
                self._shift_events(end[0] - start[0])
        if full:
            self._block_cost_ns += FULL_COST_FACTOR * (perf_counter_ns() - begun)
            self._block_full += 1
        if not number % BLOCK_STEPS:
            self._end_block(end[0])
        full = self._full_block or self.always_full
        if full is not active.full:
            active.record(full)

    def end_brief_step(self, at: int) -> bool:
        """Like ``end_step``, for a step that ended at ``at`` (perf_counter_ns) and of which only the times are recorded. They are
        kept in the heartbeat's page and written later.

        Does nothing and returns False if the step must be written now: at the end of a series of brief steps, or if there is
        anything else to write.
        """
        number = self.step + 1
        if (
            number >= self.brief_until
            or self.pending
            or self.events
            or self.marks
            or at < self._start[_CLOCK]
        ):
            return False
        numbers, end_ns = self.heartbeat.numbers, at + self.epoch_offset_ns
        try:
            numbers[ENDS_AT + (number & ENDS_MASK)] = end_ns
            numbers[STEPS_AT + 1] = end_ns
            numbers[STEPS_AT] = number
        except ValueError:  # the page is closed: the recording has ended
            return False
        self.step, self._start = number, (at, 0, -1, -1)
        return True

    def write_brief_steps(self) -> None:
        """Write the steps that are only in the heartbeat's page. The status thread also calls this, once a second."""
        if self._writing._is_owned():
            return
        with self._writing:
            # Read once, because the training thread continues to end steps meanwhile.
            step = self.step
            if self._written != step:
                is_written = self.spool.write(STEPS_FILE, self._brief_steps(step).encode())
                written, self._written = self._written, step  # before anything else is called, as in end_step
                self.heartbeat.written(step)
                if not is_written:
                    self._note_lost(written, step - 1)

    def _brief_steps(self, end: int) -> str:
        return brief_lines(self._written, self.heartbeat.times_ns(self._written, end))

    def _end_block(self, at: int) -> None:
        if self._blocks_until_describe:
            self._blocks_until_describe -= 1
            if not self._blocks_until_describe and self.describe is not None:
                self.describe()
        thinning, full = self.thinning, self._block_full
        cost_ns = self._block_cost_ns // full if full else None
        step, steps = self.step, self.step - self._block_first
        self._full_block = thinning.next_block(step, cost_ns, (at - self._block_start) // max(steps, 1))
        self._block_start, self._block_cost_ns, self._block_full, self._block_first = at, 0, 0, step
        self.brief_until = step + min(thinning.until_full(step), MOST_BRIEF - step % MOST_BRIEF)
        if self._full_block and not active.full:
            self.full_since = at
        if not self.step & _MOST_COUNTERS_MASK:
            often = COUNTERS_EVERY_NS / max(thinning.step_ns, 1.0)
            self._counters_mask = max(1, min((1 << int(often).bit_length()) - 1, _MOST_COUNTERS_MASK))

    def _shift_events(self, later_ns: int) -> None:
        """Move the remaining events to the next step, which begins ``later_ns`` later than the one in which they were recorded:
        the end of a step may be recognised only when later events have already been recorded."""
        self.events = [
            (
                begin,
                duration,
                _FORWARD_END.sub(
                    lambda base: f"{EventField.FORWARD_END_NS.key}{int(base[1]) - later_ns}", fields
                ),
            )
            for begin, duration, fields in self.events
        ]

    def _append_totals(self) -> None:
        if self._evaluations[2]:
            begin, duration, number = self._evaluations
            self.events.append((begin, duration, f"{_EVALUATIONS}{number}"))
            self._evaluations = [0, 0, 0]
        if self._overflow[0]:
            self.events.append((perf_counter_ns(), self._overflow[1], f"{_MORE}{self._overflow[0]}"))
            self._overflow = [0, 0]

    def _full_line(self, start: Cut, end: Cut) -> str:
        at, zero = start[_CLOCK], self.epoch_offset_ns
        text = self._event_texts(start, end)
        marks = f'{_MARKS}["' + '","'.join(self.marks) + '"]' if self.marks else ""
        ran = end[_CPU] - start[_CPU] if start[_CPU] >= 0 and end[_CPU] >= 0 else "null"
        delay = end[_DELAY] - start[_DELAY] if start[_DELAY] >= 0 and end[_DELAY] >= 0 else "null"
        return (
            f"{_STEP}{self.step}{_TIME}[{at + zero},{end[_CLOCK] + zero}]{_CPU_NS}{ran}"
            f"{_DELAY_NS}{delay}{_EVENTS}[{text}]{marks}}}\n"
        )

    def _event_texts(self, start: Cut, end: Cut) -> str:
        """The events of the step as JSON text, sorted by start."""
        at = start[_CLOCK]
        events = self.events if end[1] >= len(self.events) else self.events[: end[1]]
        return ",".join(
            [
                f"{{{fields}{_START}{begin - at}{_DURATION}{duration}}}"
                for begin, duration, fields in sorted(events)
            ]
        )

    def flush_definitions(self) -> None:
        """Write pending definitions of source lines, so that the lines of calls already written in other files can be
        resolved."""
        if self.pending:
            self.write_now("")

    def write_now(self, line: str) -> None:
        """Write a line outside of a step's end. If a signal handler of the job calls it during another write, the line is written
        with the next one."""
        self.pending.append(line)
        if self._writing._is_owned():
            return
        self.write_brief_steps()
        with self._writing:
            lines = list(self.pending)
            if self.spool.write(STEPS_FILE, "".join(lines).encode()):
                # Another thread may have added a line in the meantime.
                del self.pending[: len(lines)]
            else:
                self._keep_definitions()

    def note_saved(self) -> None:
        """Note that a checkpoint was saved in the current step."""
        if self._saved != self.step:
            self._saved = self.step
            self.write_now(f"{{{LineField.SAVED.key}{self.step}}}\n")

    def _note_lost(self, first: int, last: int) -> None:
        if self.lost and (self.lost[-1][1] == first - 1 or len(self.lost) == _MOST_LOST):
            self.lost[-1] = (self.lost[-1][0], last)
        else:
            self.lost.append((first, last))

    def _keep_definitions(self) -> None:
        """After a failed write, keep only the pending lines that later steps refer to."""
        self.pending[:] = [line for line in self.pending if line.startswith(_DEFINITIONS)]


def recording_here(recorder: Recorder | None) -> bool:
    """Whether this call, on this thread, is to be recorded."""
    return active.full and recorder is not None and recorder.thread == get_ident()


MOST_SHARE = 0.007
"""If recording in full costs more than this share of the step time, half as many steps are recorded in full."""
LEAST_SHARE = 0.003
"""If it costs less than this share, twice as many steps are recorded in full."""
EARLY_STEPS, MANY_STEPS, LONG_STEPS = 512, 2048, 8192
"""From these numbers of steps on, both shares are divided by the factors below: by then there is enough data for a diagnosis, and
a long job would bear the cost for longer. Of 8192 steps of 20 ms, 500 to 800 were recorded in full; these include about five of
the stalls that occur in one of 100 steps."""
_FACTORS = ((LONG_STEPS, 32), (MANY_STEPS, 8), (EARLY_STEPS, 2))
"""With steps of 20 ms and a cost of 270 to 340 us, one in 16 to 32 is recorded in full after ``MANY_STEPS``, one in 64 after
``LONG_STEPS``."""
MOST_THINNED = 64
"""At least one block in this many is full. Of 10,000 steps there are then still some 20 full blocks."""
BLOCK_STEPS = 8
"""Number of steps in a block, which are all recorded in full or all not. Full steps must be successive, because a step is
measured from the end of the one before."""
MOST_BRIEF = 64
"""Upper limit of the number of brief steps that are written together, which saves writing a line for each, their largest cost.
They must fit into the heartbeat's page, together with the last steps before ``/dev/shm`` is full."""
_WEIGHT = 1 / 2
"""Weight of the newest block in the averages."""
_LEAST_RISE_NS = 4000.0
_MOST_RISE = 0.1
"""One reading raises the estimated cost by at most this share of it, or by ``_LEAST_RISE_NS`` if that is more."""
_MOST_TRAININGS = 8
"""Number of trainings of a process (each with its own process group) that are recorded in as much detail as the first one. No
more than these are diagnosed."""
_SETTLE_STEPS = 32
"""Minimum steps between two changes, and before the first one: the first steps of a job are not typical."""


class Thinning:
    """Decides which blocks of steps are recorded in full: one block in ``every``. This is a power of two, so that even ranks with
    different rates have full steps in common."""

    def __init__(self) -> None:
        self.every = 1
        self.step_ns = 0.0
        """Duration of a step, averaged over the last blocks, ns."""
        self._cost_ns = 20_000.0
        self._first = 0
        self._next_change = _SETTLE_STEPS

    def restart(self, step: int) -> None:
        """Start again at ``step`` as at the first step of a job."""
        self.every, self._first, self._next_change = 1, step, step + _SETTLE_STEPS

    @property
    def cost_us(self) -> float:
        """Estimated cost of recording one step in full for the training thread, us."""
        return round(self._cost_ns / 1000, 1)

    def next_block(self, step: int, cost_ns: int | None, step_ns: int) -> bool:
        """Return whether the block that begins with ``step`` is to be recorded in full. ``step_ns`` is the duration of a step in
        the last block, ``cost_ns`` the cost of recording one of its steps in full (None: it had none)."""
        if cost_ns is not None:
            # A reading includes time in which another process had the core, so a long one may raise the average only a little.
            most = max(_LEAST_RISE_NS, _MOST_RISE * self._cost_ns)
            self._cost_ns += min((cost_ns - self._cost_ns) * _WEIGHT, most)
        self.step_ns += (step_ns - self.step_ns) * _WEIGHT
        if step >= self._next_change:
            factor = next((factor for least, factor in _FACTORS if step - self._first >= least), 1)
            share = factor * self._cost_ns / max(self.step_ns, 1.0) / self.every
            if share > MOST_SHARE and self.every < MOST_THINNED:
                self.every *= 2
                self._next_change = step + _SETTLE_STEPS
            elif share < LEAST_SHARE and self.every > 1:
                self.every //= 2
                self._next_change = step + _SETTLE_STEPS
        return step // BLOCK_STEPS % self.every == 0

    def until_full(self, step: int) -> int:
        """Number of steps from ``step`` to the next full block; 0 inside one."""
        cycle = BLOCK_STEPS * self.every
        into = step % cycle
        return 0 if into < BLOCK_STEPS else cycle - into
