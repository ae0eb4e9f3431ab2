"""The user's frames that were open at some time of a window (traces ``with_stack``)."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import Array, Intervals, Ints
from ddpdoctor.measure.places import CodeLine
from ddpdoctor.measure.taxonomy import SyncKind
from ddpdoctor.measure.window import Window, launches, main_lane
from ddpdoctor.rundir.packages import WELL_KNOWN
from ddpdoctor.trace import classify

from .callers import Way
from .ranking import Frame

_FRAME = re.compile(r"^(?P<file>.+?)\((?P<line>\d+)\): (?P<function>.+)$")
"""A Python frame, as the profiler names it: ``train.py(44): step``."""
_LIBRARY = (
    "site-packages",
    "dist-packages",
    "/lib/python",
    "torch/",
    "threading.py",
    "contextlib.py",
    "<built-in",
)
"""What the name of a frame's file contains that is not the user's."""
LOOKED_UP = 200
"""Times for which frames are looked up, those of the greatest weight first: each look passes over all frames of the trace, and
the rest would change the order of lines by nothing."""


def has_frames(window: Window) -> bool:
    """Whether the trace was made with stacks."""
    return "python_function" in window.trace.categories


def frames_during(window: Window, time: Intervals) -> Counter[Way]:
    """Ways to user frames, and how many ns each, as the innermost one, covers the time."""
    start, end = np.asarray(time[0]), np.asarray(time[1])
    return _frames_at(window, (start + end) / 2 - window.shifted_ns, end - start)


def frames_launching(window: Window, time: Intervals) -> Counter[Way]:
    """User frames that launched what the device computes and copies in this time, and how long it takes: the host is
    elsewhere by then."""
    trace = window.trace
    device = trace.category_mask("kernel", "gpu_memcpy", "gpu_memset") & ~classify.communication_kernels(
        trace
    )
    every = np.flatnonzero(device)
    middle = trace.start_ns[every] + trace.duration_ns[every] / 2 + window.shifted_ns
    place = np.searchsorted(time[0], middle, side="right") - 1
    within = (
        (place >= 0) & (middle < time[1][np.maximum(place, 0)])
        if len(time[0])
        else np.zeros(len(every), bool)
    )
    rows = every[within]
    calls = launches(trace, rows)
    launched = calls >= 0
    return _frames_at(window, trace.start_ns[calls[launched]], trace.duration_ns[rows[launched]])


def frames_waiting(window: Window, kinds: Sequence[SyncKind]) -> Counter[Way]:
    """User frames in which the host waited for its device, and the idle time that follows from each."""
    rows, cost_ns = waits_of(window, kinds)
    return _frames_at(window, (window.trace.start_ns[rows] + window.trace.end_ns[rows]) / 2, cost_ns)


def waits_of(window: Window, kinds: Sequence[str]) -> tuple[Ints, Array]:
    """(events, ns of idle time that follows from each): the calls of these kinds in which the host waited."""
    chosen = np.isin(window.waits.kind, kinds) & (window.waits.cost_ns > 0)
    return window.waits.row[chosen], window.waits.cost_ns[chosen]


def _frames_at(window: Window, times: NDArray[Any], weights: NDArray[Any]) -> Counter[Way]:
    """The innermost user frames open at these times of the trace's own clock, and the weight of each."""
    ways: Counter[Way] = Counter()
    trace = window.trace
    if not has_frames(window) or not len(times):
        return ways
    rows = np.flatnonzero(trace.category_mask("python_function") & (trace.lane == main_lane(trace)))
    start, end = trace.start_ns[rows], trace.end_ns[rows]
    heaviest = np.argsort(-weights)[:LOOKED_UP]
    moments = times.astype(np.int64)[heaviest]
    order = np.argsort(moments, kind="stable")
    first, until = (np.searchsorted(moments[order], edge) for edge in (start, end))
    open_frames: list[list[int]] = [[] for _ in moments]
    for frame in np.flatnonzero(until > first):
        for place in range(first[frame], until[frame]):
            open_frames[order[place]].append(rows[frame])
    for frames, weight in zip(open_frames, weights[heaviest], strict=True):
        way = _way_of_user([trace.name_of(row) for row in reversed(frames)])
        if way is not None:
            ways[way] += int(weight)
    return ways


def _way_of_user(names: Sequence[str]) -> Way | None:
    """The first of these frames, the innermost first, that is the user's, and the user's above it.

    A script may be named like a module of Python's own: such a one is taken where there is nothing else.
    """
    matches = (_FRAME.match(name) for name in names)
    foreign = [
        Frame(match["file"], int(match["line"]), match["function"])
        for match in matches
        if match and not any(part in match["file"] for part in _LIBRARY)
    ]
    users = [frame for frame in foreign if not _is_known(frame.file)] or foreign
    return (users[0], tuple(CodeLine(*frame) for frame in users[1:])) if users else None


def _is_known(file: str) -> bool:
    """Whether a file, relative to the folder of Python's path that holds it (profiles name files so), is of the standard
    library's, or of a package that is nobody's own script."""
    name = file.partition("/")[0].removesuffix(".py")
    return name in sys.stdlib_module_names or name in WELL_KNOWN
