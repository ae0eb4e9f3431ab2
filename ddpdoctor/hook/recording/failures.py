"""A collective or a backward pass that raises: written down at once, for whoever starts the ranks may end this one before its
Python has come to its own end. What the program makes of the exception is its own business."""

from __future__ import annotations

import os
import sys
import time
from threading import get_ident
from types import FrameType
from typing import Callable, List, Optional

from ...rundir import ENDING_FILE, ENDING_SCHEMA, End, Phase
from ..guard import text_of
from ..patching import UNCOUNTED_FILE
from .active import active

_MOST_FRAMES = 64
"""As many as are told of a stack elsewhere."""
_MOST_LETTERS = 2000
_MOST_TOLD = 16
"""Of one process: a program that goes on after each of them is not kept up."""


class _Told:
    """How often."""

    __slots__ = ("times",)

    def __init__(self) -> None:
        self.times = 0


_told = _Told()


def raising_in(phase: Phase) -> Callable[[BaseException], None]:
    """What to call with an exception that leaves a call of this kind, on the thread that called."""

    def note(error: BaseException) -> None:
        session = active.session
        if session is None or session.recorder.thread != get_ident() or _told.times >= _MOST_TOLD:
            return
        _told.times += 1
        document = {
            "schema": ENDING_SCHEMA,
            "rank": session.rank,
            "pid": os.getpid(),
            "at_ns": time.time_ns(),
            "step": session.recorder.step,
            "phase": phase.value,
            "how": End.RAISING.value,
            "raised": [
                {
                    "type": type(error).__name__[:200],
                    "message": text_of(error)[:_MOST_LETTERS],
                    "frames": _callers(),
                }
            ],
        }
        session.spool.keep_document(ENDING_FILE, document)

    return note


def _callers() -> "List[List[object]]":
    """The stack of this thread, innermost first."""
    found: List[List[object]] = []
    frame: Optional[FrameType] = sys._getframe(2)
    while frame is not None and len(found) < _MOST_FRAMES:
        code = frame.f_code
        name = code.co_filename
        function = getattr(code, "co_qualname", code.co_name)
        if name != UNCOUNTED_FILE:
            found.append([name if name.startswith("<") else os.path.abspath(name), frame.f_lineno, function])
        frame = frame.f_back
    return found
