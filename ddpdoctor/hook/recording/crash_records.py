"""What outlives a crash: the last calls of collectives, in shared memory, and the exception that is being raised."""

from __future__ import annotations

import mmap
import os
import sys
import time
from threading import get_ident
from types import FrameType
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
from ..guard import text_of
from ..patching import UNCOUNTED_FILE
from .active import active

_OPENING = f"{{{CallField.OPEN.key}1{CallField.NUMBER.next_key}"
_OPEN_AT = _OPENING.index("1")
"""Place of the digit that says whether the call has returned."""
_TURN, _STEP = CallField.TURN.next_key, LineField.STEP.next_key
_LAST, _BEFORE = CallField.LAST_TURN.next_key, CallField.TURN_BEFORE.next_key
_NEVER = (0, 0)
_RETURNED = ord("0")
MOST_PLACES = 10_000
"""Calls, by place and size, whose fields are remembered, some 300 bytes each."""


class Calls:
    """Of one recording. For the training thread."""

    def __init__(self, spool: Spool) -> None:
        self._memory: mmap.mmap | None = None
        try:
            self._memory = spool.shared(CALLS_FILE, (CALL_SLOTS + OWN_SLOTS) * CALL_SLOT_BYTES)
        except OSError:
            pass  # storage is short: how the rank ended is told without them
        self._number = self._own = 0
        self._turns: dict[str, int] = {}
        """By process group, how many were called."""
        self._last: dict[str, tuple[int, int]] = {}
        """By the fields of a call, its last two turns: when a rank meets others in what it called, they tell what was due there."""
        self.known: dict[tuple[Any, ...], tuple[str, str, str]] = {}
        """For whoever calls ``begin``: what it wants to know of calls that were made before, by what tells them apart."""

    def begin(self, step: int, fields: str, group: str | None) -> int:
        """A call from Python with these fields of an event begins in ``step``, of this process group; None for a message. Returns
        what ``end`` wants."""
        if self._memory is None:
            return -1
        self._number += 1
        return self._write(self._number % CALL_SLOTS, step, fields, group)

    def begin_own(self, step: int, fields: str, group: str) -> int:
        """The same of one that DDP issues."""
        if self._memory is None:
            return -1
        self._number += 1
        self._own += 1
        return self._write(CALL_SLOTS + self._own % OWN_SLOTS, step, fields, group)

    def _write(self, slot: int, step: int, fields: str, group: str | None) -> int:
        turn = ""
        if group is not None:
            self._turns[group] = number = self._turns.get(group, 0) + 1
            before = self._last.get(fields, _NEVER)
            if before is not _NEVER or len(self._last) < MOST_PLACES:
                self._last[fields] = number, before[0]
            turn = f"{_TURN}{number}{_LAST}{before[0]}{_BEFORE}{before[1]}"
        data = f"{_OPENING}{self._number}{turn}{_STEP}{step},{fields}}}\n".encode()
        at = slot * CALL_SLOT_BYTES
        if len(data) > CALL_SLOT_BYTES or self._memory is None:
            return -1
        try:
            self._memory[at : at + CALL_SLOT_BYTES] = data.rjust(CALL_SLOT_BYTES)
        except ValueError:  # the recording has ended
            self._memory = None
            return -1
        return at + CALL_SLOT_BYTES - len(data) + _OPEN_AT

    def end(self, place: int) -> None:
        """The call has returned, and nothing of it is left to wait for."""
        memory = self._memory
        if place >= 0 and memory is not None:
            try:
                memory[place] = _RETURNED
            except ValueError:
                self._memory = None


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


def _callers() -> list[list[object]]:
    """The stack of this thread, innermost first."""
    found: list[list[object]] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(found) < _MOST_FRAMES:
        code = frame.f_code
        name = code.co_filename
        function = getattr(code, "co_qualname", code.co_name)
        if name != UNCOUNTED_FILE:
            found.append([name if name.startswith("<") else os.path.abspath(name), frame.f_lineno, function])
        frame = frame.f_back
    return found
