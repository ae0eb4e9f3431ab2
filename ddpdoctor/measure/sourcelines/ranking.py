"""The user's source lines, ranked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ddpdoctor.measure.places import CodeLine, Where

MOST_LINES = 3
"""Lines that are told of one cause: a finding names where to look, and who looks there sees the rest."""


class Frame(NamedTuple):
    """A line of the user's code, and the function it is in."""

    file: str
    line: int
    function: str


def frame_of(place: CodeLine) -> Frame:
    """The line and its function, without what was measured there."""
    return Frame(place.file, place.line, place.function)


def ranked(weights: Mapping[Frame, float]) -> list[Where]:
    """The lines of most weight, most first, each with its share of all."""
    total = sum(weights.values())
    most = sorted(weights.items(), key=lambda item: -item[1])[:MOST_LINES]
    return [
        Where(frame.file, frame.line, frame.function, share=weight / total if total else None)
        for frame, weight in most
    ]


def joined(first: list[Where], others: list[Where]) -> list[Where]:
    """The ``first`` lines, then those ``others`` that are not among them, no more than are told."""
    known = {(where.file, where.line) for where in first}
    return [*first, *(where for where in others if (where.file, where.line) not in known)][:MOST_LINES]
