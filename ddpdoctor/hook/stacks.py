"""Reading another thread's stack without letting it run meanwhile.

In CPython 3.11 a frame that returns is taken apart while it is still linked as the current one. Where that
lets go of the interpreter lock (an object whose end takes long), another thread can get hold of a frame
object whose memory is about to be used anew, and crash the process when it reads on later: profilers that
walk ``sys._current_frames()`` in a loop of Python do, rarely
(https://github.com/DataDog/dd-trace-py/issues/13567, https://github.com/getsentry/sentry-python/issues/6119).
A thread can lose the lock between any two steps of such a loop, but not inside a call of a function written
in C. So here one such call finds the thread's frames and walks them, and the next reads what they say; no
frame is kept.
"""

from __future__ import annotations

import sys
from itertools import chain, islice
from operator import attrgetter, itemgetter
from types import CodeType, FrameType
from typing import Any, Iterator, List, Tuple

MOST_FRAMES = 200
_DEADLOCKS = ((3, 11, 0), (3, 11, 5))
"""From and before: ``sys._current_frames`` may deadlock (https://github.com/python/cpython/issues/106883)."""
_caller: Any = attrgetter("f_back")
_place: Any = attrgetter("f_code", "f_lineno")

Place = Tuple[CodeType, int]


def can_be_read() -> bool:
    """Whether this Python can look at other threads' stacks without harm."""
    locked = getattr(sys, "_is_gil_enabled", lambda: True)()
    return bool(locked) and not _DEADLOCKS[0] <= sys.version_info[:3] < _DEADLOCKS[1]


def stack_of(thread: int) -> List[Place]:
    """Code and line of each frame of a thread, innermost first; empty where the thread is gone."""
    frames: List[FrameType] = []
    places: List[Place] = []
    current: Iterator[Any] = map(itemgetter(thread), iter(sys._current_frames, None))
    # The list grows by the callers of the frames that it holds already.
    found = islice(chain(islice(current, 1), map(_caller, frames)), MOST_FRAMES)
    read = map(_place, frames)
    try:
        frames.extend(found)
    except (AttributeError, KeyError):
        pass  # The outermost frame's caller is None; of a thread that is gone there is none.
    # No call between these two, after which the other thread could run.
    try:
        places.extend(read)
    except AttributeError:
        pass
    return places
