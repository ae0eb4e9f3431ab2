"""Stacks as dumps and run directories have them → lines of the user's program, with those that called them."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import Any

from ddpdoctor.measure.places import CodeLine, Where
from ddpdoctor.rundir.packages import is_library

MOST_CALLERS = 8
"""Above a line; as many as stack samples keep."""
MOST_FRAMES = 64
"""Of a stack that a report carries."""
_FAULT_FRAME = re.compile(r'^\s+File "([^"\n]+)", line (\d{1,9}) in (.+)$', re.MULTILINE)
_FATAL, _TIMEOUT, _CURRENT = "Fatal Python error", "Timeout (", "Current thread 0x"
_FAULT_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+[^\n]*\n", re.MULTILINE)

_FATAL_SIGNALS = {
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Floating point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
    "Segmentation fault": signal.SIGSEGV,
}
"""As faulthandler words them, before it lets them end the process."""


def fatal_signal(text: str) -> int | None:
    """The signal that ended a process, by what faulthandler wrote last; None where it wrote of none."""
    words = text[text.rfind(_FATAL) + len(_FATAL) :].split("\n", 1)[0] if _FATAL in text else ""
    return _FATAL_SIGNALS.get(words.removeprefix(": "))


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


def first_thread_stack(text: str) -> list[CodeLine]:
    """What Python's first thread was in when faulthandler last wrote, of which it writes last."""
    threads = _FAULT_THREAD.split(text)[1:]
    return _stack_in(threads[-1]) if threads else []


def _stack_in(thread: str) -> list[CodeLine]:
    found = _FAULT_FRAME.findall(thread)[:MOST_FRAMES]
    return [CodeLine(file, int(line), function) for file, line, function in found]


def faulting_stack(text: str) -> list[CodeLine]:
    """What the training thread was in when faulthandler last wrote: the thread with the fault, or where it wrote because Python's
    lock was kept, the thread that started Python, which it writes last."""
    fatal, timeout = text.rfind(_FATAL), text.rfind(_TIMEOUT)
    if max(fatal, timeout) < 0:
        return []
    told = text[max(fatal, timeout) :]
    current = told.rfind(_CURRENT)
    stack = []
    if fatal > timeout and current >= 0:
        stack = _stack_in(_FAULT_THREAD.split(told[current:])[1])
    # A thread that is none of Python's has none.
    return stack or first_thread_stack(told)
