"""Writes records that survive a crash: the last calls of collectives, in shared memory, and the exception being raised."""

from __future__ import annotations

import os
import sys
import time
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, Callable

from ...rundir import ENDING_FILE
from ...rundir.calls_page import Call, CallsPage
from ...rundir.spool import Spool
from ...rundir.stepevents import Phase
from ...rundir.stops import ENDING_SCHEMA, End
from ..guard import masked_text
from ..job import place_of
from ..patching import UNCOUNTED_FILE
from .active import active

MOST_PLACES = 10_000
"""Upper limit of the calls, by place and size, whose fields are cached; some 300 bytes each."""


class Calls(CallsPage):
    """The last calls of collectives of a recording, and a cache of recurring calls."""

    __slots__ = ("_recurring", "_turns", "known")

    def __init__(self, spool: Spool) -> None:
        super().__init__(spool)
        self._turns: dict[str, list[int]] = {}
        """Number of calls, by process group."""
        self._recurring: dict[str, Call] = {}
        """Calls by their event fields."""
        self.known: dict[tuple[Any, ...], tuple[Call, str, CodeType]] = {}
        """A cache for callers of ``begin``: calls with the fields of their event, by what distinguishes them. Keeping the code
        object prevents reuse of its id."""

    def recurring(self, fields: str, group: str | None) -> Call:
        """Return the call with these event fields in process group ``group``, None for a message."""
        call = self._recurring.get(fields)
        if call is None:
            call = Call(fields, None if group is None else self._turns.setdefault(group, [0]))
            if len(self._recurring) < MOST_PLACES:
                self._recurring[fields] = call
        return call


Frame = list[Any]
"""File, line, function."""
MOST_FRAMES_WRITTEN = 64
"""Upper limit of the frames written per stack. A trainer's own loop, with torch below it, has 30 to 50."""
_MOST_LETTERS = 2000
"""Upper limit of a message's length. That of a kernel's compilation error has thousands of characters."""
_MOST_WRITTEN = 16
"""Upper limit of the exceptions written per process, for programs that continue after each."""
_written = [0]


def exception_document(error: BaseException, frames: list[Frame]) -> dict[str, Any]:
    """The document of an exception. ``frames`` are innermost first."""
    return {
        "type": type(error).__name__[:200],
        "message": masked_text(error)[:_MOST_LETTERS],
        "frames": frames[:MOST_FRAMES_WRITTEN],
    }


def exception_recorder(phase: Phase) -> Callable[[BaseException], None]:
    """Return a callback that writes ``ending.json`` for an exception that leaves a call of this kind."""

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
            "raised": [exception_document(error, _calling_stack())],
        }
        session.spool.keep_document(ENDING_FILE, document)

    return note


def _calling_stack() -> list[Frame]:
    """The caller's stack, innermost first, without lines of the hook's wrappers."""
    found: list[Frame] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(found) < MOST_FRAMES_WRITTEN:
        if frame.f_code.co_filename != UNCOUNTED_FILE:
            found.append(place_of(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found
