"""Now and then, the source line at which the training thread is: what names the user's own slow code."""

from __future__ import annotations

import random
import threading
import time
from typing import List, Optional, Tuple

from ...rundir import SAMPLES_FILE, LineField
from ..guard import part
from ..job import Lines
from ..patching import guarded
from ..recording import Session, active
from .stacks import can_be_read, stack_of

MEAN_PERIOD_S = 0.06
"""Drawn anew each time from the half to the one and a half of it, so that it cannot run in step with the training loop."""
EARLY_S = 30.0
"""After it the period is ``LATER`` times as long, on all ranks alike, for their samples are compared: there are some
hundreds by then, and each costs 0.1 to 0.2 ms of CPU time, with the caches full of the model's data.
"""
LATER = 4
"""Times as long as ``MEAN_PERIOD_S``, after ``EARLY_S``."""
BATCH_S = 1.0
"""Between two writes: a line a second. What a killed process had not written is lost."""
_END_S = 0.5
"""More than a look at a stack takes, unless the thread is given no CPU."""
_PART = part("sampling of source lines")


class Sampler:
    """A thread that looks at the training thread's stack, without stopping it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._pending: List[str] = []
        self._lines = Lines(session.recorder.kinds, self._pending.append)
        self._samples: List[Tuple[int, int, int]] = []
        self._since = time.monotonic()
        self._thread = threading.Thread(
            target=guarded(_PART, self._run), name="ddpdoctor-sampler", daemon=True
        )
        self._random = random.Random(session.rank)
        self._early_until = time.monotonic() + EARLY_S
        self._last_step = -1

    def start(self) -> None:
        """Start the thread, where this Python lets it."""
        if can_be_read():
            self._thread.start()

    def _run(self) -> None:
        while not _PART.off and not self._stop.wait(self._pause_s()):
            try:
                if self._is_of_use():
                    self._sample()
                if time.monotonic() - self._since >= BATCH_S:
                    self.write_out()
            except Exception as error:
                try:
                    _PART.failed(error)
                except Exception:
                    return

    def _pause_s(self) -> float:
        later = 1 if time.monotonic() < self._early_until else LATER
        return later * MEAN_PERIOD_S * (0.5 + self._random.random())

    def _is_of_use(self) -> bool:
        """Whether the step is one whose events tell what a sample is of. In one that goes on since the last look the thread may
        hang, and the sample will tell where."""
        step, last = self._session.recorder.step, self._last_step
        self._last_step = step
        return active.full or step == last

    def _sample(self) -> None:
        stack = stack_of(self._session.recorder.thread)
        now = time.time_ns()
        if not stack:
            return
        leaf = self._lines.id_of(*stack[0])
        user: Optional[int] = self._lines.of_stack(stack)
        if leaf is not None:
            with self._lock:
                self._samples.append((now, leaf if user is None else user, leaf))

    def write_out(self, deadline_s: Optional[float] = None) -> None:
        """Write the samples since the last call; not where the thread, which may not be given a CPU, still does so at
        ``deadline_s``, monotonic."""
        patience_s = -1.0 if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        if not self._lock.acquire(timeout=patience_s):
            return
        try:
            samples, self._samples = self._samples, []
            pending = "".join(self._pending)
            self._pending.clear()
            self._since = time.monotonic()
            if samples:
                first = samples[0][0]
                rows = ",".join([f"[{at - first},{user},{leaf}]" for at, user, leaf in samples])
                pending += f"{{{LineField.TIME_NS.key}{first}{LineField.SAMPLES.next_key}[{rows}]}}\n"
            if pending:
                self._session.spool.write(SAMPLES_FILE, pending.encode())
        finally:
            self._lock.release()

    def stop(self, deadline_s: float) -> None:
        """End the thread; it is waited for until ``deadline_s``, monotonic."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=max(0.0, min(_END_S, deadline_s - time.monotonic())))
