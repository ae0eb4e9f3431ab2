"""Records that survive a crash: the last calls of collectives, in shared memory, and the exception being raised."""

from __future__ import annotations

import mmap
import os
import sys
import time
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, Callable

from ...rundir import (
    CALL_SLOT_BYTES,
    CALL_SLOTS,
    CALLS_FILE,
    ENDING_FILE,
    ENDING_SCHEMA,
    OWN_SLOTS,
    CallField,
    End,
    LineField,
    Phase,
    Spool,
)
from ..guard import masked_text
from ..job import place_of
from ..patching import UNCOUNTED_FILE
from .active import active

_OPENING = f"{{{CallField.OPEN.key}1{CallField.NUMBER.next_key}"
_OPEN_AT = _OPENING.index("1")
"""Index of the digit that says whether the call has returned."""
_TURN, _STEP = CallField.TURN.next_key, LineField.STEP.next_key
_LAST, _BEFORE = CallField.LAST_TURN.next_key, CallField.TURN_BEFORE.next_key
_WIDE = "%10d"
"""A number of fixed width, in a line that is always as long as a slot."""
_RETURNED = ord("0")
MOST_PLACES = 10_000
"""Calls, by place and size, whose fields are cached, some 300 bytes each."""


class Call:
    """A recurring call: from one place, of the same operation with as many bytes."""

    __slots__ = ("before", "group", "last", "line", "open_at")

    def __init__(self, fields: str, group: str | None) -> None:
        self.group = group
        """The process group; None for a message."""
        self.last = self.before = 0
        """Its last two turns: they show which call was due when ranks that synchronize called different ones."""
        turns = "" if group is None else f"{_TURN}{_WIDE}{_LAST}{_WIDE}{_BEFORE}{_WIDE}"
        text = f"{_OPENING}{_WIDE}{turns}{_STEP}{_WIDE},{fields.replace('%', '%%')}}}\n".encode()
        numbers = text.count(_WIDE.encode())
        missing = CALL_SLOT_BYTES - len(text % ((0,) * numbers))
        self.line: bytes | None = b" " * missing + text if missing >= 0 else None
        """As long as a slot once its numbers are filled in; None where it is too long for one."""
        self.open_at = missing + _OPEN_AT


class Calls:
    """The last calls of collectives of a recording. For the training thread."""

    def __init__(self, spool: Spool) -> None:
        self._memory: mmap.mmap | None = None
        try:
            self._memory = spool.shared(CALLS_FILE, (CALL_SLOTS + OWN_SLOTS) * CALL_SLOT_BYTES)
        except OSError:
            pass  # storage is short: the rank's end is reported without them
        self._number = self._own = 0
        self._turns: dict[str, int] = {}
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
            call = Call(fields, group)
            if len(self._recurring) < MOST_PLACES:
                self._recurring[fields] = call
        return call

    def begin(self, call: Call, step: int) -> int:
        """A call from Python begins in ``step``. Returns what ``end`` wants."""
        return self._write(call, step, (self._number + 1) % CALL_SLOTS)

    def begin_own(self, call: Call, step: int) -> int:
        """As ``begin``, for a call that DDP issues."""
        self._own = own = (self._own + 1) % OWN_SLOTS
        return self._write(call, step, CALL_SLOTS + own)

    def _write(self, call: Call, step: int, slot: int) -> int:
        # In every step, so in as few operations as can be.
        memory, line, group = self._memory, call.line, call.group
        if memory is None:
            return -1
        self._number = number = self._number + 1
        numbers: tuple[int, ...] = (number, step)
        if group is not None:
            self._turns[group] = turn = self._turns.get(group, 0) + 1
            numbers = number, turn, call.last, call.before, step
            call.before, call.last = call.last, turn
        if line is None:
            return -1
        at = slot * CALL_SLOT_BYTES
        try:
            memory[at : at + CALL_SLOT_BYTES] = line % numbers
        except (ValueError, IndexError):  # the recording has ended; or numbers beyond their width
            self._memory = None
            return -1
        return at + call.open_at

    def end(self, place: int) -> None:
        """The call has returned, and the rank no longer waits in it."""
        memory = self._memory
        if place >= 0 and memory is not None:
            try:
                memory[place] = _RETURNED
            except ValueError:
                self._memory = None


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
