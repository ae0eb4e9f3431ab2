"""Reads another thread's stack while that thread cannot run.

In CPython 3.11 a frame lives on its thread's own stack, and a frame object is made for it on demand. A thread that
demands it for another thread must not be interrupted: once the other one runs on, the frame may be gone, and its memory
another frame's. Profilers that walk ``sys._current_frames()`` in a loop of Python crash the process for that reason,
rarely (https://github.com/DataDog/dd-trace-py/issues/13567, https://github.com/getsentry/sentry-python/issues/6119).

A thread can lose the GIL between any two steps of such a loop, but not inside a call of a function written in C, with
one exception: making a frame object can start the garbage collector, which calls destructors and ``gc.callbacks``, and
those may release the GIL. So one call into C stops the collector, finds the thread's frames, walks and reads them,
drops them, so that no object of the job is destroyed in this thread, and starts the collector again if it was on: no
other code can notice that it was off.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice, repeat, takewhile
from operator import attrgetter, methodcaller
from types import CodeType, FrameType
from typing import Any

from ..job import MOST_FRAMES

_DEADLOCKS = ((3, 11, 0), (3, 11, 5))
"""Versions, from and before, in which ``sys._current_frames`` may deadlock
(https://github.com/python/cpython/issues/106883)."""
_place: Any = attrgetter("f_code", "f_lineno")
_run: Any = methodcaller("__call__")
_as_it_was = (gc.isenabled, gc.enable)
"""What leaves the collector off, and what turns it on: indexed by whether it was on."""

Place = tuple[CodeType, int]


def can_be_read() -> bool:
    """Whether this Python can look at other threads' stacks without harm."""
    locked = getattr(sys, "_is_gil_enabled", lambda: True)()
    return bool(locked) and not _DEADLOCKS[0] <= sys.version_info[:3] < _DEADLOCKS[1]


def stack_of(thread: int) -> list[Place]:
    """Code and line of each frame of a thread, innermost first; empty where the thread is gone."""
    frames: list[FrameType] = []
    places: list[Place] = []
    done: list[Any] = []
    innermost: Iterator[Any] = map(methodcaller("get", thread), iter(sys._current_frames, None))
    # The list grows by the callers of the frames that it holds already; the outermost one's caller is None.
    walk = chain(islice(innermost, 1), map(getattr, frames, repeat("f_back"), repeat(None)))
    deepest = islice(takewhile(bool, walk), MOST_FRAMES)
    before = map(_as_it_was.__getitem__, map(_run, (gc.isenabled,)))
    reading = (
        gc.disable,
        partial(frames.extend, deepest),
        partial(places.extend, map(_place, frames)),
        frames.clear,
    )
    try:
        done.extend(chain(before, map(_run, chain(reading, islice(done, 1)))))
    except BaseException:
        if done:
            done[0]()
        raise
    return places
