"""Memory in which a rank notes the last calls of collectives as they begin, so that they outlive it.

A call is written in every step, where the caches are cold: a slot's numbers, by one store each, and its text only where the
slot had another one. Who copies the page to the run directory makes lines of JSON of it.

::

    <spool>/calls    slots of 256 bytes: 1 until the call has returned, its number, its turn and the two before, its step, eight
                     bytes each, and the fields of its event as text, NUL behind it
"""

from __future__ import annotations

import struct
from typing import Any, Protocol

from .stepevents import CallField, LineField

CALLS_PAGE = "calls"
CALL_SLOTS, OWN_SLOTS, CALL_SLOT_BYTES = 32, 8, 256
"""Calls from Python that are kept, behind them those that DDP issues itself, and bytes of each: the name of a group is the longest
part of it, and has some twenty letters. What a job calls in an evaluation every thousand steps must not be pushed out by DDP's."""
_NUMBERS = struct.Struct("=6q")
_SLOT = CALL_SLOT_BYTES // 8
_TEXT_BYTES = CALL_SLOT_BYTES - _NUMBERS.size
_TEXT_AT = _NUMBERS.size // 8


class _Memory(Protocol):
    def shared(self, name: str, size: int) -> memoryview:
        """As of :class:`.spool.Spool`."""


class Call:
    """A recurring call: from one place, of the same operation with as many bytes."""

    __slots__ = ("before", "last", "text", "turns")

    def __init__(self, fields: str, turns: list[int] | None) -> None:
        """``turns`` has one number: how many calls its process group had so far; None for a message."""
        self.turns = turns
        self.last = self.before = 0
        """Its last two turns: they show which call was due when ranks that synchronize called different ones."""
        text = fields.encode().ljust(_TEXT_BYTES, b"\0")
        self.text = memoryview(text).cast("q") if len(text) == _TEXT_BYTES else None
        """None if it is too long for a slot."""


class CallsPage:
    """The last calls of a recording. For the training thread."""

    def __init__(self, spool: _Memory) -> None:
        self.numbers: Any = None
        """The page; None where storage is short: the rank's end is reported without them."""
        try:
            self.numbers = spool.shared(CALLS_PAGE, (CALL_SLOTS + OWN_SLOTS) * CALL_SLOT_BYTES)
        except OSError:
            pass
        self._number = self._own = 0
        self._written: list[Call | None] = [None] * (CALL_SLOTS + OWN_SLOTS)
        """Whose text each slot has."""

    def begin(self, call: Call, step: int, own: bool = False) -> int:
        """A call begins in ``step``, from Python, or DDP's ``own``. Returns what ``end`` wants."""
        # In every step, so in as few operations as can be.
        numbers, turns = self.numbers, call.turns
        self._number = number = self._number + 1
        if own:
            self._own += 1
            slot = CALL_SLOTS + self._own % OWN_SLOTS
        else:
            slot = number % CALL_SLOTS
        turn = last = before = 0
        if turns is not None:
            turns[0] = turn = turns[0] + 1
            last, before = call.last, call.before
            call.before, call.last = last, turn
        if numbers is None or call.text is None:
            return -1
        place = slot * _SLOT
        try:
            numbers[place + 1] = 0  # no call, until it is whole
            if self._written[slot] is not call:
                numbers[place + _TEXT_AT : place + _SLOT] = call.text
                self._written[slot] = call
            numbers[place] = 1
            numbers[place + 2] = turn
            numbers[place + 3] = last
            numbers[place + 4] = before
            numbers[place + 5] = step
            numbers[place + 1] = number
        except ValueError:  # the recording has ended
            self.numbers = None
            return -1
        return place

    def end(self, place: int) -> None:
        """The call has returned, and the rank no longer waits in it."""
        if place >= 0 and self.numbers is not None:
            try:
                self.numbers[place] = 0
            except ValueError:
                self.numbers = None


def lines_of_calls(page: bytes) -> bytes:
    """The content of a page as lines of ``calls.jsonl``."""
    lines = []
    for at in range(0, len(page) - CALL_SLOT_BYTES + 1, CALL_SLOT_BYTES):
        is_open, number, turn, last, before, step = _NUMBERS.unpack_from(page, at)
        if number:
            turns = (
                f"{CallField.TURN.next_key}{turn}{CallField.LAST_TURN.next_key}{last}"
                f"{CallField.TURN_BEFORE.next_key}{before}"
                if turn
                else ""
            )
            fields = page[at + _NUMBERS.size : at + CALL_SLOT_BYTES].rstrip(b"\0").decode(errors="replace")
            lines.append(
                f"{{{CallField.OPEN.key}{is_open}{CallField.NUMBER.next_key}{number}{turns}"
                f"{LineField.STEP.next_key}{step},{fields}}}\n"
            )
    return "".join(lines).encode()
