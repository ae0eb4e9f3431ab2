"""Profiler windows that somebody asks for while the job runs, by ``ddpdoctor capture``.

The attendant looks once a second for an order in the spool, which names a step far enough ahead: all ranks reach it, and each
opens its window there, without a word between them. The training thread finds the window among those who listen for steps.
"""

from __future__ import annotations

from typing import List, Optional

from ...rundir import CAPTURE_ANSWER, CAPTURE_SCHEMA, CaptureOrder
from ..patching import guarded
from ..recording import Session, Writer
from .other_profilers import other_tool
from .window import Window


class Captures:
    """Of one recording. ``follow`` is the attendant's, ``finish`` the training thread's."""

    def __init__(self, session: Session, writer: Writer, first: Window) -> None:
        self._session, self._writer = session, writer
        self._windows: List[Window] = [first]
        self._answered = 0

    @property
    def closing_s(self) -> float:
        """How long torch took to close the profiler, in all windows."""
        return sum(window.closing_s for window in self._windows)

    @property
    def under_way(self) -> bool:
        """Whether the newest window is waited for, open or being closed."""
        return self._windows[-1].is_under_way

    def follow(self) -> None:
        """Do what was ordered, or taken back, since the last call."""
        order = self._session.spool.capture_ordered()
        newest = self._windows[-1]
        if order is None:
            self._answered = 0
            if len(self._windows) > 1:
                newest.take_back()
        elif order.request != self._answered:
            self._answered = order.request
            why = self._refusal(order)
            if why is None:
                newest = Window(self._session, self._writer, order)
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
            # Whoever had nothing to wait for may have unset it at this moment.
            self._session.stepping.listening = True

    def _refusal(self, order: CaptureOrder) -> Optional[str]:
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
        """The job ends: close what is open, and wait until it is saved, see :meth:`.Window.finish`."""
        for window in self._windows[1:]:
            guarded(window.part, window.finish)(deadline_s)
