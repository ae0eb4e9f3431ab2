"""Notes: what a reader of a diagnosis should know about a recording, each one a sentence with a code.

The sentence is for people; code decides by the note's code::

    Note("No GPU telemetry: NVML Shared Library Not Found (NVML).", NoteCode.NO_GPU)

In files a note is its sentence, and its code is next to it (``docs/formats.md``). Recordings made before there were
codes have the sentence alone: :func:`recorded_notes` gives those the code that they would have today.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class NoteCode(str, Enum):
    """What follows from a note."""

    TOLD = "told"
    """No consequence: the sentence is only shown."""
    UNREADABLE = "unreadable"
    """A file or folder of the recording is there and cannot be read: where nothing was recorded, that is why."""
    NO_RANK = "no_rank"
    """The launcher saw no rank record anything, and says why."""
    NO_GPU = "no_gpu"
    """A host has no GPU whose readings can be taken: they are not missed if the job uses none."""


@dataclass(frozen=True)
class Note:
    """One sentence, what follows from it, and the ranks that it is about (none: all, or no rank in particular)."""

    text: str
    code: NoteCode = NoteCode.TOLD
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.text

    def of(self, whom: str) -> Note:
        """The note with a prefix: "Host a: ..."."""
        return dataclasses.replace(self, text=f"{whom}: {self.text}")

    def of_rank(self, rank: int) -> Note:
        """The note about a rank."""
        return dataclasses.replace(self.of(f"Rank {rank}"), ranks=(rank,))


def recorded_notes(texts: Sequence[str], codes: Sequence[str]) -> list[Note]:
    """The notes of a file that has ``texts``, and ``codes`` one for one; of a recording without codes these are [].

    A code that only a later version knows is one of those from which nothing follows here.
    """
    if len(codes) != len(texts):
        return [Note(text, _code_before_codes(text)) for text in texts]
    known = {code.value: code for code in NoteCode}
    return [Note(text, known.get(code, NoteCode.TOLD)) for text, code in zip(texts, codes)]


_BEGINNINGS = {"No GPU telemetry: ": NoteCode.NO_GPU, "no rank was recorded: ": NoteCode.NO_RANK}
"""How sentences began that launchers wrote before they wrote codes. Never to be added to."""


def _code_before_codes(text: str) -> NoteCode:
    return next((code for begin, code in _BEGINNINGS.items() if text.startswith(begin)), NoteCode.TOLD)
