"""Source lines from profiler windows: Python frames (traces ``with_stack``), annotations (``record_function``), operators."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import (
    EMPTY,
    Array,
    Intervals,
    Ints,
    Mask,
    covered,
    holds,
    intersect,
    place_in,
    total,
    union,
    union_of,
)
from ddpdoctor.measure.phases import Gap
from ddpdoctor.measure.places import CodeLine, Stack, Where
from ddpdoctor.measure.taxonomy import DEVICE_WORK, Component, SyncKind
from ddpdoctor.measure.window import DEVICE, WAITED_FOR, Window, launches, main_lane
from ddpdoctor.rundir.packages import WELL_KNOWN
from ddpdoctor.trace import RankTrace, classify

from .gaps import MainGap, gaps_of_window, lies_in_gaps, main_gap
from .ranking import SourceLines, by_line, chosen_and_others, joined, ranked, with_heaviest

_MIN_OPERATOR_SHARE = 0.1
"""An operator is reported if it takes at least this share of a component's time."""
_MOST_OPERATORS = 3
"""Most operators reported."""
_ENGINE_PREFIX = "autograd::engine::evaluate_function: "
"""Prefix of autograd's engine before the name of the function that it runs."""
_MIN_EXPLAINED_SHARE = 0.5
"""An annotation explains a component if it covers at least this share of the component's time."""


def annotations_of(window: Window) -> Ints:
    """[N] rows of the annotations on a window's training thread, without step marks."""
    trace = window.trace
    marks = trace.name_mask(lambda n: classify.step_number(n) is not None)
    return np.flatnonzero(trace.category_mask("user_annotation") & ~marks & (trace.lane == main_lane(trace)))


def explaining_annotation(window: Window, annotations: Ints, time: Intervals) -> str | None:
    """Among the ``annotations`` [N] that explain ``time`` (on the run's common clock), the name with the shortest total length."""
    trace, rows, whole_ns = window.trace, annotations, total(time)
    if not whole_ns or not rows.size:
        return None
    start, duration = trace.start_ns[rows] + window.shifted_ns, trace.duration_ns[rows]
    ids, name = np.unique(trace.name[rows], return_inverse=True)
    inside, lengths = (np.bincount(name, ns) for ns in (covered(time, start, start + duration), duration))
    found = np.flatnonzero(inside >= _MIN_EXPLAINED_SHARE * whole_ns)
    return trace.names[int(ids[found[np.argmin(lengths[found])]])] if found.size else None


_FRAME = re.compile(r"^(?P<file>.+?)\((?P<line>\d+)\): (?P<function>.+)$")
"""A Python frame as named by the profiler: ``train.py(44): step``."""
_LIBRARY_FOLDERS = ("site-packages/", "dist-packages/", "/lib/python", "/torch/")
"""Parts of the paths of frames that are not the user's. The profiler names files relative to their folder on Python's path."""
_LIBRARY_FILES = ("threading.py", "contextlib.py")
"""Names of such files."""
MOST_LOOKUPS = 200
"""Most times for which frames are looked up, the heaviest first. The rest would not change the order of lines, and each look-up
scans all frames of the trace."""


def has_frames(window: Window) -> bool:
    """Whether the trace was recorded with stacks."""
    return "python_function" in window.trace.categories


def frames_during(window: Window, time: Intervals) -> Counter[Stack]:
    """Stacks of user frames, and the ns of ``time`` in each."""
    start, end = np.asarray(time[0]), np.asarray(time[1])
    return _frames_at(window, (start + end) / 2 - window.shifted_ns, end - start)


def frames_launching(window: Window, time: Intervals) -> Counter[Stack]:
    """Stacks of user frames that launched the device's computation and copies in ``time``, and their ns. By then the host
    itself runs later code."""
    trace = window.trace
    every = np.flatnonzero(trace.category_mask(*DEVICE) & ~classify.communication_kernels(trace))
    rows = every[holds(time, trace.start_ns[every] + trace.duration_ns[every] / 2 + window.shifted_ns)]
    calls = launches(trace, rows)
    launched = calls >= 0
    return _frames_at(window, trace.start_ns[calls[launched]], trace.duration_ns[rows[launched]])


def frames_waiting(window: Window, kinds: Sequence[SyncKind]) -> Counter[Stack]:
    """Stacks of user frames in which the host waited for its device, and the ns of device idle time caused by each."""
    rows, cost_ns = waits_of(window, kinds)
    return _frames_at(window, (window.trace.start_ns[rows] + window.trace.end_ns[rows]) / 2, cost_ns)


def waits_of(window: Window, kinds: Sequence[str]) -> tuple[Ints, Array]:
    """(rows of the calls of these kinds in which the host waited, ns of device idle time caused by each)."""
    chosen = np.isin(window.waits.kind, kinds) & (window.waits.cost_ns > 0)
    return window.waits.row[chosen], window.waits.cost_ns[chosen]


def _frames_at(window: Window, times: NDArray[Any], weights: NDArray[Any]) -> Counter[Stack]:
    """Stacks of the user frames open at ``times`` (the trace's own clock), and the weight of each."""
    stacks: Counter[Stack] = Counter()
    trace = window.trace
    if not has_frames(window) or not len(times):
        return stacks
    rows = np.flatnonzero(trace.category_mask("python_function") & (trace.lane == main_lane(trace)))
    start, end = trace.start_ns[rows], trace.end_ns[rows]
    heaviest = np.argsort(-weights, kind="stable")[:MOST_LOOKUPS]
    moments = times.astype(np.int64)[heaviest]
    order = np.argsort(moments, kind="stable")
    first, until = (np.searchsorted(moments[order], edge) for edge in (start, end))
    open_frames: list[list[int]] = [[] for _ in moments]
    for frame in np.flatnonzero(until > first):
        for place in range(first[frame], until[frame]):
            open_frames[order[place]].append(rows[frame])
    for frames, weight in zip(open_frames, weights[heaviest], strict=True):
        if stack := _user_frames([trace.name_of(row) for row in reversed(frames)]):
            stacks[stack] += int(weight)
    return stacks


def _user_frames(names: Sequence[str]) -> Stack:
    """The user's frames among ``names``, the innermost first.

    Frames of files named like a module of the standard library or a well-known package are dropped, unless there are no others:
    a script may have such a name.
    """
    matches = (_FRAME.match(name) for name in names)
    foreign = [
        CodeLine(match["file"], int(match["line"]), match["function"])
        for match in matches
        if match and not _is_library(match["file"])
    ]
    modules = [line.file.partition("/")[0].removesuffix(".py") for line in foreign]
    own = [
        line
        for line, module in zip(foreign, modules, strict=True)
        if module not in sys.stdlib_module_names and module not in WELL_KNOWN
    ]
    return tuple(own or foreign)


def _is_library(file: str) -> bool:
    in_folder = any(part in f"/{file}" for part in _LIBRARY_FOLDERS)
    return in_folder or file.startswith("<built-in") or file.rpartition("/")[2] in _LIBRARY_FILES


_T = TypeVar("_T")
_MIN_SLOWDOWN_RATIO = 1.05
"""A line is reported on a slower device if its slowdown is more than this factor times that of all work there: times of equal
kernels repeat to within 1 to 2 %."""
_MOST_WINDOWS = 32
"""Most ranks whose lines and operators are read, evenly spread; more would not change the result."""
_LAUNCH_NS = 1_000
"""Time after a launch in which the frame that made it is still open."""


class WindowSourceLines(SourceLines):
    """Source lines from profiler windows. ``logged``: source lines of the same ranks' step logs, and the steps to count there; used
    for host work outside operators, which a window without stacks does not show."""

    def __init__(self, windows: Sequence[Window], logged: tuple[SourceLines, Ints] | None = None) -> None:
        self.windows = windows
        self._logged = None if any(map(has_frames, windows)) else logged
        self._annotations = cache(lambda position: annotations_of(windows[position]))

    def syncs(self, kinds: Sequence[SyncKind]) -> list[Where]:
        """User frames that launched collectives of these kinds, then those in which the host waited for its device, by the idle
        time that followed."""
        launched: Counter[Stack] = Counter()
        waited: Counter[Stack] = Counter()
        for window in _evenly_spread(self.windows):
            rows = [row for row, kind in enumerate(window.collectives.kind) if kind in kinds]
            issued = window.collectives.issued[rows]
            launched.update(frames_during(window, (issued, issued + _LAUNCH_NS)))
            waited.update(frames_waiting(window, kinds))
        return joined(_heaviest(launched), _heaviest(waited))

    def work(
        self,
        components: Sequence[Component],
        positions: Sequence[int] | None,
        steps: Ints,
        fallback_steps: Ints | None = None,
    ) -> list[Where]:
        """User frames open during this kind of work. For device work of late ranks, only frames with a larger slowdown than that of all
        work there; [] if all work is equally slower, because then the device is the cause."""
        if self._logged is not None and Component.HOST in components:
            logged, run_steps = self._logged
            return logged.work([Component.HOST], positions, run_steps)
        chosen, others = self._chosen_and_others(positions)
        found = self.main_gap(components, positions, steps)
        gap = None if found is None else found.gap
        stacks = _stacks_of(chosen, components, gap)
        if not others or not (_is_device_work(chosen[0], components) or (chosen[0].on_device and gap)):
            return _heaviest(stacks)
        usual = by_line(_stacks_of(others, components, gap))
        slower = _slower_lines(by_line(stacks), usual, len(chosen) / len(others))
        return with_heaviest(ranked(slower), stacks)

    def main_gap(
        self, components: Sequence[Component], positions: Sequence[int] | None, steps: Ints
    ) -> MainGap | None:
        """The main gap over all steps of the windows; ``steps`` is not used."""
        if not lies_in_gaps(components):
            return None
        both = self._chosen_and_others(positions)
        own, theirs = ([gaps_of_window(each, _time_of(each, components)) for each in some] for some in both)
        return main_gap(own, theirs, components)

    def operation(
        self, components: Sequence[Component | SyncKind], positions: Sequence[int] | None
    ) -> str | None:
        """The shortest annotation or operator that covers at least half of this kind of work on these ranks."""
        if not components or Component.UNMATCHED in components:
            return None
        if set(components) <= WAITED_FOR:
            return _waiting_call(self.windows, components)
        names: Counter[str] = Counter()
        for position in _evenly_spread(chosen_and_others(positions, len(self.windows))[0]):
            time = _time_of(self.windows[position], components)
            name = explaining_annotation(self.windows[position], self._annotations(position), time)
            if name is not None:
                names[name] += 1
        return names.most_common(1)[0][0] if names else None

    def operators(self, components: Sequence[Component]) -> list[str]:
        """From the outermost operators of each thread, such as the training thread and autograd's."""
        names: Counter[str] = Counter()
        whole_ns = 0.0
        for window in _evenly_spread(self.windows):
            trace, time = window.trace, _time_of(window, components)
            rows = _outermost(trace, trace.category_mask("cpu_op"))
            if not rows.size:
                continue
            start = trace.start_ns[rows] + window.shifted_ns
            whole_ns += total(time)
            ids, first, name = np.unique(trace.name[rows], return_index=True, return_inverse=True)
            spent = np.bincount(name, covered(time, start, start + trace.duration_ns[rows]))
            # Of operators with equal times, the first one counts.
            for place in np.argsort(first, kind="stable"):
                names[trace.names[ids[place]].removeprefix(_ENGINE_PREFIX)] += spent[place]
        return [
            name
            for name, spent_ns in names.most_common(_MOST_OPERATORS)
            if spent_ns >= _MIN_OPERATOR_SHARE * whole_ns
        ]

    def _chosen_and_others(self, positions: Sequence[int] | None) -> tuple[list[Window], list[Window]]:
        chosen, others = map(_evenly_spread, chosen_and_others(positions, len(self.windows)))
        return [self.windows[position] for position in chosen], [
            self.windows[position] for position in others
        ]


def _evenly_spread(items: Sequence[_T]) -> Sequence[_T]:
    """At most ``_MOST_WINDOWS`` of the items, evenly spread."""
    if len(items) <= _MOST_WINDOWS:
        return items
    return [items[round(place)] for place in np.linspace(0, len(items) - 1, _MOST_WINDOWS)]


def _time_of(window: Window, components: Sequence[str]) -> Intervals:
    """Times of these kinds of work; ``host`` is the time that no other component covers."""
    named = [window.sets[name] for name in components if name in window.sets]
    if Component.HOST in components:
        others = [times for name, times in window.sets.items() if name not in components]
        covered_times = union_of(*others, (window.collectives.start, window.collectives.end))
        edges = (
            np.concatenate(([window.span[0]], covered_times[1])),
            np.concatenate((covered_times[0], [window.span[1]])),
        )
        named.append(union(*edges))
    return union_of(*named) if named else EMPTY


def _is_device_work(window: Window, components: Sequence[Component]) -> bool:
    """Whether this kind of work runs on a device, launched earlier by the host."""
    return window.on_device and set(DEVICE_WORK).issuperset(components)


def _heaviest(stacks: Mapping[Stack, float]) -> list[Where]:
    return with_heaviest(ranked(by_line(stacks)), stacks)


def _stacks_of(
    windows: Sequence[Window], components: Sequence[Component], gap: Gap | None = None
) -> Counter[Stack]:
    """Stacks of user frames, and ns of this kind of work in each, optionally only in one ``gap`` between phases."""
    stacks: Counter[Stack] = Counter()
    for window in windows:
        if not has_frames(window):
            continue
        on_device = [component for component in components if _is_device_work(window, [component])]
        on_host = [component for component in components if component not in on_device]
        for kinds, stacks_in in ((on_device, frames_launching), (on_host, frames_during)):
            if kinds:
                time = _time_of(window, kinds)
                within = time if gap is None else intersect(time, window.phase_gaps.get(gap, EMPTY))
                stacks.update(stacks_in(window, within))
    return stacks


def _slower_lines(
    late: Mapping[CodeLine, float], others: Mapping[CodeLine, float], scale: float
) -> dict[CodeLine, float]:
    """Lines that are slower on late devices by more than all work there, with their excess in ns. ``scale``: late windows per other
    window."""
    usual = {line: scale * time for line, time in others.items()}
    all_slower = sum(late.values()) / max(sum(usual.values()), 1.0)
    return {
        line: time - usual.get(line, 0.0)
        for line, time in late.items()
        if time - usual.get(line, 0.0) > 0 and time > _MIN_SLOWDOWN_RATIO * all_slower * usual.get(line, 0.0)
    }


def _waiting_call(windows: Sequence[Window], kinds: Sequence[str]) -> str | None:
    """Name of the operator (``aten::item``), or else the runtime call, whose waits cause the most idle time."""
    calls: Counter[str] = Counter()
    for window in windows:
        trace = window.trace
        rows, cost_ns = waits_of(window, kinds)
        if not len(rows):
            continue
        heaviest = np.argsort(-cost_ns, kind="stable")[:MOST_LOOKUPS]
        for row, cost in zip(_operators_at(trace, rows[heaviest]), cost_ns[heaviest], strict=True):
            calls[trace.name_of(int(row))] += int(cost)
    return calls.most_common(1)[0][0] if calls else None


def _outermost(trace: RankTrace, operators: Mask) -> Ints:
    """[N] rows of the ``operators`` that are inside no other one of their thread."""
    found = [np.zeros(0, np.int64)]
    for lane in np.unique(trace.lane[operators]):
        rows = np.flatnonzero(operators & (trace.lane == lane))
        before_ns = np.maximum.accumulate(trace.end_ns[rows])[:-1]
        found.append(rows[np.concatenate(([True], trace.start_ns[rows][1:] >= before_ns))])
    return np.concatenate(found)


def _operators_at(trace: RankTrace, rows: Ints) -> Ints:
    """[N] for each host event, torch's outermost operator open in its thread at its start, or else the event itself."""
    found = rows.copy()
    operators = trace.category_mask("cpu_op") & trace.name_mask(lambda n: n.startswith("aten::"))
    outermost = _outermost(trace, operators & np.isin(trace.lane, trace.lane[rows]))
    for lane in np.unique(trace.lane[rows]):
        of_lane = outermost[trace.lane[outermost] == lane]
        asked = np.flatnonzero(trace.lane[rows] == lane)
        place = place_in((trace.start_ns[of_lane], trace.end_ns[of_lane]), trace.start_ns[rows[asked]])
        found[asked[place >= 0]] = of_lane[place[place >= 0]]
    return found
