"""Stacks as dumps and run directories have them → lines of the user's program, with those that called them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ddpdoctor.measure.places import CodeLine, Where

_LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python3[^/\\]*[/\\]|^<")
"""Files that are no part of the user's program."""
MOST_CALLERS = 8
"""Above a line; as many as stack samples keep."""
MOST_FRAMES = 64
"""Of a stack that a report carries."""
_FAULT_FRAME = re.compile(r'^\s+File "([^"\n]+)", line (\d+) in (.+)$', re.MULTILINE)
_FAULT_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+[^\n]*\n", re.MULTILINE)


def lines_of(frames: Any) -> list[CodeLine]:
    """``[[file, line, function], ...]`` of a run directory, the innermost first."""
    return [CodeLine(str(file), int(line or 0), str(function)) for file, line, function in _whole(frames)]


def _whole(frames: Any) -> list[list[Any]]:
    return [frame for frame in frames or () if isinstance(frame, list) and len(frame) == 3][:MOST_FRAMES]


def is_users(line: CodeLine) -> bool:
    """Whether it is of the user's program, as far as its path tells."""
    return _LIBRARY.search(line.file) is None


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


def faulting_stack(text: str) -> list[CodeLine]:
    """The thread that faulthandler names first, in what it wrote last: the one with the fault, or with Python's lock."""
    threads = _FAULT_THREAD.split(text)
    begins = [match.start() for match in _FAULT_THREAD.finditer(text)]
    if not begins:
        return []
    marks = [text.rfind(mark) for mark in ("Fatal Python error", "Timeout (")]
    last = max(marks)
    which = next((number for number, begin in enumerate(begins) if begin > last), 0)
    found = _FAULT_FRAME.findall(threads[which + 1])[:MOST_FRAMES]
    return [CodeLine(file, int(line), function) for file, line, function in found]
