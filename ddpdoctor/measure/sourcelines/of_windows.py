"""What stands behind the measurements of a profiler window: the innermost annotation, operator or Python
frame."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.facts import Where
from ddpdoctor.measure.numerics import Intervals, covered, union
from ddpdoctor.measure.taxonomy import DEVICE_WORK
from ddpdoctor.measure.window import WAITED_FOR, Window, launches, main_lane
from ddpdoctor.rundir.packages import WELL_KNOWN
from ddpdoctor.trace import classify

from .ranking import Frame, ranked

_T = TypeVar("_T")
_ON_DEVICE = frozenset(DEVICE_WORK)
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
_STANDS_OUT = 1.05
"""A line stands out on a slower device when its work takes longer by this factor than by what all work there does."""
_MOST = 3
_MOST_WINDOWS = 32
"""Of more ranks that share a cause so many, evenly spread, tell its lines and operators: the others would say the same."""
_LOOKED_UP = 200
"""Times for which frames are looked up, those of the greatest weight first."""


class TraceLines:
    """Implements ``costs.Lines`` for windows."""

    def __init__(self, windows: Sequence[Window]) -> None:
        self.windows = windows
        self._annotations: list[_Annotations | None] = [None] * len(windows)

    def syncs(self, kinds: Sequence[str]) -> list[Where]:
        """User frames in which collectives of these kinds were launched, then those in which the host waited for its
        device, by the idle time that followed."""
        found: Counter[Frame] = Counter()
        waited: Counter[Frame] = Counter()
        for window in _spread(self.windows):
            rows = [i for i, kind in enumerate(window.comms.kind) if kind in kinds]
            at = window.comms.issued[rows]
            for where, weight in _frames(window, (at, at + 1_000)):
                found[where] += weight
            for where, weight in _waiting_frames(window, kinds):
                waited[where] += weight
        launched = ranked(found)
        known = {(where.file, where.line) for where in launched}
        return [*launched, *(of for of in ranked(waited) if (of.file, of.line) not in known)][:_MOST]

    def work(
        self, components: Sequence[str], positions: Sequence[int] | None, steps: NDArray[np.int64]
    ) -> list[Where]:
        """User frames open during this kind of work; of what late ranks' devices do, those that take longer there than the
        rest does. None where all do alike: then no line is to blame, but what runs it."""
        late = self._all_or(positions)
        on_time = sorted(set(self._all_or(None)).difference(late))
        chosen, others = ([self.windows[position] for position in _spread(of)] for of in (late, on_time))
        found = _frames_of(chosen, components)
        if not others or not chosen[0].on_device or not _ON_DEVICE.issuperset(components):
            return ranked(found)
        scale = len(chosen) / len(others)
        usual = {where: scale * time for where, time in _frames_of(others, components).items()}
        slower = sum(found.values()) / max(sum(usual.values()), 1.0)
        over = {where: time - usual.get(where, 0.0) for where, time in found.items()}
        longer = {
            where: more
            for where, more in over.items()
            if more > 0 and found[where] > _STANDS_OUT * slower * usual.get(where, 0.0)
        }
        return ranked(longer)

    def operation(self, components: Sequence[str], positions: Sequence[int] | None) -> str | None:
        """The shortest annotation or operator that covers at least half of this kind of work on the
        culprits."""
        if "unmatched" in components:
            return None
        if set(components) <= WAITED_FOR:
            return _waiting_call(self.windows, components)
        names: Counter[str] = Counter()
        for position in _spread(self._all_or(positions)):
            window = self.windows[position]
            time = _time_of(window, components)
            name = _innermost(self._annotations_of(position), time, window.shifted_ns)
            if name is not None:
                names[name] += 1
        return names.most_common(1)[0][0] if names else None

    def _annotations_of(self, position: int) -> _Annotations:
        found = self._annotations[position]
        if found is None:
            found = self._annotations[position] = _annotations(self.windows[position])
        return found

    def _all_or(self, positions: Sequence[int] | None) -> Sequence[int]:
        return range(len(self.windows)) if positions is None else positions


def _spread(of: Sequence[_T]) -> Sequence[_T]:
    """At most ``_MOST_WINDOWS`` of them, evenly spread."""
    return (
        [of[round(i)] for i in np.linspace(0, len(of) - 1, _MOST_WINDOWS)] if len(of) > _MOST_WINDOWS else of
    )


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


def _frames_of(windows: Sequence[Window], components: Sequence[str]) -> Counter[Frame]:
    """User frames, and ns of this kind of work in each."""
    found: Counter[Frame] = Counter()
    for window in windows:
        if not _has_frames(window):
            continue
        time = _time_of(window, components)
        on_device = window.on_device and _ON_DEVICE.issuperset(components)
        for where, weight in _launching(window, time) if on_device else _frames(window, time):
            found[where] += weight
    return found


@dataclass(frozen=True)
class _Annotations:
    """The annotations on a window's training thread, but for the step marks; times on the trace's own clock."""

    names: list[str]
    name: NDArray[np.int64]
    """[N] position in ``names``."""
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    lengths: NDArray[np.int64]
    """[len(names)] ns that the annotations of each name take."""


def _annotations(window: Window) -> _Annotations:
    trace = window.trace
    marks = trace.name_mask(lambda n: classify.step_number(n) is not None)
    rows = np.flatnonzero(trace.category_mask("user_annotation") & ~marks & (trace.lane == main_lane(trace)))
    ids, name = np.unique(trace.name[rows], return_inverse=True)
    lengths = np.zeros(len(ids), np.int64)
    np.add.at(lengths, name, trace.duration_ns[rows])
    names = [trace.names[i] for i in ids.tolist()]
    return _Annotations(names, name, trace.start_ns[rows], trace.end_ns[rows], lengths)


def _innermost(found: _Annotations, time: Intervals, shift: int) -> str | None:
    """The annotation of the least total length of those that explain ``time``."""
    whole = float((time[1] - time[0]).sum())
    if not whole or not found.names:
        return None
    inside = np.bincount(
        found.name, covered(time, found.start + shift, found.end + shift), minlength=len(found.names)
    )
    explaining = np.flatnonzero(inside >= _EXPLAINS * whole)
    if not explaining.size:
        return None
    return found.names[int(explaining[np.argmin(found.lengths[explaining])])]


def _has_frames(window: Window) -> bool:
    return "python_function" in window.trace.categories


def _frames(window: Window, time: Intervals) -> list[tuple[Frame, int]]:
    """User frames (with_stack traces) and how long each, as the innermost one, covers the time."""
    start, end = np.asarray(time[0]), np.asarray(time[1])
    return _frames_at(window, (start + end) / 2 - window.shifted_ns, end - start)


def _frames_at(window: Window, times: NDArray[Any], weight: NDArray[Any]) -> list[tuple[Frame, int]]:
    """The innermost user frames open at these times of the trace's own clock, and the weight of each."""
    trace = window.trace
    if not _has_frames(window) or not len(times):
        return []
    rows = np.flatnonzero(trace.category_mask("python_function") & (trace.lane == main_lane(trace)))
    result: Counter[Frame] = Counter()
    start, end = trace.start_ns[rows], trace.end_ns[rows]
    heaviest = np.argsort(-weight)[:_LOOKED_UP]
    for at, of in zip(times.astype(np.int64)[heaviest], weight[heaviest], strict=True):
        open_rows = rows[(start <= at) & (at < end)]
        frames = (_FRAME.match(trace.name_of(row)) for row in open_rows[::-1])
        foreign = [f for f in frames if f and not any(part in f["file"] for part in _LIBRARY)]
        # A script may be named like a module of Python's own: it is taken where there is nothing else.
        frame = next((f for f in foreign if not _is_known(f["file"])), foreign[0] if foreign else None)
        if frame:
            result[frame["file"], int(frame["line"]), frame["function"]] += int(of)
    return list(result.items())


def _is_known(file: str) -> bool:
    """Whether a file, relative to the folder of Python's path that holds it (profiles name files so), is of the standard
    library's, or of a package that is nobody's own script."""
    name = file.partition("/")[0].removesuffix(".py")
    return name in sys.stdlib_module_names or name in WELL_KNOWN


def _launching(window: Window, time: Intervals) -> list[tuple[Frame, int]]:
    """User frames that launched what the device computes and copies in this time, and how long it takes: the host is
    elsewhere by then."""
    trace = window.trace
    device = trace.category_mask("kernel", "gpu_memcpy", "gpu_memset") & ~classify.communication_kernels(
        trace
    )
    rows = np.flatnonzero(device)
    middle = trace.start_ns[rows] + trace.duration_ns[rows] / 2 + window.shifted_ns
    place = np.searchsorted(time[0], middle, side="right") - 1
    rows = rows[(place >= 0) & (middle < time[1][np.maximum(place, 0)])] if len(time[0]) else rows[:0]
    calls = launches(trace, rows)
    rows, calls = rows[calls >= 0], calls[calls >= 0]
    return _frames_at(window, trace.start_ns[calls], trace.duration_ns[rows])


def _waits(window: Window, kinds: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(events, ns of idle time that follows from each): the calls of these kinds in which the host waited."""
    chosen = np.isin(window.waits.kind, kinds) & (window.waits.cost_ns > 0)
    return window.waits.row[chosen], window.waits.cost_ns[chosen]


def _waiting_frames(window: Window, kinds: Sequence[str]) -> list[tuple[Frame, int]]:
    """User frames in which the host waited for its device, and the idle time that follows from each."""
    rows, cost = _waits(window, kinds)
    return _frames_at(window, (window.trace.start_ns[rows] + window.trace.end_ns[rows]) / 2, cost)


def _waiting_call(windows: Sequence[Window], kinds: Sequence[str]) -> str | None:
    """The operator (``aten::item``), or without one the call of the runtime, whose waiting leads to most idle time."""
    found: Counter[str] = Counter()
    for window in windows:
        trace = window.trace
        rows, cost = _waits(window, kinds)
        if not len(rows):
            continue
        operators = np.flatnonzero(
            trace.category_mask("cpu_op") & trace.name_mask(lambda n: n.startswith("aten::"))
        )
        heaviest = np.argsort(-cost)[:_LOOKED_UP]
        for row, of in zip(rows[heaviest], cost[heaviest], strict=True):
            at = trace.start_ns[row]
            around = (trace.start_ns[operators] <= at) & (at < trace.end_ns[operators])
            around &= trace.lane[operators] == trace.lane[row]
            outermost = operators[around][np.argsort(trace.start_ns[operators[around]], kind="stable")][:1]
            found[trace.name_of(int(outermost[0] if len(outermost) else row))] += int(of)
    return found.most_common(1)[0][0] if found else None
