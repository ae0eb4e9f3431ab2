"""The exception that the main thread did not catch, and those it came from."""

from __future__ import annotations

import os
import sys
from typing import Any, Dict, List, Optional

from ..guard import text_of
from .whereabouts import MOST_TOLD, Frame

_MOST_CHAINED = 6
"""Exceptions told: the one that was raised last, and those that led to it."""
_MOST_LETTERS = 2000
"""Of a message: that of an error in a kernel's compilation has thousands."""


_ending: List[BaseException] = []
"""That which is known to end the process, from whoever has caught it to that end."""


def ends_by(error: BaseException) -> None:
    """The process ends by this exception, although nobody will find it at the end."""
    _ending[:] = [error]


def uncaught() -> Optional[BaseException]:
    """That which ends, or has ended, the main thread; None where there is none. A prompt keeps errors that it goes on from."""
    if _ending:
        return _ending[0]
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if not isinstance(error, BaseException) or hasattr(sys, "ps1"):
        return None
    # One that C code printed, called from Python, and that nobody died of, has frames above it.
    trace = error.__traceback__
    return None if trace is not None and trace.tb_frame.f_back is not None else error


def described(error: BaseException) -> List[Dict[str, Any]]:
    """The exception, and those before it, each with its relation to the one that stands before it in the list."""
    found: List[Dict[str, Any]] = []
    seen = set()
    relation: Optional[str] = None
    current: Optional[BaseException] = error
    while current is not None and id(current) not in seen and len(found) < _MOST_CHAINED:
        seen.add(id(current))
        document: Dict[str, Any] = {
            "type": type(current).__name__[:200],
            "message": text_of(current)[:_MOST_LETTERS],
            "frames": _frames(current),
        }
        if relation is not None:
            document["relation"] = relation
        found.append(document)
        if current.__cause__ is not None:
            relation, current = "cause", current.__cause__
        else:
            relation, current = "context", None if current.__suppress_context__ else current.__context__
    return found


def _frames(error: BaseException) -> List[Frame]:
    """Innermost first."""
    frames: List[Frame] = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        name = code.co_filename
        function = getattr(code, "co_qualname", code.co_name)
        frames.append([name if name.startswith("<") else os.path.abspath(name), trace.tb_lineno, function])
        trace = trace.tb_next
    return frames[::-1][:MOST_TOLD]
