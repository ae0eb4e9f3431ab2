"""Records what a data loader worker does, in the worker's process, if the rank that started it is recorded.

The main thread counts batches and the time to prepare them. A thread, started after the first batch, samples the lines at which the
next ones are prepared, and writes both to the rank's spool. It is a daemon thread and waits only for its next sample, so it does
not delay the end of the worker.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from threading import get_ident
from time import perf_counter_ns
from types import CodeType
from typing import Any, NamedTuple

from ...rundir.spool import append_lines, recorded_s, spool_of_process
from ...rundir.stepevents import HELD_NS, WorkerField
from ..guard import part
from ..job import CodeKinds, Lines, tensor_bytes
from ..patching import guarded
from ..recording import ThreadTimes
from .sampler import EARLY_S, GilWait, Place, can_be_read, stack_of

MEAN_PERIOD_S = 0.1
"""Mean seconds between two samples at the beginning of a recording. A sample takes 0.3 ms of CPU time."""
_WORKERS_AT_FULL_RATE = 2
"""Workers of a loader that are sampled at the full rate. More workers share that rate, because they mostly run the same code."""
_SAMPLES_PER_WRITE = 8
_WRITE_S = 1.0
"""Minimum seconds between two writes. What is not yet written is lost if the worker is killed."""
_CHECK_INTERVALS_S = (1.0, 60.0)
"""Seconds between checks whether the rank is recorded: first value and maximum; doubled each time."""
_END_S = 0.05
"""Seconds that a worker's end waits for a write in progress."""
_PART = part("data loader workers")


class _Counts(NamedTuple):
    """Totals of the worker so far."""

    batches: int = 0
    preparing_ns: int = 0
    squares_ms2: float = 0.0
    bytes: int | None = 0
    cpu_ns: int = 0
    run_delay_ns: int = 0


def _added(size: int | None, batch: Any) -> int | None:
    """``size`` and the bytes of a batch; None if one is unknown."""
    if size is None:
        return None
    try:
        own = tensor_bytes(batch)
    except Exception:
        return None
    return None if own is None else size + own


class WorkerRecorder:
    """The recording of this worker process. Constructed on the main thread."""

    def __init__(self, root: str, fetches: list[CodeType]) -> None:
        """``root`` is the folder with the run's spools. ``fetches`` are torch's code objects that prepare a batch."""
        self._root, self._fetches = root, fetches
        self._pid, self._thread_id = os.getpid(), get_ident()
        self._times = ThreadTimes()
        self._sleep_detector = _SleepDetector()
        self._state: tuple[int, int, float, int | None, int] = 0, 0, 0.0, 0, 0
        """Batches, ns of preparing them, squares of their ms, bytes of their tensors (None once those of one are unknown), and the start of
        the batch in progress by the performance counter, or 0. The first batch is not counted."""
        self._written = _Counts()
        self._is_first = True
        self._began_ns = 0
        self._samples: list[tuple[int, int, int, int, int]] = []
        self._pending: list[str] = []
        self._lines: Lines | None = None
        self._spool: str | None = None
        self._next_check_s, self._check_interval_s = 0.0, _CHECK_INTERVALS_S[0]
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._random = random.Random()
        self._worker, self._workers = 0, 1

    def before(self, args: Any, kwargs: Any) -> bool:
        """Handle the start of a batch."""
        if self._thread is None and not self._is_first:
            self._start_if_recorded()
        # One tuple, because another thread reads it.
        self._state = (*self._state[:4], perf_counter_ns())
        return True

    def after(self, token: bool, result: Any) -> None:
        """Handle the end of a batch, or of the iteration."""
        batches, preparing_ns, squares_ms2, size, since_ns = self._state
        took_ns = perf_counter_ns() - since_ns
        if self._is_first:
            # The first batch opens files, imports modules and fills caches.
            self._is_first = False
        else:
            if not isinstance(result, BaseException):
                batches += 1
                size = _added(size, result)
            preparing_ns += took_ns
            squares_ms2 += (took_ns / 1e6) ** 2
        self._state = batches, preparing_ns, squares_ms2, size, 0

    def _totals(self) -> _Counts:
        """Totals up to now, including the batch in progress."""
        batches, preparing_ns, squares_ms2, size, since_ns = self._state
        if since_ns:
            preparing_ns += perf_counter_ns() - since_ns
        # Outside of batches the main thread uses hardly any CPU time.
        return _Counts(batches, preparing_ns, squares_ms2, size, *(self._times.read_ns() or (0, 0)))

    def _start_if_recorded(self) -> None:
        """Start the thread if the parent process is recorded now."""
        now_s = time.monotonic()
        if now_s < self._next_check_s:
            return
        self._next_check_s = now_s + self._check_interval_s
        self._check_interval_s = min(2 * self._check_interval_s, _CHECK_INTERVALS_S[1])
        parent = multiprocessing.parent_process()
        pid = None if parent is None else parent.pid
        self._spool = None if pid is None else spool_of_process(self._root, pid)
        if self._spool is None:
            return
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        if info is not None:
            self._worker, self._workers = info.id, info.num_workers
        self._began_ns, self._written = time.time_ns(), self._totals()
        self._thread = threading.Thread(
            target=guarded(_PART, self._run), name="ddpdoctor-worker", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        self._pending, self._samples = [], []
        self._lines = Lines(CodeKinds(), self._pending.append)
        gil_wait = GilWait()
        readable = can_be_read()
        try:
            while not _PART.off:
                period_s = self._period_s()
                pause_s = period_s * (0.5 + self._random.random())
                wanted_ns = time.monotonic_ns() + int(1e9 * pause_s)
                if self._stop.wait(pause_s):
                    return
                held_ns = gil_wait.ns(wanted_ns)
                if readable and self._state[4]:
                    self._sample(held_ns)
                if time.time_ns() - self._began_ns >= 1e9 * max(_WRITE_S, _SAMPLES_PER_WRITE * period_s):
                    self.write()
        except OSError:
            self._thread = None  # the rank's recording has ended; there may be a new one
        finally:
            gil_wait.close()

    def _period_s(self) -> float:
        """Mean seconds between two samples, chosen so that their number grows with the logarithm of the recording's age."""
        assert self._spool is not None
        age = max(1.0, recorded_s(self._spool) / EARLY_S)
        return MEAN_PERIOD_S * age * max(1.0, self._workers / _WORKERS_AT_FULL_RATE)

    def _sample(self, held_ns: int) -> None:
        assert self._lines is not None
        stack = self._inside_fetch(stack_of(self._thread_id))
        # A thread waiting for the GIL wakes up when this one releases it for the read, and counts as running.
        sleeps = self._sleep_detector.read()
        if not stack:
            return
        leaf = self._lines.id_of(*stack[0])
        user = self._lines.of_stack(stack)
        if leaf is not None:
            held_ns = held_ns if held_ns >= HELD_NS else 0
            row = (time.time_ns(), leaf if user is None else user, leaf, int(sleeps and not held_ns), held_ns)
            self._samples.append(row)

    def _inside_fetch(self, stack: list[Place]) -> list[Place]:
        """The part of a stack from torch's fetch function inwards. In a forked worker, the outer frames are the rank's."""
        for place, (code, _) in enumerate(stack):
            if any(code is fetch for fetch in self._fetches):
                return stack[: place + 1]
        return []

    def write(self) -> None:
        """Write the data since the last call. Raises OSError if the rank's spool is gone."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        assert self._spool is not None
        counts, now_ns = self._totals(), time.time_ns()
        if counts[:2] == self._written[:2]:
            self._began_ns = now_ns
            return
        before, samples, pending = self._written, self._samples[:], self._pending[:]
        known = self._times.known
        rows = ",".join(
            [f"[{at - self._began_ns},{user},{leaf},{asleep}]" for at, user, leaf, asleep, _ in samples]
        )
        held = ",".join([str(held_ns) for *_, held_ns in samples])
        line = (
            f"{{{WorkerField.PROCESS.key}{self._pid}{WorkerField.WORKER.next_key}{self._worker}"
            f"{WorkerField.WORKERS.next_key}{self._workers}"
            f"{WorkerField.SPAN_NS.next_key}[{self._began_ns},{now_ns}]"
            f"{WorkerField.BATCHES.next_key}{counts.batches - before.batches}"
            f"{WorkerField.PREPARING_NS.next_key}{max(0, counts.preparing_ns - before.preparing_ns)}"
            f"{WorkerField.SQUARES_MS2.next_key}{counts.squares_ms2 - before.squares_ms2:.6g}"
            f"{WorkerField.BYTES.next_key}{'null' if counts.bytes is None else counts.bytes - (before.bytes or 0)}"
            f"{WorkerField.CPU_NS.next_key}{max(0, counts.cpu_ns - before.cpu_ns) if known else 'null'}"
            f"{WorkerField.RUN_DELAY_NS.next_key}{max(0, counts.run_delay_ns - before.run_delay_ns) if known else 'null'}"
            f"{WorkerField.SAMPLES.next_key}[{rows}]{WorkerField.HELD.next_key}[{held}]}}\n"
        )
        of_process = f"{WorkerField.PROCESS.next_key}{self._pid}}}\n"
        defined = "".join([each.rstrip()[:-1] + of_process for each in pending])
        if append_lines(self._spool, f"{defined}{line}".encode()):
            del self._pending[: len(pending)]
            self._written, self._began_ns = counts, now_ns
        del self._samples[: len(samples)]

    def finish(self) -> None:
        """Write the remaining data at the worker's end, unless the thread is still writing. Does nothing in a process forked by the
        worker."""
        if os.getpid() != self._pid:
            return
        self._stop.set()
        if self._thread is not None and not _PART.off and self._lock.acquire(timeout=_END_S):
            try:
                self._write()
            except OSError:
                pass  # the rank's spool is gone
            finally:
                self._lock.release()


class _SleepDetector:
    """Tells whether the thread that created it sleeps: waits for a file, another process or time, and needs no CPU."""

    def __init__(self) -> None:
        try:
            path = f"/proc/self/task/{threading.get_native_id()}/stat"
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._handle = -1

    def read(self) -> bool:
        """Whether the thread sleeps; False if the system does not report it."""
        if self._handle < 0:
            return False
        try:
            state = os.pread(self._handle, 512, 0).rpartition(b")")[2].split()[0]
        except (OSError, IndexError):
            self._handle = -1
            return False
        return state in (b"S", b"D")
