"""The last collectives that the training thread called from Python, written where they outlive the process.

Gloo ends the process where ranks call collectives that do not fit together, and torchrun ends the others a moment later: nobody
can be asked then. So each call is written down as it begins, in memory that is shared with a file of the spool, and what was
written is marked once it has returned. Where nobody calls a collective from Python, nothing is written.
"""

from __future__ import annotations

import mmap
from typing import Any, Dict, Optional, Tuple

from ...rundir import CALL_SLOT_BYTES, CALL_SLOTS, CALLS_FILE, CallField, LineField, Spool

_OPENING = f"{{{CallField.OPEN.key}1{CallField.NUMBER.next_key}"
_OPEN_AT = _OPENING.index("1")
"""Place of the digit that says whether the call has returned."""
_STEP = LineField.STEP.next_key
_RETURNED = ord("0")


class Calls:
    """Of one recording. For the training thread."""

    def __init__(self, spool: Spool) -> None:
        self._memory: Optional[mmap.mmap] = None
        try:
            self._memory = spool.shared(CALLS_FILE, CALL_SLOTS * CALL_SLOT_BYTES)
        except OSError:
            pass  # storage is short: how the rank ended is told without them
        self._number = 0
        self.known: Dict[Tuple[Any, ...], str] = {}
        """For whoever calls ``begin``: the fields of calls that were made before, by what tells them apart."""

    def begin(self, step: int, fields: str) -> int:
        """A call with these fields of an event begins in ``step``. Returns what ``end`` wants."""
        memory = self._memory
        if memory is None:
            return -1
        self._number = number = self._number + 1
        data = f"{_OPENING}{number}{_STEP}{step},{fields}}}\n".encode()
        at = number % CALL_SLOTS * CALL_SLOT_BYTES
        if len(data) > CALL_SLOT_BYTES:
            return -1
        try:
            memory[at : at + CALL_SLOT_BYTES] = data.rjust(CALL_SLOT_BYTES)
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
