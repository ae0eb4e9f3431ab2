"""What stands behind the measurements of a profiler window: the innermost annotation, operator or Python
frame."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.trace import classify

from .facts import Where
from .intervals import Intervals, covered, union
from .window import Window, main_lane

_FRAME = re.compile(r"^(?P<file>.+?)\((?P<line>\d+)\): (?P<function>.+)$")
_LIBRARY = (
    "site-packages",
    "dist-packages",
    "/lib/python",
    "torch/",
    "threading.py",
    "contextlib.py",
    "<built-in",
)
_EXPLAINS = 0.5
"""An annotation explains a component when it covers this share of the component's time."""
_MOST = 3


class TraceLines:
    """Implements ``costs.Lines`` for windows."""

    def __init__(self, windows: Sequence[Window]) -> None:
        self.windows = windows

    def syncs(self, kinds: Sequence[str]) -> list[Where]:
        """User frames in which collectives of these kinds were launched."""
        found: Counter[tuple[str, int, str]] = Counter()
        for window in self.windows:
            rows = [i for i, kind in enumerate(window.comms.kind) if kind in kinds]
            at = window.comms.issued[rows]
            for where, weight in _frames(window, (at, at + 1_000)):
                found[where] += weight
        return _ranked(found)

    def work(
        self, components: Sequence[str], positions: Sequence[int] | None, steps: NDArray[np.int64]
    ) -> list[Where]:
        """User frames open during this kind of work."""
        found: Counter[tuple[str, int, str]] = Counter()
        for window in self._chosen(positions):
            for where, weight in _frames(window, _time_of(window, components)):
                found[where] += weight
        return _ranked(found)

    def operation(self, components: Sequence[str], positions: Sequence[int] | None) -> str | None:
        """The shortest annotation or operator that covers at least half of this kind of work on the
        culprits."""
        if "unmatched" in components:
            return None
        names: Counter[str] = Counter()
        for window in self._chosen(positions):
            name = _innermost(window, _time_of(window, components))
            if name is not None:
                names[name] += 1
        return names.most_common(1)[0][0] if names else None

    def _chosen(self, positions: Sequence[int] | None) -> list[Window]:
        return list(self.windows) if positions is None else [self.windows[p] for p in positions]


def _time_of(window: Window, components: Sequence[str]) -> Intervals:
    """When the window did these kinds of work; ``host`` is what no other component covers."""
    named = [window.sets[name] for name in components if name in window.sets]
    if "host" in components:
        others = [s for name, s in window.sets.items() if name not in components] + [
            (window.comms.start, window.comms.end)
        ]
        taken = union(np.concatenate([s[0] for s in others]), np.concatenate([s[1] for s in others]))
        edges = np.concatenate(([window.span[0]], taken[1])), np.concatenate((taken[0], [window.span[1]]))
        named.append(union(*edges))
    if not named:
        return union([], [])
    return union(np.concatenate([s[0] for s in named]), np.concatenate([s[1] for s in named]))


def _innermost(window: Window, time: Intervals) -> str | None:
    trace = window.trace
    whole = float((time[1] - time[0]).sum())
    if not whole:
        return None
    shift = window.shifted_ns
    mask = trace.category_mask("user_annotation") & (trace.lane == main_lane(trace))
    best: tuple[float, str] | None = None
    for name_id in np.unique(trace.name[mask]):
        name = trace.names[name_id]
        if classify.step_number(name) is not None:
            continue
        rows = mask & (trace.name == name_id)
        inside = float(covered(time, trace.start_ns[rows] + shift, trace.end_ns[rows] + shift).sum())
        length = float(trace.duration_ns[rows].sum())
        if inside >= _EXPLAINS * whole and (best is None or length < best[0]):
            best = (length, name)
    return best[1] if best else None


def _frames(window: Window, time: Intervals) -> list[tuple[tuple[str, int, str], int]]:
    """User frames (with_stack traces) and how long each, as the innermost one, covers the time."""
    trace = window.trace
    rows = np.flatnonzero(trace.category_mask("python_function") & (trace.lane == main_lane(trace)))
    if not len(rows) or not len(time[0]):
        return []
    shift = window.shifted_ns
    result: Counter[tuple[str, int, str]] = Counter()
    middles = ((np.asarray(time[0]) + np.asarray(time[1])) / 2 - shift).astype(np.int64)
    lengths = np.asarray(time[1]) - np.asarray(time[0])
    start, end = trace.start_ns[rows], trace.end_ns[rows]
    for at, length in zip(middles[np.argsort(-lengths)][:200], np.sort(lengths)[::-1][:200], strict=True):
        open_rows = rows[(start <= at) & (at < end)]
        for row in open_rows[::-1]:
            frame = _FRAME.match(trace.name_of(row))
            if frame and not any(part in frame["file"] for part in _LIBRARY):
                result[frame["file"], int(frame["line"]), frame["function"]] += int(length)
                break
    return list(result.items())


def _ranked(found: Counter[tuple[str, int, str]]) -> list[Where]:
    total = sum(found.values())
    return [
        Where(file, line, function, share=weight / total if total else None)
        for (file, line, function), weight in found.most_common(_MOST)
    ]
