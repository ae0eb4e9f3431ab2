"""Profiler windows: the same few steps on all ranks, recorded by torch's profiler.

Windows are opened and closed at the end of a step, on the training thread. The device is never synchronized: with CUDA, the
profiler is closed at the end of a step after CUDA events show that the device has finished the window's steps. In rank.json a
window is ``waiting``, ``open``, ``saving`` and, when its trace is in the run directory, ``saved``; or ``skipped`` or ``failed``,
with the reason.

The job's own profiler takes precedence. If a window is opened while that profiler warms up, the job crashes later, and the warm-up
cannot be detected. So no window is opened after the job has constructed a profiler.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from ...rundir import CAPTURE_ANSWER
from ...rundir.requests import CAPTURE_SCHEMA, CaptureRequest, capture_requested
from ...rundir.stepevents import Mark
from .. import environment
from ..guard import part
from ..job import job_torch
from ..patching import guarded
from ..recording import LAST_SETTINGS_STEP, Session
from .torch_profiler import (
    SETTLE_NS,
    backend_may_write,
    close_profiler,
    end_collection,
    node_number,
    open_profiler,
    profiler_is_on,
)
from .trace_file import TraceJob

_TOOLS = {
    "NSYS_PROFILING_SESSION_ID": "Nsight Systems",
    "NV_COMPUTE_PROFILER_PERFWORKS_DIR": "Nsight Compute",
}

user_profilers: list[str] = []
"""The first profiler that the job has constructed; empty if it has constructed none."""


def other_tool() -> str:
    """The name of another profiler that this process runs under, or is about to use; "" if none. Call on the training thread."""
    for variable, name in _TOOLS.items():
        if os.environ.get(variable):
            return name
    return user_profilers[0] if user_profilers else _python_profiler()


def _python_profiler() -> str:
    """The name of an active profiler of Python calls, such as cProfile, which would distort the window; "" if none."""
    monitoring = getattr(sys, "monitoring", None)
    tool = monitoring.get_tool(monitoring.PROFILER_ID) if monitoring is not None else None
    if tool or sys.getprofile() is not None:
        return str(tool or "cProfile, or another profiler of Python calls,")
    return ""


def note_user_profiler(profiler: Any) -> None:
    """End the windows because the job constructs ``profiler``."""
    if not user_profilers:
        kind = type(profiler)
        user_profilers.append(f"the job's own {kind.__module__}.{kind.__qualname__}")
    for window in list(windows):
        window._yield_to_user_profiler()
    _close_inherited()


_PART = part("profiler window")
_POLL_S = 0.01
"""Seconds between two checks whether the profiler can be closed, while the job waits for that."""
BYTES_PER_NODE = 1_000
"""Estimated bytes of compressed trace per node of the autograd graph. On the large side, because the limit also holds for the
written file."""


windows: list[Window] = []
"""Windows of active sessions, and windows that could not be closed."""
_inherited: list[int] = []
"""In a forked child, the thread on which a profiler opened by its parent is still on; empty if there is none."""


def forget_windows(session: Session) -> None:
    """Drop the windows of an ended session. A job may have many sessions, one for each process group that it creates."""
    windows[:] = [window for window in windows if window._session is not session or window._open]


def close_left_open() -> None:
    """Close any open profiler at the end of the process."""
    for window in windows:
        window._emergency_close()
    _close_inherited()


def leave_parents_windows() -> None:
    """Drop the parent's windows in a forked child. If one is open, the child has inherited the profiler, and would record all
    its operators into memory that nothing reads. It is closed only at the child's end, or for a profiler of its own, because
    CUDA's part of it does not work in a forked child."""
    if (_inherited or any(window._open for window in windows)) and profiler_is_on():
        end_collection()
        _inherited[:] = [threading.get_ident()]
    windows.clear()


def _close_inherited() -> None:
    if _inherited:
        close_profiler(_inherited.pop())


class Window:
    """One profiler window of a recording."""

    def __init__(self, session: Session, order: CaptureRequest | None = None) -> None:
        """``order`` is the request for a window while the job runs; None for the first window, whose steps are options of
        ``ddpdoctor run``."""
        self.part = _PART
        self._session = session
        self._number = 0 if order is None else order.number
        self._cancelled = False
        self._steps = (
            environment.profile_steps(os.environ)
            if order is None
            else (order.first, order.first + order.steps)
        )
        self._max_bytes = environment.max_trace_bytes(os.environ)
        self._first, self._stop = self._steps or (0, 0)
        self._state: dict[str, Any] = {
            "steps": list(self._steps) if self._steps else None,
            "state": "waiting",
            "why": None,
        }
        self._opener = 0
        self._open = False
        self.closing_s = 0.0
        """How long torch took to close the profiler, s. It must be closed, because an open one crashes the process at exit."""
        self._ended = 0
        """End of collection, monotonic ns, until the profiler is closed; otherwise 0."""
        self._backend_may_write = False
        """Whether other threads may write to the profiler's memory for some time after the end of collection."""
        self._operation = ""
        """The profiler operation in progress. It stays set if the job is interrupted during it."""
        self._near_thread: threading.Thread | None = None
        """The thread on which the step before the window began; None before that."""
        self._nodes = self._step_nodes = 0
        """Sequence number of the next autograd node when the step before the window began, and the number of nodes of that step."""
        self._activities: Any = ()
        self._job: TraceJob | None = None
        if order is None:
            session.document["window"] = self._state
        else:
            self._state["number"] = order.number
            session.document.setdefault("captures", []).append(self._state)
            session.writer.document_changed.set()
        if self._steps is None:
            self._set("skipped", "--no-profile was given")
        windows.append(self)

    def _set(self, state: str, why: str | None = None, **more: Any) -> None:
        self._state.update(state=state, why=why or self._state.get("why"), **more)
        self._session.writer.document_changed.set()

    @property
    def is_under_way(self) -> bool:
        """Whether it needs the ends of steps: it waits, is open, or its trace is being written in this process."""
        state = self._state["state"]
        saving = state == "saving" and self._job is not None and not self._job.handed_over
        return self._ended != 0 or state in ("waiting", "open") or saving

    def cancel(self) -> None:
        """Cancel the window; no effect if it is open. May be called from any thread."""
        self._cancelled = True

    def at_step(self, step: int) -> None:
        """Handle the start of step number ``step``."""
        try:
            self._at_step(step)
        except Exception:
            self._emergency_close()
            raise

    def _emergency_close(self) -> None:
        """Close the profiler after an error of the hook. Left open, it would use up memory and crash the job at its end."""
        self._session.recorder.always_full = False
        if self._open:
            self._open = False
            self._ended = 0
            autograd = job_torch().autograd
            # Use none of the code that may have failed.
            if threading.get_ident() == self._opener and autograd._profiler_enabled():
                autograd._enable_record_function(False)
                try:
                    time.sleep(SETTLE_NS / 1e9)
                finally:
                    autograd._enable_record_function(True)
                    autograd._disable_profiler()
            self._state.update(state="failed", why="an error of ddpdoctor, see hook.errors")

    def _at_step(self, step: int) -> None:
        recorder = self._session.recorder
        state = self._state["state"]
        if self._ended:
            self._try_to_close()
        elif state == "waiting":
            self._wait(step)
        elif state == "open":
            if step >= self._stop:
                self._end(step)
            else:
                recorder.marks.append(Mark.PROFILED)
        elif state == "saving" and self._job is not None and not self._job.handed_over:
            recorder.marks.append(Mark.SAVING)
        elif step > LAST_SETTINGS_STEP and not user_profilers:
            own_windows = [window for window in windows if window._session is self._session]
            if not any(window.is_under_way for window in own_windows):
                self._session.stepping.listening = False
        if user_profilers and profiler_is_on():
            recorder.marks.append(Mark.USER_PROFILER)

    def _wait(self, step: int) -> None:
        recorder = self._session.recorder
        if self._cancelled:
            recorder.always_full = False
            self._set("skipped", "it was taken back")
        elif step == self._first - 1:
            self._nodes = node_number()
            self._near_thread = threading.current_thread()
            recorder.record_all_events()
        elif step >= self._first and (self._near_thread is not None or not self._number):
            self._try_to_open(step)
        elif step >= self._first:
            self._set("skipped", f"it was asked for in step {step}, too late")

    def _try_to_open(self, step: int) -> None:
        recorder = self._session.recorder
        other = other_tool()
        if other or profiler_is_on():
            recorder.always_full = False
            self._set("skipped", f"{other or 'another profiler'} profiles this job and takes precedence")
            return
        if self._near_thread not in (None, threading.current_thread()):
            # It could not be closed on the thread that opened it, and an open profiler crashes the process at exit.
            recorder.always_full = False
            self._set("skipped", "steps end on one thread after the other")
            return
        self._shorten()
        recorder.record_all_events()
        self._opener = threading.get_ident()
        self._open = True
        self._operation = "opened"
        self._activities = open_profiler()
        self._operation = ""
        recorder.marks += [Mark.OPENED, Mark.PROFILED]
        self._set("open")

    def _shorten(self) -> None:
        nodes = node_number() - self._nodes
        if nodes > 0 and self._first > 0:
            self._step_nodes = nodes
            most = max(1, self._max_bytes // (nodes * BYTES_PER_NODE))
            if most < self._stop - self._first:
                self._stop = self._first + most
                self._set("waiting", f"shortened to {most} steps to stay below --max-trace-mb")

    def _end(self, step: int) -> None:
        """End collection; ``step`` is the step that begins."""
        self._session.recorder.always_full = False
        end_collection()
        self._backend_may_write = backend_may_write()
        self._ended = time.monotonic_ns()
        self._state.update(steps=[self._first, step])

    def _is_closable(self) -> bool:
        """Whether no thread writes to the profiler any more and the device has finished the window's steps, or ``SETTLE_NS`` have
        passed."""
        if time.monotonic_ns() - self._ended >= SETTLE_NS:
            return True
        devices, on_device = self._session.devices, len(self._activities) > 1
        is_done = not on_device or (devices is not None and devices.has_finished(self._state["steps"][1] - 1))
        return is_done and not self._backend_may_write

    def _try_to_close(self) -> None:
        if self._is_closable():
            self._close()
        elif len(self._activities) > 1:
            self._session.recorder.marks.append(Mark.SAVING)

    def _close(self) -> None:
        interrupted, self._operation = self._operation, "closed"
        begun_s = time.monotonic()
        result = close_profiler(self._opener)
        self.closing_s += time.monotonic() - begun_s
        self._operation = ""
        self._ended = 0
        self._open = False
        if result is None:
            why = "the profiler was taken over, or closed, by something else"
            if interrupted:
                why = f"the job was interrupted, as by Ctrl-C, while the profiler was being {interrupted}"
            self._set("failed", why)
            return
        self._session.recorder.marks.append(Mark.CLOSED)
        self._set("saving")
        expected = (self._stop - self._first) * self._step_nodes * BYTES_PER_NODE
        self._job = TraceJob(self._session, result, self._max_bytes, self._set, expected, self._number)
        self._job.start()

    def _close_now(self) -> None:
        if not self._ended:
            self._end(self._session.recorder.step)
        while not self._is_closable():
            time.sleep(_POLL_S)
        self._close()

    def _yield_to_user_profiler(self) -> None:
        """Close the window because the job constructs its own profiler."""
        self._session.stepping.listening = True
        if self._open and threading.get_ident() == self._opener:
            if not self._ended:
                self._set("open", "cut short, because the job uses a profiler of its own")
            self._close_now()

    def finish(self, deadline_s: float) -> None:
        """Close the window at the job's end, and wait until its trace is saved. The wait ends at ``deadline_s`` (monotonic) plus
        the time that closing took."""
        try:
            self._finish(deadline_s)
        except Exception:
            self._emergency_close()
            raise

    def _finish(self, deadline_s: float) -> None:
        closed_before_s = self.closing_s
        if self._open:
            if not self._ended:
                self._set("open", "cut short by the end of the job")
            self._close_now()
        elif self._state["state"] == "waiting":
            self._set("skipped", f"the job ended in step {self._session.recorder.step}, before the window")
        if self._job is not None:
            self._job.finish_until(deadline_s + self.closing_s - closed_before_s)
            if self._state["state"] == "saving" and not self._job.handed_over:
                self._state["why"] = "the job ended before its trace was written"


class Captures:
    """The windows of a recording. The status thread calls ``follow``, the training thread calls ``finish``."""

    def __init__(self, session: Session, first: Window) -> None:
        self._session = session
        self._windows: list[Window] = [first]
        self._answered = 0

    @property
    def closing_s(self) -> float:
        """How long torch took to close the profiler, s, in all windows."""
        return sum(window.closing_s for window in self._windows)

    @property
    def under_way(self) -> bool:
        """Whether the newest window is waiting, open, or being closed or saved."""
        return self._windows[-1].is_under_way

    def handle_requests(self) -> None:
        """Handle requests and cancellations since the last call."""
        order = capture_requested(self._session.spool.directory)
        newest = self._windows[-1]
        if order is None:
            self._answered = 0
            if len(self._windows) > 1:
                newest.cancel()
        elif order.request != self._answered:
            self._answered = order.request
            why = self._refusal(order)
            if why is None:
                newest = Window(self._session, order)
                self._windows.append(newest)
                self._session.stepping.on_step.append(guarded(newest.part, newest.at_step))
            self._session.spool.keep_document(
                CAPTURE_ANSWER,
                {
                    "schema": CAPTURE_SCHEMA,
                    "request": order.request,
                    "step": self._session.recorder.step,
                    "why": why,
                },
            )
        if newest.is_under_way:
            # Another window that has nothing left to do may have unset it just now.
            self._session.stepping.listening = True

    def _refusal(self, order: CaptureRequest) -> str | None:
        step = self._session.recorder.step
        if order.first < step + 2:
            return f"it is in step {step} already"
        if any(window.is_under_way for window in self._windows):
            return "another window of the profiler is under way"
        if order.number < len(self._windows):
            return f"it has a window {order.number} already"
        other = other_tool()
        return f"{other} profiles this job" if other else None

    def finish(self, deadline_s: float) -> None:
        """Close the windows and wait for their traces, at the job's end; see :meth:`.Window.finish`."""
        for window in self._windows:
            guarded(window.part, window.finish)(deadline_s)
