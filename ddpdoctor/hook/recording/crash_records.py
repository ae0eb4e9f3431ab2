"""Records that survive a crash: the last calls of collectives, in shared memory, and the exception being raised."""

from __future__ import annotations

import os
import sys
import time
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, Callable

from ...rundir import (
    ENDING_FILE,
    ENDING_SCHEMA,
    Call,
    CallsPage,
    End,
    Phase,
    Spool,
)
from ..guard import masked_text
from ..job import place_of
from ..patching import UNCOUNTED_FILE
from .active import active

MOST_PLACES = 10_000
"""Calls, by place and size, whose fields are cached, some 300 bytes each."""


class Calls(CallsPage):
    """The last calls of collectives of a recording, and what is known of those that recur."""

    def __init__(self, spool: Spool) -> None:
        super().__init__(spool)
        self._turns: dict[str, list[int]] = {}
        """By process group, how many were called."""
        self._recurring: dict[str, Call] = {}
        """By the fields."""
        self.known: dict[tuple[Any, ...], tuple[Call, str, CodeType]] = {}
        """A cache for callers of ``begin``: known calls by what distinguishes them, with the fields of their event.
        The code is kept so that no other gets its id."""

    def recurring(self, fields: str, group: str | None) -> Call:
        """A call with these fields of an event, of this process group; None for a message."""
        call = self._recurring.get(fields)
        if call is None:
            call = Call(fields, None if group is None else self._turns.setdefault(group, [0]))
            if len(self._recurring) < MOST_PLACES:
                self._recurring[fields] = call
        return call


Frame = list[Any]
"""File, line, function."""
MOST_FRAMES_WRITTEN = 64
"""Frames of a stack that are written: a trainer's own loop, with torch below it, has 30 to 50."""
_MOST_LETTERS = 2000
"""Of a message: that of an error in a kernel's compilation has thousands."""
_MOST_WRITTEN = 16
"""Exceptions written per process: a program that continues after each would cost too much."""
_written = [0]
"""Exceptions written so far."""


def exception_document(error: BaseException, frames: list[Frame]) -> dict[str, Any]:
    """The document of an exception; ``frames``, innermost first."""
    return {
        "type": type(error).__name__[:200],
        "message": masked_text(error)[:_MOST_LETTERS],
        "frames": frames[:MOST_FRAMES_WRITTEN],
    }


def exception_recorder(phase: Phase) -> Callable[[BaseException], None]:
    """A callback for an exception that leaves a call of this kind, on the calling thread; it writes ``ending.json``."""

    def note(error: BaseException) -> None:
        session = active.session
        if session is None or session.recorder.thread != get_ident() or _written[0] >= _MOST_WRITTEN:
            return
        _written[0] += 1
        document = {
            "schema": ENDING_SCHEMA,
            "rank": session.rank,
            "pid": os.getpid(),
            "at_ns": time.time_ns(),
            "step": session.recorder.step,
            "phase": phase.value,
            "how": End.RAISING.value,
            "raised": [exception_document(error, _callers())],
        }
        session.spool.keep_document(ENDING_FILE, document)

    return note


def _callers() -> list[Frame]:
    """The stack of this thread, innermost first."""
    found: list[Frame] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(found) < MOST_FRAMES_WRITTEN:
        if frame.f_code.co_filename != UNCOUNTED_FILE:
            found.append(place_of(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found
