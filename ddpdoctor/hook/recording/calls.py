"""The last collectives that the training thread called from Python, or that DDP issued for it, written where they outlive the process.

Gloo ends the process where ranks call collectives that do not fit together, and torchrun ends the others a moment later: nobody
can be asked then. So each call is written down as it begins, in memory that is shared with a file of the spool, and what was
written is marked once it has returned. A backward pass in which DDP reduces gradients, and a broadcast of its buffers, are one call
each: all are counted by process group, so that what ranks called can be compared number by number.
"""

from __future__ import annotations

import mmap
from typing import Any, Dict, Optional, Tuple

from ...rundir import CALL_SLOT_BYTES, CALL_SLOTS, CALLS_FILE, OWN_SLOTS, CallField, LineField, Spool

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
        self._memory: Optional[mmap.mmap] = None
        try:
            self._memory = spool.shared(CALLS_FILE, (CALL_SLOTS + OWN_SLOTS) * CALL_SLOT_BYTES)
        except OSError:
            pass  # storage is short: how the rank ended is told without them
        self._number = self._own = 0
        self._turns: Dict[str, int] = {}
        """By process group, how many were called."""
        self._last: Dict[str, Tuple[int, int]] = {}
        """By the fields of a call, its last two turns: when a rank meets others in what it called, they tell what was due there."""
        self.known: Dict[Tuple[Any, ...], Tuple[str, str, str]] = {}
        """For whoever calls ``begin``: what it wants to know of calls that were made before, by what tells them apart."""

    def begin(self, step: int, fields: str, group: Optional[str]) -> int:
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

    def _write(self, slot: int, step: int, fields: str, group: Optional[str]) -> int:
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
