"""Samples the source line that the training thread executes, to identify slow user code. Also reads the stack of another thread.

In CPython 3.11 and newer, a frame is part of its thread's own stack, and a frame object is created for it on demand. A thread that
requests one for another thread must not be interrupted: when the other thread continues, the frame may end and its memory be
reused. For that reason, profilers that walk ``sys._current_frames()`` in a Python loop crash the process in rare cases
(https://github.com/DataDog/dd-trace-py/issues/13567, https://github.com/getsentry/sentry-python/issues/6119).

A thread can lose the GIL between any two bytecodes of such a loop, but not inside a call of a C function, with one exception:
creating a frame object can start the garbage collector, whose destructors and ``gc.callbacks`` may release the GIL. So a single
call into C disables the collector, finds the thread's frames, walks and reads them, drops them (so that no object of the job is
destroyed in this thread), and enables the collector again if it was enabled. No other code can observe that it was disabled.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice, repeat, takewhile
from operator import attrgetter, methodcaller
from types import CodeType, FrameType
from typing import Any

from ...rundir import SAMPLES_FILE
from ...rundir.stepevents import HELD_NS, LineField
from ..guard import part
from ..job import MOST_FRAMES, Lines
from ..patching import guarded
from ..recording import Session, ThreadTimes, active

MEAN_PERIOD_S = 0.06
"""Mean period, s. Each period is drawn at random between 0.5 and 1.5 times this, so that it does not coincide with the period of
the training loop."""
EARLY_S = 30.0
"""Seconds after which the period is multiplied by ``LATER_FACTOR``, on all ranks, because their samples are compared. There are some
hundreds of samples by then. A sample costs 0.1 to 0.2 ms of CPU time when the caches hold the model's data."""
LATER_FACTOR = 4
"""Factor of ``MEAN_PERIOD_S`` after ``EARLY_S``."""
MOST_PAUSE_S = 0.5
"""Longest wait, s, during the first ``EARLY_S``; later twice that, or until the status thread reports a step that lasts, if it runs.
Waking up costs as much as a sample and is useless while no step is recorded in full, but a step that lasts twice this long is always
sampled."""
DENSE_EVERY_S = 1.0
"""Minimum seconds between two densely sampled steps, ``LATER_FACTOR`` times as many after ``EARLY_S``. A step is sampled densely if a
sample came late."""
DENSE_PERIOD_S = 0.0007
"""Seconds between two attempts of dense sampling. An attempt that takes no sample costs 10 to 20 us of CPU time, a tenth of a
sample."""
MOST_ATTEMPTS = 64
"""Upper limit of the attempts in such a step. They cost as much as ``MOST_ATTEMPTS / ATTEMPTS_PER_SAMPLE`` samples; so many are then
skipped."""
ATTEMPTS_PER_SAMPLE = 8
BATCH_S = 1.0
"""Minimum seconds between two writes. Samples not yet written are lost if the process is killed."""
_MOST_BLOCKS = 64
"""Upper limit of the blocks of full steps that may pass without a sample."""
_END_S = 0.5
"""Seconds to wait for the thread at the end. Reading a stack takes less, unless the thread gets no CPU."""
_PART = part("sampling of source lines")


Sample = tuple[int, int, int, int]
"""Epoch ns, number of the user's line, number of the innermost line, and ns that this thread waited for the GIL."""


class GilWait:
    """Measures how long the thread that created it waits for the GIL when it wakes up."""

    def __init__(self) -> None:
        self._times = ThreadTimes()
        self._no_cpu_ns = 0
        self._no_cpu_ns = self._read_no_cpu_ns()

    def ns(self, wanted_ns: int) -> int:
        """How long this thread, which was due at ``wanted_ns`` (monotonic), waited for the GIL and not for a CPU, ns."""
        late_ns = time.monotonic_ns() - wanted_ns
        before, self._no_cpu_ns = self._no_cpu_ns, self._read_no_cpu_ns()
        return max(0, late_ns - (self._no_cpu_ns - before))

    def _read_no_cpu_ns(self) -> int:
        """Total time that this thread was runnable without a CPU, ns; 0 if the system does not report it."""
        times = self._times.read_ns()
        return self._no_cpu_ns if times is None else times[1]

    def close(self) -> None:
        """Close the file with the thread's times."""
        self._times.close()


class Sampler:
    """A thread that samples the training thread's stack, without stopping it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.is_told = False
        """Whether the status thread calls ``step_lasts``."""
        self._wake = threading.Event()
        self._stopped = self._waits_long = False
        self._lasting_step = -1
        self._lock = threading.Lock()
        self._pending: list[str] = []
        self._lines = Lines(session.recorder.kinds, self._pending.append)
        self._samples: list[Sample] = []
        self._dense_samples: list[Sample] = []
        self._dense_ns = 0
        self._not_dense_until_s = 0.0
        self._samples_to_skip = 0
        self._gil_wait: GilWait | None = None
        self._since = time.monotonic()
        self._thread = threading.Thread(
            target=guarded(_PART, self._run), name="ddpdoctor-sampler", daemon=True
        )
        self._random = random.Random(session.rank)
        self._early_until = time.monotonic() + EARLY_S
        self._last_step = -1
        self._until_sample_s = 0.0
        """Seconds left until the next sample, after the current wait."""

    def start(self) -> None:
        """Start the thread, if this Python can read other threads' stacks."""
        if can_be_read():
            self._thread.start()

    def _run(self) -> None:
        self._gil_wait = GilWait()
        try:
            self._take_samples()
        finally:
            self._gil_wait.close()

    def _take_samples(self) -> None:
        while not _PART.off:
            pause_s = self._pause_s()
            wanted_ns = time.monotonic_ns() + int(1e9 * pause_s)
            if self._wake.wait(pause_s):
                if self._stopped:
                    return
                self._wake.clear()
                now_ns = time.monotonic_ns()
                self._until_sample_s += max(0, wanted_ns - now_ns) / 1e9
                wanted_ns = now_ns
            try:
                if self._should_sample():
                    self._sample(wanted_ns)
                if (self._samples or self._dense_ns) and time.monotonic() - self._since >= BATCH_S:
                    self.write_out()
            except Exception as error:
                try:
                    _PART.failed(error)
                except Exception:
                    return

    def _pause_s(self) -> float:
        if self._until_sample_s <= 0.0:
            self._until_sample_s = self._until_next_s()
        pause_s = self._until_sample_s
        if self._period_factor() == 1:
            pause_s = min(pause_s, MOST_PAUSE_S)
        elif not self.is_told:
            pause_s = min(pause_s, 2 * MOST_PAUSE_S)
        self._waits_long = pause_s > 2 * MOST_PAUSE_S
        self._until_sample_s -= pause_s
        return pause_s

    def step_lasts(self, step: int) -> None:
        """Take a sample now if ``step``, which has lasted for a second, still lasts and none is due soon. Called by the status
        thread."""
        if self._waits_long:
            self._lasting_step = step
            self._wake.set()

    def _until_next_s(self) -> float:
        skipped, self._samples_to_skip = self._samples_to_skip, 0
        pause_s = self._period_factor() * MEAN_PERIOD_S * (0.5 + self._random.random() + skipped)
        recorder = self._session.recorder
        step_s = recorder.thinning.step_ns / 1e9
        if recorder.always_full or recorder.thinning.every == 1 or not step_s:
            return pause_s
        # A sample in a step that is not recorded in full is useless. The schedule continues in the next full steps.
        period = pause_s / step_s
        begun = recorder.step + min(
            1.0, (time.perf_counter_ns() - recorder.start_perf_ns) / recorder.thinning.step_ns
        )
        at = begun + period
        for _ in range(_MOST_BLOCKS):
            between = recorder.thinning.until_full(int(at))
            if not between:
                break
            at = int(at) + between + period * self._random.random()
        return (at - begun) * step_s

    def _period_factor(self) -> int:
        return 1 if time.monotonic() < self._early_until else LATER_FACTOR

    def _should_sample(self) -> bool:
        """Whether a sample is due in a full step, or the step lasts: it is the same as at the last wake-up, or the status thread has
        reported it. The rank may hang in it, and the sample shows where."""
        step, lasting = self._session.recorder.step, (self._last_step, self._lasting_step)
        self._last_step = step
        return (active.full and self._until_sample_s <= 0.0) or step in lasting

    def _sample(self, wanted_ns: int) -> None:
        """Take a sample that was due at ``wanted_ns``, monotonic. If it came late, sample the rest of the step densely."""
        held_ns = self._gil_wait_ns(wanted_ns)
        sample = self._take_sample(held_ns)
        if sample is not None:
            with self._lock:
                self._samples.append(sample)
        if held_ns >= HELD_NS and time.monotonic() >= self._not_dense_until_s:
            self._not_dense_until_s = time.monotonic() + self._period_factor() * DENSE_EVERY_S
            self._sample_densely()

    def _take_sample(self, held_ns: int) -> Sample | None:
        stack = stack_of(self._session.recorder.thread)
        now = time.time_ns()
        if not stack:
            return None
        leaf = self._lines.id_of(*stack[0])
        user: int | None = self._lines.of_stack(stack)
        return None if leaf is None else (now, leaf if user is None else user, leaf, held_ns)

    def _sample_densely(self) -> None:
        """Request the GIL repeatedly during one step, and take a sample each time another thread holds it.

        A thread that runs Python holds the GIL until it calls something that releases it, or until another thread has waited for 5
        ms. Of the samples requested at a random time during 6 ms of Python work, only one in six is taken within it; the others are
        taken after it. A thread that already waits when the work begins samples it every time.
        """
        recorder = self._session.recorder
        step_ns = int(recorder.thinning.step_ns)
        begun = last = time.monotonic_ns()
        attempts = 0
        while attempts < MOST_ATTEMPTS and last - begun < step_ns and active.full and not self._stopped:
            wanted_ns = last + int(1e9 * DENSE_PERIOD_S)
            time.sleep(DENSE_PERIOD_S)
            attempts += 1
            held_ns = self._gil_wait_ns(wanted_ns)
            sample = self._take_sample(held_ns) if held_ns >= HELD_NS else None
            if sample is not None:
                with self._lock:
                    self._dense_samples.append(sample)
            last = time.monotonic_ns()
        with self._lock:
            self._dense_ns += last - begun
        self._samples_to_skip += attempts // ATTEMPTS_PER_SAMPLE

    def _gil_wait_ns(self, wanted_ns: int) -> int:
        return 0 if self._gil_wait is None else self._gil_wait.ns(wanted_ns)

    def write_out(self, deadline_s: float | None = None) -> None:
        """Write the samples taken since the last call. Skipped if the thread is still writing at ``deadline_s``, monotonic, because
        it gets no CPU."""
        timeout_s = -1.0 if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        if not self._lock.acquire(timeout=timeout_s):
            return
        try:
            samples, self._samples = self._samples, []
            dense, self._dense_samples = self._dense_samples, []
            dense_ns, self._dense_ns = self._dense_ns, 0
            # The sampling thread may add lines in the meantime.
            count = len(self._pending)
            pending = "".join(self._pending[:count])
            del self._pending[:count]
            self._since = time.monotonic()
            if samples:
                pending += f"{_rows(samples, LineField.SAMPLES)}}}\n"
            if dense_ns:
                pending += f"{_rows(dense, LineField.CLOSER)}{LineField.LOOKED_NS.next_key}{dense_ns}}}\n"
            if pending:
                self._session.spool.write(SAMPLES_FILE, pending.encode())
        finally:
            self._lock.release()

    def stop(self, deadline_s: float) -> None:
        """End the thread; wait for it until ``deadline_s``, monotonic."""
        self._stopped = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=max(0.0, min(_END_S, deadline_s - time.monotonic())))


def _rows(samples: Sequence[Sample], field: LineField) -> str:
    """The beginning of a line with these samples; it lacks the closing brace."""
    first = samples[0][0] if samples else time.time_ns()
    rows = ",".join([f"[{at - first},{user},{leaf}]" for at, user, leaf, _ in samples])
    held = ",".join([str(held_ns if held_ns >= HELD_NS else 0) for _, _, _, held_ns in samples])
    return f"{{{LineField.TIME_NS.key}{first}{field.next_key}[{rows}]{LineField.HELD.next_key}[{held}]"


_DEADLOCKS = ((3, 11, 0), (3, 11, 5))
"""First affected and first fixed version in which ``sys._current_frames`` may deadlock
(https://github.com/python/cpython/issues/106883)."""
_place: Any = attrgetter("f_code", "f_lineno")
_run: Any = methodcaller("__call__")
_RESTORE_COLLECTOR = (gc.isenabled, gc.enable)
"""Functions that leave the collector disabled or enable it, indexed by whether it was enabled."""

Place = tuple[CodeType, int]


def can_be_read() -> bool:
    """Whether other threads' stacks can be read safely in this Python."""
    locked = getattr(sys, "_is_gil_enabled", lambda: True)()
    return bool(locked) and not _DEADLOCKS[0] <= sys.version_info[:3] < _DEADLOCKS[1]


def stack_of(thread: int) -> list[Place]:
    """Code and line of each frame of a thread, innermost first; empty if the thread has ended."""
    frames: list[FrameType] = []
    places: list[Place] = []
    done: list[Any] = []
    innermost: Iterator[Any] = map(methodcaller("get", thread), iter(sys._current_frames, None))
    # The list grows by the callers of the frames already in it. The outermost frame's caller is None, which ends the
    # walk.
    walk = chain(islice(innermost, 1), map(getattr, frames, repeat("f_back"), repeat(None)))
    deepest = islice(takewhile(bool, walk), MOST_FRAMES)
    before = map(_RESTORE_COLLECTOR.__getitem__, map(_run, (gc.isenabled,)))
    reading = (
        gc.disable,
        partial(frames.extend, deepest),
        partial(places.extend, map(_place, frames)),
        frames.clear,
    )
    try:
        done.extend(chain(before, map(_run, chain(reading, islice(done, 1)))))
    except BaseException:
        if done:
            done[0]()
        raise
    return places
