"""Stacks of dumps and run directories → lines of the user's program with their callers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddpdoctor.measure.places import CodeLine, Where
from ddpdoctor.rundir.packages import TextFrame, is_library

MOST_CALLERS = 8
"""Most callers of a line; stack samples keep as many."""
MOST_FRAMES = 64
"""Most frames of a stack in a report."""


def lines_of(frames: Any) -> list[CodeLine]:
    """``[[file, line, function], ...]`` of a run directory, the innermost first."""
    kept = [frame for frame in frames if _is_frame(frame)] if isinstance(frames, list) else []
    return [CodeLine(file, line or 0, function or "") for file, line, function in kept[:MOST_FRAMES]]


def _is_frame(frame: Any) -> bool:
    if not isinstance(frame, list) or len(frame) != 3:
        return False
    file, line, function = frame
    named = isinstance(file, str) and bool(file) and isinstance(function, str | None)
    return named and (line is None or (isinstance(line, int) and line >= 0))


def is_users(line: CodeLine) -> bool:
    """Whether it belongs to the user's program, by its path."""
    return not is_library(line.file)


def place_of(stack: Sequence[CodeLine]) -> Where | None:
    """The innermost line of the user's program in a stack, with its callers; None if there is none."""
    own = [line for line in stack if is_users(line)]
    if not own:
        return None
    first, *callers = own
    return Where(first.file, first.line, first.function, callers=tuple(callers[:MOST_CALLERS]))


def distinct_places(places: Sequence[Where | None]) -> list[Where]:
    """``places`` without None and duplicates."""
    seen: dict[tuple[str, int], Where] = {}
    for place in places:
        if place is not None:
            seen.setdefault((place.file, place.line), place)
    return list(seen.values())


def stack_of(frames: Sequence[TextFrame]) -> list[CodeLine]:
    """Frames of faulthandler's text, the innermost first."""
    return [CodeLine(file, line, function) for file, line, function in frames[:MOST_FRAMES]]
