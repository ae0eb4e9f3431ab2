"""Stacks as dumps and run directories have them → lines of the user's program, with those that called them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddpdoctor.measure.places import CodeLine, Where
from ddpdoctor.rundir.fault_text import TextFrame
from ddpdoctor.rundir.packages import is_library

MOST_CALLERS = 8
"""Above a line; as many as stack samples keep."""
MOST_FRAMES = 64
"""Of a stack that a report carries."""


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
    """Whether it is of the user's program, as far as its path tells."""
    return not is_library(line.file)


def place_of(stack: Sequence[CodeLine]) -> Where | None:
    """The innermost line of the user's in a stack, with its callers."""
    own = [line for line in stack if is_users(line)]
    if not own:
        return None
    first, *callers = own
    return Where(first.file, first.line, first.function, callers=tuple(callers[:MOST_CALLERS]))


def distinct_places(places: Sequence[Where | None]) -> list[Where]:
    """``places`` without those that are there already."""
    seen: dict[tuple[str, int], Where] = {}
    for place in places:
        if place is not None:
            seen.setdefault((place.file, place.line), place)
    return list(seen.values())


def stack_of(frames: Sequence[TextFrame]) -> list[CodeLine]:
    """Frames of faulthandler's text, the innermost first."""
    return [CodeLine(file, line, function) for file, line, function in frames[:MOST_FRAMES]]
