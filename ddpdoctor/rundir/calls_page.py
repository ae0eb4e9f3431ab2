"""Shared memory in which a rank records its last calls of collectives when they begin; it survives the process.

Calls are written in every step with cold CPU caches, so writing is cheap: one store per number of a slot, and the text only if
the slot held another call. The process that copies the page to the run directory converts it to JSON lines.

::

    <spool>/calls    slots of 256 bytes: 1 until the call has returned, its number, its turn and the previous two, its step, eight
                     bytes each, and the fields of its event as text, padded with NUL
"""

from __future__ import annotations

import struct
from typing import Any, Protocol

from .stepevents import CallField, LineField

CALLS_PAGE = "calls"
CALL_SLOTS, DDP_SLOTS, CALL_SLOT_BYTES = 32, 8, 256
"""Number of slots for calls from Python, number of slots after them for calls by DDP itself, and bytes of each. The longest part of
a call is the name of its group, some 20 characters. The slots are separate so that DDP's calls do not displace those of an
evaluation every thousand steps."""
_NUMBERS = struct.Struct("=6q")
_SLOT = CALL_SLOT_BYTES // 8
_TEXT_BYTES = CALL_SLOT_BYTES - _NUMBERS.size
_TEXT_AT = _NUMBERS.size // 8


class _Memory(Protocol):
    def shared(self, name: str, size: int) -> memoryview:
        """See :class:`.spool.Spool`."""


class Call:
    """A recurring call: same place, operation and number of bytes."""

    __slots__ = ("last", "second_last", "text", "turns")

    def __init__(self, fields: str, turns: list[int] | None) -> None:
        """``turns`` has one element, the number of calls of its process group so far; None for a point-to-point message."""
        self.turns = turns
        self.last = self.second_last = 0
        """Its last two turns. If synchronizing ranks call different collectives, they show which call was due."""
        text = fields.encode().ljust(_TEXT_BYTES, b"\0")
        self.text = memoryview(text).cast("q") if len(text) == _TEXT_BYTES else None
        """None if it is too long for a slot."""


class CallsPage:
    """The last calls of a recording. Only the training thread uses it."""

    __slots__ = ("ddp_calls", "number", "numbers", "written")

    def __init__(self, spool: _Memory) -> None:
        self.numbers: Any = None
        """The page; None if storage is short: the rank's calls are then not reported."""
        try:
            self.numbers = spool.shared(CALLS_PAGE, (CALL_SLOTS + DDP_SLOTS) * CALL_SLOT_BYTES)
        except OSError:
            pass
        self.number = self.ddp_calls = 0
        """Number of calls so far, and of those by DDP."""
        self.written: list[Call | None] = [None] * (CALL_SLOTS + DDP_SLOTS)
        """The call whose text each slot holds."""

    def begin(self, call: Call, step: int, by_ddp: bool = False) -> int:
        """Record that a call begins in ``step``; ``by_ddp``: DDP itself issues it. Returns the argument for ``end``; -1 if it was not
        recorded."""
        # Runs in every step, so it makes as few operations as possible, and its objects have slots. The wrapper of backwards has
        # the same for a call by DDP, because a call of this function takes 1 to 3 us with cold caches.
        numbers, turns = self.numbers, call.turns
        self.number = number = self.number + 1
        if by_ddp:
            self.ddp_calls += 1
            slot = CALL_SLOTS + self.ddp_calls % DDP_SLOTS
        else:
            slot = number % CALL_SLOTS
        turn = last = second_last = 0
        if turns is not None:
            turns[0] = turn = turns[0] + 1
            last, second_last = call.last, call.second_last
            call.second_last, call.last = last, turn
        if numbers is None or call.text is None:
            return -1
        place = slot * _SLOT
        try:
            numbers[place + 1] = 0  # marks the slot as empty until it is complete
            if self.written[slot] is not call:
                numbers[place + _TEXT_AT : place + _SLOT] = call.text
                self.written[slot] = call
            numbers[place] = 1
            numbers[place + 2] = turn
            numbers[place + 3] = last
            numbers[place + 4] = second_last
            numbers[place + 5] = step
            numbers[place + 1] = number
        except ValueError:  # the recording has ended
            self.numbers = None
            return -1
        return place

    def end(self, place: int) -> None:
        """Record that the call has returned; the rank no longer waits in it."""
        if place >= 0 and self.numbers is not None:
            try:
                self.numbers[place] = 0
            except ValueError:
                self.numbers = None


def lines_of_calls(page: bytes) -> bytes:
    """Return the content of a page as lines of ``calls.jsonl``."""
    lines = []
    for at in range(0, len(page) - CALL_SLOT_BYTES + 1, CALL_SLOT_BYTES):
        is_open, number, turn, last, second_last, step = _NUMBERS.unpack_from(page, at)
        if number:
            turns = (
                f"{CallField.TURN.next_key}{turn}{CallField.LAST_TURN.next_key}{last}"
                f"{CallField.TURN_BEFORE.next_key}{second_last}"
                if turn
                else ""
            )
            fields = page[at + _NUMBERS.size : at + CALL_SLOT_BYTES].rstrip(b"\0").decode(errors="replace")
            lines.append(
                f"{{{CallField.OPEN.key}{is_open}{CallField.NUMBER.next_key}{number}{turns}"
                f"{LineField.STEP.next_key}{step},{fields}}}\n"
            )
    return "".join(lines).encode()
