"""The thread that writes the rank's status, answers requests, and samples the memory of the rank's tensors on its device.

torch's caching allocator keeps its counters on the host, so reading them involves no device and no wait. They are read once a
second at a random time, so that the samples cover each phase of the step, even if all steps have equal length. Peaks are torch's
own, since the start or the job's last reset. They are never reset here, because the job may read them, too.
"""

from __future__ import annotations

import os
import random
import resource
import threading
import time
from typing import Any

from ...rundir import (
    ENDING_FILE,
    FAULTS_FILE,
    HANG_FLIGHT_FILE,
    MEMORY_FILE,
    MEMORY_SCHEMA,
    PROGRESS_FILE,
    STACKS_FILE,
    STACKS_QUESTION,
    STANDING_FILE,
    encoded,
)
from ...rundir.calls_page import CALLS_PAGE
from ...rundir.requests import request_in
from ...rundir.stepevents import LineField
from ...rundir.stops import ENDING_SCHEMA, PROGRESS_SCHEMA, STANDING_SCHEMA, End
from .. import environment
from ..guard import part
from ..job import job_torch
from ..patching import guarded
from ..profiling import Captures
from ..recording import Session
from .faults import Faults, reserve_signal
from .rank_status import RankStatus, exception_documents, flight, phase_of, uncaught_exception

PERIOD_S = 1.0
"""Seconds between two checks. A check costs 30 to 100 us, at most 0.01 %."""
_END_S = 0.2
"""Seconds to wait for the thread at the end; more than one check takes."""
_THIS_THREAD = getattr(resource, "RUSAGE_THREAD", None)
_PART = part("watching for hangs")


SAMPLES_PER_INTERVAL = 600
"""Samples after which the interval doubles. Ten minutes show a leak in a short job; a line of 200 bytes per second would be 17 MB a
day."""
_MEMORY_PART = part("device memory")


class DeviceMemory:
    """Samples the device memory of one recording."""

    def __init__(self, session: Session, status: RankStatus) -> None:
        self._session, self._status = session, status
        self._calls = self._looks = 0
        self._every = 1
        self.look = guarded(_MEMORY_PART, self._look)
        """Call once a second, always on the same thread."""

    @property
    def is_device_used(self) -> bool:
        """Whether the job has used a device."""
        devices = self._session.devices
        return devices is not None and devices.device is not None

    def _look(self) -> None:
        devices = self._session.devices
        if devices is None or devices.device is None:
            return
        self._calls += 1
        if self._calls % self._every:
            return
        lines = [encoded(self._now(devices.device))]
        if not self._looks:
            total = job_torch().cuda.get_device_properties(devices.device).total_memory
            head = {"schema": MEMORY_SCHEMA, "device": f"cuda:{devices.device}", "total_bytes": total}
            lines.insert(0, encoded(head))
        self._looks += 1
        if not self._looks % SAMPLES_PER_INTERVAL:
            self._every *= 2
        self._session.spool.write(MEMORY_FILE, b"".join(line + b"\n" for line in lines))

    def _now(self, device: int) -> dict[str, Any]:
        phase = self._status.phase()
        # By number, because the current device differs between threads.
        counters = job_torch().cuda.memory_stats_as_nested_dict(device)
        allocated, reserved = (counters[f"{kind}_bytes"]["all"] for kind in ("allocated", "reserved"))
        return {
            "t_ns": time.time_ns(),
            "step": self._session.recorder.step,
            "phase": None if phase is None else phase.value,
            "allocated_bytes": allocated["current"],
            "reserved_bytes": reserved["current"],
            "allocated_peak_bytes": allocated["peak"],
            "reserved_peak_bytes": reserved["peak"],
            "retries": counters.get("num_alloc_retries"),
        }


class StatusThread:
    """The status thread of one recording."""

    def __init__(self, session: Session, captures: Captures) -> None:
        """``captures`` are the requested profiler windows."""
        self._session = session
        self._captures = captures
        self._status = RankStatus(session)
        self._memory = DeviceMemory(session, self._status)
        # A separate generator, so that the job's random numbers do not change.
        self._random = random.Random(session.rank)
        self._after_s = environment.hang_after_s(os.environ)
        self._stop = threading.Event()
        self._faults: Faults | None = None
        self._answered = self._stacks_answered = 0
        self._raised = self._published = False
        self._last_step = self._evaluated = -1
        self._trained = False
        """Whether a model was seen in training mode."""
        self._thread = threading.Thread(
            target=guarded(_PART, self._run), name="ddpdoctor-status", daemon=True
        )

    def start(self) -> None:
        """Start the thread if hang detection is on."""
        if self._after_s:
            reserve_signal()
            self._thread.start()

    def _run(self) -> None:
        handle = self._session.spool.open_text(FAULTS_FILE)
        self._faults = Faults(handle)
        heartbeat, spool, captures = self._session.recorder.heartbeat, self._session.spool, self._captures
        look, answer_stacks, follow = (
            guarded(_PART, each) for each in (self._look, self._answer_stacks, captures.handle_requests)
        )
        self._tells_sampler(True)
        try:
            while not (self._stop.is_set() or _PART.off):
                self._faults.look()
                heartbeat.set_signal(self._faults.signal)
                if self._is_stopped_within_period():
                    break
                look()
                # A request is a file. If the directory has not changed, there is no new request.
                if spool.directory_changed() or captures.under_way:
                    answer_stacks()
                    follow()
        finally:
            # Without this thread, the launcher must not expect an answer to the signal.
            heartbeat.set_signal(0)
            self._faults.stop()
            self._tells_sampler(False)

    def _tells_sampler(self, whether: bool) -> None:
        services = self._session.services
        if services is not None:
            services.sampler.is_told = whether

    def _is_stopped_within_period(self) -> bool:
        """Wait for one period, and sample the device's memory at a random time of it. Returns whether the thread is to stop."""
        before_s = 0.0
        if self._memory.is_device_used:
            before_s = PERIOD_S * self._random.random()
            if self._stop.wait(before_s):
                return True
            self._memory.look()
        return self._stop.wait(PERIOD_S - before_s)

    def _look(self) -> None:
        if not self._raised and uncaught_exception() is not None:
            self._raised = True
            self.write_end_status()
        step = self._session.recorder.step
        # Readers that follow the log see each step within a second, even if the next full step is far off.
        self._session.recorder.write_brief_steps()
        if step == self._last_step:
            services = self._session.services
            if services is not None:
                services.sampler.step_lasts(step)
            document = self._status.document(PROGRESS_SCHEMA)
            self._note_evaluation(step, document["evaluating"])
            self._published = True
            self._keep(PROGRESS_FILE, encoded(document))
            self._answer(request_in(self._session.spool.directory))
        elif self._published:
            self._published = False
            self._withdraw(PROGRESS_FILE)
        if step != self._last_step:
            self._trained = self._trained or not self._status.evaluates()
        self._last_step = step

    def _keep(self, name: str, data: bytes) -> None:
        """Write a file of the spool and count it in the heartbeat; does nothing if the spool is full or removed."""
        try:
            self._session.spool.keep(name, data)
        except OSError:
            return  # the spool is full or removed; the heartbeat then shows no answer
        faults = resource.getrusage(_THIS_THREAD).ru_minflt if _THIS_THREAD is not None else 0
        self._session.recorder.heartbeat.report_written(len(data), faults)

    def _withdraw(self, name: str) -> None:
        try:
            self._session.spool.withdraw(name)
        except OSError:
            pass  # the spool is gone

    def _note_evaluation(self, step: int, evaluating: bool) -> None:
        """Write to the step log that the job evaluates. Nothing else shows it in a step of which only the times are kept, or if the
        job calls the module inside DDP. A job that always trains in evaluation mode does not count as evaluating."""
        if evaluating and self._trained and step != self._evaluated:
            self._evaluated = step
            self._session.recorder.pending.append(f"{{{LineField.EVALUATED.key}{step}}}\n")
        self._trained = self._trained or not evaluating

    def _answer_stacks(self) -> None:
        """Answer a request for stacks (``ddpdoctor stacks``), which may arrive while the job makes progress."""
        request = request_in(self._session.spool.directory, STACKS_QUESTION)
        if request and request != self._stacks_answered:
            document = self._status.with_all_stacks(STANDING_SCHEMA)
            document["request"] = request
            self._keep(STACKS_FILE, encoded(document))
        self._stacks_answered = request

    def _answer(self, request: int) -> None:
        if request in (0, self._answered):
            return
        self._answered = request
        document = self._status.with_all_stacks(STANDING_SCHEMA)
        error = uncaught_exception()
        document.update(request=request, raised=[] if error is None else exception_documents(error))
        self._keep(STANDING_FILE, encoded(document))
        entries = flight(self._session)
        if entries is not None:
            self._keep(HANG_FLIGHT_FILE, entries)

    def write_end_status(self) -> None:
        """Write how the process ends. An exception may be written before the end, if other threads keep the process running."""
        error = uncaught_exception()
        document = self._status.counts(ENDING_SCHEMA)
        document["how"] = (End.IN_ORDER if error is None else End.EXCEPTION).value
        if error is not None:
            document["raised"] = raised = exception_documents(error)
            document["phase"] = phase_of(raised[0]["frames"]).value
        self._session.spool.keep_document(ENDING_FILE, document)

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=_END_S)
        if self._faults is not None:
            self._faults.stop()
        # The last status matters only if the rank ends in another way.
        self._withdraw(PROGRESS_FILE)
        if uncaught_exception() is None:
            self._withdraw(CALLS_PAGE)
