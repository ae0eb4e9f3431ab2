"""Notes about a recording for the reader of a diagnosis, each one a sentence with a code.

The sentence is shown to users; code uses the note's code::

    Note("No GPU telemetry: NVML Shared Library Not Found (NVML).", NoteCode.NO_GPU)

Files contain the sentences and, in a parallel list, the codes (``docs/formats.md``). Older recordings have only the
sentences; :func:`recorded_notes` adds the codes that they would have today.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class NoteCode(str, Enum):
    """The consequence of a note."""

    TOLD = "told"
    """No consequence: the sentence is only shown."""
    UNREADABLE = "unreadable"
    """A file or folder of the recording exists but cannot be read, which explains why its data are missing."""
    NO_RANK = "no_rank"
    """No rank recorded anything; the launcher gives the reason."""
    NO_GPU = "no_gpu"
    """A host has no GPU that can be read. Its readings are not reported as missing if the job uses no GPU."""


@dataclass(frozen=True)
class Note:
    """A sentence, its code, and the ranks that it is about (empty: all, or no rank in particular)."""

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
    """The notes from a file's ``texts`` and ``codes``, one code per text; ``codes`` is [] in older recordings. A code of a later
    version that is unknown here has no consequence."""
    if len(codes) != len(texts):
        return [Note(text, _code_before_codes(text)) for text in texts]
    known = {code.value: code for code in NoteCode}
    return [Note(text, known.get(code, NoteCode.TOLD)) for text, code in zip(texts, codes)]


_BEGINNINGS = {"No GPU telemetry: ": NoteCode.NO_GPU, "no rank was recorded: ": NoteCode.NO_RANK}
"""Beginnings of the sentences that launchers wrote before there were codes. Do not add to it."""


def _code_before_codes(text: str) -> NoteCode:
    return next((code for begin, code in _BEGINNINGS.items() if text.startswith(begin)), NoteCode.TOLD)
