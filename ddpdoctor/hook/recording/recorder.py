"""One rank's step log: events are collected during a step and written, as one line, at its end.

Times inside a step are ``perf_counter_ns``; each step holds one pair of that clock and the epoch's, taken at its start, so
that durations are exact and starts comparable between processes of a host. What the lines say is in
:mod:`ddpdoctor.rundir.stepevents`.
"""

from __future__ import annotations

import os
import re
from threading import RLock, get_ident
from time import perf_counter_ns, process_time_ns, thread_time_ns, time_ns
from typing import Any, Callable

from ...rundir import (
    ENDS_AT,
    ENDS_MASK,
    STEPS_AT,
    STEPS_FILE,
    STEPS_SCHEMA,
    WRITTEN_AT,
    EventField,
    EventKind,
    Heartbeat,
    LineField,
    Spool,
    brief_lines,
)
from ..job import CodeKinds, Lines
from ..patching import is_the_jobs
from .active import active
from .crash_records import Calls
from .thread_times import ThreadTimes

MOST_EVENTS = 256
"""Events of one step that are written each, some 20 kB of text; the rest are counted."""
WHOLE_COST = 7
"""Extra cost for the training thread of recording a step in full instead of only its times, as a multiple of the
time that ``end_step`` takes, which is measured. Timed inside real steps, where the caches hold the model and not the
hook's code, all calls of the hook came to 270 to 300 us in full, to 80 to 90 us in a thinned step, and the end of a
full one to 30 us; called in a row the same calls take a tenth."""
COUNTERS_EVERY_NS = 250_000_000
"""About how often the thread's counters are read at both ends of a step: a system call costs as much as several events.
In steps whose number is a multiple of a power of two, so that ranks share them."""
_MOST_COUNTERS_MASK = 63
"""The rarest: at two neighbouring ends of steps in 64."""

MOST_DRIFT_NS = 50_000
"""From one reading of both clocks to the next: beyond it the clock was set, or the thread had no CPU between the two halves of a reading,
which makes the difference smaller than it is."""
_MOST_LOST = 10
Cut = tuple[int, int, int, int]
"""A moment at which a step may have ended: perf_counter_ns, events before it, and the thread's time on a CPU and its wait
for one so far, ns, -1 where unknown.
"""
_CLOCK, _CPU, _DELAY = 0, 2, 3
"""Places in a ``Cut``."""
_BASE = re.compile(f"{EventField.FORWARD_END_NS.key}(-?[0-9]+)")
"""The one time inside an event's fields that counts from the step's start."""

_SCHEMA_LINE = f'{{{LineField.SCHEMA.key}"{STEPS_SCHEMA}"}}\n'
_DEFINITIONS = tuple("{" + field.key for field in (LineField.WHERE, LineField.SCHEMA))
"""How the lines begin that later ones refer to."""
_STEP, _TIME = "{" + LineField.STEP.key, LineField.TIME_NS.next_key
_CPU_NS, _DELAY_NS = LineField.CPU_NS.next_key, LineField.RUN_DELAY_NS.next_key
_EVENTS, _MARKS = LineField.EVENTS.next_key, LineField.MARKS.next_key
_START, _DURATION = EventField.START_NS.next_key, EventField.DURATION_NS.next_key
_EVALUATIONS = EventKind.EVALUATION.opening + EventField.COUNT.next_key
_MORE = EventKind.MORE.opening + EventField.COUNT.next_key


class Recorder:
    """Records the training thread of one rank. Only that thread calls it, but for ``write_brief_steps`` and ``pending``."""

    def __init__(self, spool: Spool, kinds: CodeKinds) -> None:
        self.spool = spool
        spool.is_the_jobs = is_the_jobs
        self.kinds = kinds
        self.pid = os.getpid()
        self.step = 0
        active.record(full=True)
        self.full_since = 0
        """perf_counter_ns at which the recorded steps began of which this is one."""
        self.always_full = False
        """Set while the profiler window is near or open: its steps are recorded in full at any cost."""
        self.events: list[tuple[int, int, str]] = []
        self.marks: list[str] = []
        self.pending: list[str] = [_SCHEMA_LINE]
        """Lines to be written before the next step's."""
        self.lines: Lines = Lines(kinds, self.pending.append)
        self.calls = Calls(spool)
        self.heartbeat = Heartbeat(spool)
        self.brief_until = 0
        """Steps before this one may be brief: only the heartbeat's page has their times, until they are written to the log together."""
        self._written = 0
        """The first step that is not in the log."""
        self._writing: Any = RLock()
        """Held while lines are written. A handler of the job's may interrupt that, and end a step or save a checkpoint: its own thread
        then holds the lock."""
        self.thinning = Thinning()
        self.lost: list[tuple[int, int]] = []
        """First and last number of steps in a row for which there was no room; the last pair may span steps that had some."""
        self._more = [0, 0]
        self._saved = -1
        self._evaluations = [0, 0, 0]
        self._full_block = True
        self._trainings = self._describes_after = 0
        self.describe: Callable[[], None] | None = None
        """Called some steps after a training has begun, when its model is known."""
        self._block_start = self._block_cost_ns = self._block_full = self._block_first = 0
        """Of the block of steps in progress: when it began, what recording cost, how many steps were recorded in full, and its first."""
        self._times: ThreadTimes | None = None
        self._counters_mask = 1
        """They are read at the end of a step whose number has 0 or 1 in these bits."""
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
        """Record the calling thread from now on: the one that steps the optimizer is the training thread."""
        self._follow_thread()
        self.events.clear()
        self.write_brief_steps()  # the base of their times changes
        now = self.cut(perf_counter_ns())
        self.start_step((self.start_perf_ns, *now[1:]))

    def start_step(self, start: Cut) -> None:
        """The current step began at ``start``."""
        epoch, now = time_ns(), perf_counter_ns()
        self.epoch_of_zero = epoch - now
        """Epoch ns at which perf_counter_ns would have been 0."""
        self._start = start
        self.heartbeat.begin_step(self.step, start[_CLOCK] + self.epoch_of_zero)

    @property
    def start_perf_ns(self) -> int:
        """When the current step began, perf_counter_ns."""
        return self._start[_CLOCK]

    @property
    def evaluations(self) -> int:
        """Forwards without gradients in the current step, as far as they are recorded."""
        return self._evaluations[2]

    def record_all_events(self) -> None:
        """Record the current step, which has just begun, and those after it in full, until ``always_full`` is unset."""
        if not active.full:
            self.full_since = self.start_perf_ns
        self.always_full = True
        active.record(full=True)

    def record_as_at_first(self) -> None:
        """Record the next steps in full: they may be of another model. After the first few trainings, as the first ones of a job; after
        each further one only the rest of this block, so that a job of many trainings pays no more than another one."""
        if self._trainings < _MOST_TRAININGS:
            self._trainings += 1
            self.thinning.restart(self.step)
        self._full_block = True
        self._describes_after = 2
        if not active.full:
            self.full_since = perf_counter_ns()
            active.record(full=True)

    def add(self, start: int, duration: int, fields: str) -> None:
        """Append an event: perf_counter_ns, ns, and the inside of its JSON object, its kind first."""
        if len(self.events) < MOST_EVENTS:
            self.events.append((start, duration, fields))
        else:
            self.count(duration)

    def count(self, duration: int) -> None:
        """An event of which only the time is kept, ns."""
        self._more[0] += 1
        self._more[1] += duration

    def add_evaluation(self, start: int, duration: int) -> None:
        """A forward without gradients; those of a step become one event."""
        if not self._evaluations[2]:
            self._evaluations[0] = start
        self._evaluations[1] += duration
        self._evaluations[2] += 1

    def cut(self, at: int) -> Cut:
        """The thread's counters now, as of ``at``; -1 where unknown, or not read to save time."""
        if self._evaluations[2] or self._more[0]:
            self._fold()
        if self.step & self._counters_mask > 1:
            return at, len(self.events), -1, -1
        times = self._times.read_ns() if self._times is not None else None
        if times is not None:
            return at, len(self.events), *times
        return at, len(self.events), thread_time_ns(), -1

    def awake_ns(self) -> int:
        """How long, so far, the process has computed and its training thread waited for a CPU; -1 where unknown, or not read to
        save time: only in steps whose counters are read at both ends."""
        if self._times is None or not self._times.known or self.step & self._counters_mask != 1:
            return -1
        # All threads of the process: a batch may be made by others than the one that waits for it.
        computed_ns, times = process_time_ns(), self._times.read_ns()
        return -1 if times is None else computed_ns + times[1]

    def add_overhead(self, ns: int) -> None:
        """Count time that was spent on recording elsewhere than in ``end_step``."""
        self._block_cost_ns += ns

    def end_step(self, end: Cut) -> None:  # noqa: C901
        """Write the step that ended at ``end``; what came after that belongs to the next one. One that ends in a handler of the job's,
        which interrupts this, is part of this one."""
        # Called in every step, with the caches full of the model: each function that is called here costs some us.
        if self._writing._is_owned():
            return
        with self._writing:
            start, full, zero = self._start, active.full, self.epoch_of_zero
            if end[_CLOCK] < start[_CLOCK]:
                return  # such a step has ended before this was called
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
            # From here on nothing is called, which is where a handler of the job's may run, and raise: the step would be written twice.
            written, numbers = self._written, self.heartbeat.numbers
            if is_written:
                # The status thread may have added one since.
                del self.pending[:waiting]
            del self.marks[:], self.events[: end[1]]
            try:
                numbers[STEPS_AT + 1] = end[0] + zero
                # Steps that wait in the page have one base for all their times, also for the first one's start.
                numbers[ENDS_AT + (number & ENDS_MASK)] = end[0] + next_zero
                numbers[WRITTEN_AT] = numbers[STEPS_AT] = number
            except ValueError:  # the page is closed, which only the end of the recording does
                pass
            self.step = self._written = number
            self._start, self.epoch_of_zero = end, next_zero
            if not is_written:
                self._keep_definitions()
                self._note_lost(written, number - 1)
            if self.events:
                self._count_from(end[0] - start[0])
        if full:
            self._block_cost_ns += WHOLE_COST * (perf_counter_ns() - begun)
            self._block_full += 1
        if not number % BLOCK_STEPS:
            self._end_block(end[0])
        full = self._full_block or self.always_full
        if full is not active.full:
            active.record(full)

    def end_brief_step(self, at: int) -> bool:
        """As ``end_step``, for a step of which only the times are kept and which ended at perf_counter_ns ``at``: in the heartbeat's page
        at first. False, without doing anything, at the end of a block or if something else is to be written."""
        number = self.step + 1
        if (
            number >= self.brief_until
            or self.pending
            or self.events
            or self.marks
            or at < self._start[_CLOCK]
        ):
            return False
        numbers, end_ns = self.heartbeat.numbers, at + self.epoch_of_zero
        try:
            numbers[ENDS_AT + (number & ENDS_MASK)] = end_ns
            numbers[STEPS_AT + 1] = end_ns
            numbers[STEPS_AT] = number
        except ValueError:  # the page is closed, which only the end of the recording does
            return False
        self.step, self._start = number, (at, 0, -1, -1)
        return True

    def write_brief_steps(self) -> None:
        """Write the steps that only the heartbeat's page has. Called by the status thread, too, once a second."""
        if self._writing._is_owned():
            return
        with self._writing:
            # The training thread goes on meanwhile.
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
        if self._describes_after:
            self._describes_after -= 1
            if not self._describes_after and self.describe is not None:
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

    def _count_from(self, later_ns: int) -> None:
        """Shift the remaining events to a step that began so much later: its end was only known in hindsight."""
        self.events = [
            (
                begin,
                duration,
                _BASE.sub(lambda base: f"{EventField.FORWARD_END_NS.key}{int(base[1]) - later_ns}", fields),
            )
            for begin, duration, fields in self.events
        ]

    def _fold(self) -> None:
        if self._evaluations[2]:
            begin, duration, number = self._evaluations
            self.events.append((begin, duration, f"{_EVALUATIONS}{number}"))
            self._evaluations = [0, 0, 0]
        if self._more[0]:
            self.events.append((perf_counter_ns(), self._more[1], f"{_MORE}{self._more[0]}"))
            self._more = [0, 0]

    def _full_line(self, start: Cut, end: Cut) -> str:
        at, zero = start[_CLOCK], self.epoch_of_zero
        text = self._event_texts(start, end)
        marks = f'{_MARKS}["' + '","'.join(self.marks) + '"]' if self.marks else ""
        ran = end[_CPU] - start[_CPU] if start[_CPU] >= 0 and end[_CPU] >= 0 else "null"
        delay = end[_DELAY] - start[_DELAY] if start[_DELAY] >= 0 and end[_DELAY] >= 0 else "null"
        return (
            f"{_STEP}{self.step}{_TIME}[{at + zero},{end[_CLOCK] + zero}]{_CPU_NS}{ran}"
            f"{_DELAY_NS}{delay}{_EVENTS}[{text}]{marks}}}\n"
        )

    def _event_texts(self, start: Cut, end: Cut) -> str:
        """The events of the step as text, sorted by their start."""
        at = start[_CLOCK]
        events = self.events if end[1] >= len(self.events) else self.events[: end[1]]
        return ",".join(
            [
                f"{{{fields}{_START}{begin - at}{_DURATION}{duration}}}"
                for begin, duration, fields in sorted(events)
            ]
        )

    def flush_definitions(self) -> None:
        """Write pending definitions of source lines, so that calls already written can be resolved."""
        if self.pending:
            self.write_now("")

    def write_now(self, line: str) -> None:
        """Write a line outside of a step's end. In a handler of the job's that interrupts another line it is written with the next one."""
        self.pending.append(line)
        if self._writing._is_owned():
            return
        self.write_brief_steps()
        with self._writing:
            lines = list(self.pending)
            if self.spool.write(STEPS_FILE, "".join(lines).encode()):
                # Another thread may have added one meanwhile.
                del self.pending[: len(lines)]
            else:
                self._keep_definitions()

    def note_saved(self) -> None:
        """A checkpoint was saved in the current step."""
        if self._saved != self.step:
            self._saved = self.step
            self.write_now(f"{{{LineField.SAVED.key}{self.step}}}\n")

    def _note_lost(self, first: int, last: int) -> None:
        if self.lost and (self.lost[-1][1] == first - 1 or len(self.lost) == _MOST_LOST):
            self.lost[-1] = (self.lost[-1][0], last)
        else:
            self.lost.append((first, last))

    def _keep_definitions(self) -> None:
        """After a failed write, keep only those pending lines to which later steps refer."""
        self.pending[:] = [line for line in self.pending if line.startswith(_DEFINITIONS)]


def recording_here(recorder: Recorder | None) -> bool:
    """Whether this call, on this thread, is to be recorded."""
    return active.full and recorder is not None and recorder.thread == get_ident()


MOST_SHARE = 0.007
"""Of the step's time: above it, half as many steps are recorded in full."""
LEAST_SHARE = 0.003
"""Below it, twice as many."""
EARLY_STEPS, MANY_STEPS, LONG_STEPS = 512, 2048, 8192
"""After them both are smaller, by the factors below: there is enough for a diagnosis by then, and a long job pays for longer. Of
8192 steps of 20 ms five to eight hundred were recorded in full; a stall in one step of a hundred is among them five times."""
_FACTORS = ((LONG_STEPS, 32), (MANY_STEPS, 8), (EARLY_STEPS, 2))
"""Of steps of 20 ms, 270 to 340 us in full, one in 16 to 32 is recorded in full after many steps, and one in 64 in the long run."""
MOST_THINNED = 64
"""One block in so many at least: of ten thousand steps there are still some twenty blocks in full."""
BLOCK_STEPS = 8
"""Neighbouring steps that are recorded together: a step is measured from the end of the one before."""
MOST_BRIEF = 64
"""Steps of which only the times are kept are written together, up to so many: a line each would be the most expensive part of them.
With those that precede a full ``/dev/shm`` there must be no more than the heartbeat's page has."""
_WEIGHT = 1 / 2
"""Of the newest block, in the averages."""
_LEAST_RISE_NS = 4000.0
_MOST_RISE = 0.1
"""By one reading the estimate of the cost rises by this share of itself at most, or by so many ns where that is more."""
_MOST_TRAININGS = 8
"""Trainings of a process, each with a process group of its own, that are recorded like the first one: as many as are diagnosed."""
_SETTLE_STEPS = 32
"""Steps between two changes, and before the first: the first steps of a job are unlike the rest."""


class Thinning:
    """One block of steps in ``every`` is recorded in full: a power of two, so that ranks which thin differently share steps."""

    def __init__(self) -> None:
        self.every = 1
        self.step_ns = 0.0
        """What a step takes, averaged over the last blocks, ns."""
        self._cost_ns = 20_000.0
        self._first = 0
        self._next_change = _SETTLE_STEPS

    def restart(self, step: int) -> None:
        """Thin from ``step`` on as from the first step of a job."""
        self.every, self._first, self._next_change = 1, step, step + _SETTLE_STEPS

    @property
    def cost_us(self) -> float:
        """What recording one step in full costs the training thread, estimated, microseconds."""
        return round(self._cost_ns / 1000, 1)

    def next_block(self, step: int, cost_ns: int | None, step_ns: int) -> bool:
        """Whether the block that begins with ``step`` is to be recorded in full.

        Of the last block, ``cost_ns`` is what recording a step of it in full cost, None where there was none, and ``step_ns``
        what a step of it took.
        """
        if cost_ns is not None:
            # The clock runs on while another process has the core: a long reading moves the average only a little.
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
        """How many steps come before the next block in full, counted from ``step``; 0 within such a block."""
        cycle = BLOCK_STEPS * self.every
        into = step % cycle
        return 0 if into < BLOCK_STEPS else cycle - into
