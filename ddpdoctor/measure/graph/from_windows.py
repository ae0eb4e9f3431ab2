"""Build the dependency graph of the window from the profiler windows of all ranks.

On a device, segments follow the communication kernels: a rank's segment lasts from the end of its previous collective to the start
of its part in the next. The work of the segment is what its device (in a job on CPUs: its training thread) did in that time. A
bucket that is reduced during the backward pass therefore costs only the time for which the communication stream was idle.

In windows without step marks, optimizers that work on whole lists of tensors are recognized by their kernels. All such kernels between
two reductions of gradients, including gradient clipping and zeroing, are one update of the parameters. A step lasts from the end of one
update to the end of the next. The matched collective before an update gives it the same number on all ranks, wherever the windows begin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.align import align_and_match
from ddpdoctor.measure.numerics import EMPTY, Array, Ints, subtract, union, union_of
from ddpdoctor.measure.taxonomy import HOST_IDLE, INDEX, Component, LateCause, SyncKind
from ddpdoctor.measure.window import Window, launches
from ddpdoctor.trace import classify

from .cutting import cut_into_cycles, matched_collectives
from .graph import CycleGroup, Graph, RankSteps, Sync, excluded_steps, recorded_steps
from .segments import Segments, compute_timeline, cycle_group, idle_after, rest_component, work_in
from .standalone_times import issue_time_ns, standalone_data_of_windows, with_issue_times

Marks = Sequence[tuple[int, int, int]]


class _Tuning(msgspec.Struct, frozen=True):
    shortest_interval: float = 0.3
    """Share of the usual interval between updates. Kernels after a shorter interval are part of the same update, such as a norm that is
    reduced before it."""
    complete_step: float = 0.9
    """Share of the usual step that the window must contain before its first update, for that step to count as complete."""


_TUNING = _Tuning()


def with_steps_of_updates(windows: Sequence[Window], rows: Ints) -> Sequence[Window]:
    """Return the windows with steps derived from updates; unchanged if a rank's trace marks steps, or shows no device or no updates.
    ``rows`` [M, R]: the matched collectives."""
    if any(window.steps or not window.on_device for window in windows):
        return windows
    found = [_updates(window, rows[:, r]) for r, window in enumerate(windows)]
    if not all(len(preceding) for preceding, _ in found):
        return windows
    # The matched collectives after which at least half of the ranks have an update.
    places, counts = np.unique(np.concatenate([preceding for preceding, _ in found]), return_counts=True)
    preceding = places[2 * counts >= len(found)]
    if len(preceding) < 2:
        return windows
    return [
        replace(window, steps=_steps(window, preceding, *own))
        for window, own in zip(windows, found, strict=True)
    ]


def _updates(window: Window, matched: Ints) -> tuple[Ints, Ints]:
    """([U] the matched collective before each update, [U] when the last kernel of the update was launched, or when it ended if its launch
    was not recorded)."""
    trace = window.trace
    kernels = np.flatnonzero(trace.category_mask("kernel") & trace.name_mask(classify.is_optimizer_kernel))
    known = np.flatnonzero(matched >= 0)
    known = known[window.collectives.of_kind(SyncKind.GRADIENTS)[matched[known]]]
    if not len(kernels) or not len(known):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    kernels = kernels[np.argsort(trace.start_ns[kernels], kind="stable")]
    # By start times: the order of a collective's end and the kernel that waits for it is uncertain by microseconds.
    begins = window.collectives.start[matched[known]]
    order = np.argsort(begins, kind="stable")
    start = trace.start_ns[kernels] + window.shifted_ns
    before = np.searchsorted(begins[order], start, side="right") - 1
    last_kernels = np.flatnonzero((before >= 0) & np.append(before[1:] != before[:-1], True))
    calls = launches(trace, kernels[last_kernels])
    over = np.where(calls >= 0, trace.end_ns[calls], trace.end_ns[kernels[last_kernels]]) + window.shifted_ns
    # Drop updates that are too close to the next one.
    distance = np.diff(over)
    usual = np.median(distance[distance >= np.median(distance)]) if len(distance) else 0.0
    kept = np.append(distance >= _TUNING.shortest_interval * usual, np.full(min(len(over), 1), True))
    return known[order][before[last_kernels]][kept], over[kept]


def _steps(window: Window, agreed: Ints, preceding: Ints, over: Ints) -> Marks:
    """One rank's steps, numbered by the updates that most ranks have in common."""
    place = np.searchsorted(agreed, preceding)
    same = (place < len(agreed)) & (agreed[np.minimum(place, len(agreed) - 1)] == preceding)
    updates = list(zip(place[same].tolist(), over[same].tolist(), strict=True))
    steps = [
        (number, start, end) for (before, start), (number, end) in pairwise(updates) if number == before + 1
    ]
    if not steps:
        return []
    first, until = updates[0]
    usual = float(np.median([end - start for _, start, end in steps]))
    if until - window.span[0] >= _TUNING.complete_step * usual:
        steps.insert(0, (first, window.span[0], until))
    return steps


_IDLE = [INDEX[component] for component in HOST_IDLE]


def graph_of_windows(windows: Sequence[Window]) -> tuple[Graph, list[Window]]:
    """Align the windows (one per rank, ordered by rank), match their collectives and build the graph.

    Also returns the windows on the common clock, with two more components: unmatched communication, and time before the rank's window.
    """
    aligned, matched = align_and_match(windows)
    origin = min((window.span[0] for window in aligned), default=0)
    # From here on, times count from the first event of any rank.
    final = list(_with_comparable_optimizer(aligned))
    del aligned
    _replace_each(final, lambda window: _with_unmatched(window).shifted(-origin))
    usable = len(matched.rows) > 0 and matched.refused is None
    groups, final = _matched_cycles(final, matched.rows) if usable else ([], final)
    groups = groups or _unmatched_cycles(final)
    steps = [_rank_steps(window) for window in final]
    numbers = recorded_steps(steps)

    def reason(number: int) -> str:
        return "no collectives matched" if number - 1 in numbers else "no step before it in the window"

    graph = Graph(
        source="trace",
        ranks=tuple(window.rank for window in final),
        groups=groups,
        steps=steps,
        set_aside=excluded_steps(steps, groups, reason),
        matched=len(matched.rows) if usable else 0,
        unmatched=matched.unmatched,
        refused=matched.refused,
        clock_error_ns=matched.error_ns,
        coverage=matched.coverage if usable else None,
    )
    _replace_each(final, lambda window: window.shifted(origin))
    return graph, final


def _replace_each(windows: list[Window], change: Callable[[Window], Window]) -> None:
    """Changes each window in the list in turn, so that there is never a second copy of more than one of them."""
    for place, window in enumerate(windows):
        windows[place] = change(window)


def _with_unmatched(window: Window) -> Window:
    """The window with its exposed communication as a component, which counts for collectives that are not matched."""
    exposed = subtract(union(window.collectives.start, window.collectives.end), window.compute)
    return window.with_set(Component.UNMATCHED, subtract(exposed, union_of(EMPTY, *window.sets.values())))


def _matched_cycles(windows: Sequence[Window], rows: Ints) -> tuple[list[CycleGroup], list[Window]]:
    """(The cycles between the matched collectives ``rows`` [M, R], with the work that is hidden in waits for other ranks; the windows with
    the steps and the component that the cycles add)."""
    found = list(with_steps_of_updates(windows, rows))
    table = matched_collectives(found, rows)
    cut = cut_into_cycles(table)
    if cut.whole_window:
        # A rank's work before its first event is unknown.
        found = [window.with_set(Component.UNSEEN, union([0], [window.span[0]])) for window in found]
    timelines = [compute_timeline(window) for window in found] if cut.cycles else []
    groups = [cycle_group(syncs, cycles, table, found, timelines) for syncs, cycles in cut.cycles.items()]
    groups = [of.with_standalone(LateCause.DATA, standalone_data_of_windows(of, found)) for of in groups]
    if groups and all(window.on_device for window in found):
        times_ns = np.array([issue_time_ns(window) for window in found])
        groups = [with_issue_times(group, times_ns) for group in groups]
    return groups, found


def _with_comparable_optimizer(windows: Sequence[Window]) -> Sequence[Window]:
    """The windows. If some of them lack launches, which are needed to recognize the optimizer's work, it counts as other computation in
    all of them."""
    recorded = [bool(window.collectives.launch_known.any()) for window in windows if len(window.collectives)]
    if all(recorded) or not any(recorded):
        return windows
    joined = [
        union_of(*(window.sets.get(name, EMPTY) for name in (Component.FORWARD, Component.OPTIMIZER)))
        for window in windows
    ]
    return [
        window.with_set(Component.FORWARD, own).with_set(Component.OPTIMIZER, EMPTY)
        for window, own in zip(windows, joined, strict=True)
    ]


def _unmatched_cycles(windows: Sequence[Window]) -> list[CycleGroup]:
    """Cycles of windows without matched collectives: the steps of each rank by its own marks."""
    # Without step marks, the window is the step.
    marked = [window.steps or [(0, *window.span)] for window in windows]
    bounds = [[(number, start, end) for number, start, end in of_rank if end > start] for of_rank in marked]
    fewest = min((len(of_rank) for of_rank in bounds), default=0)
    if not fewest:
        return []
    begin = np.array([[of_rank[n][1] for of_rank in bounds] for n in range(fewest)], float)
    end = np.array([[of_rank[n][2] for of_rank in bounds] for n in range(fewest)], float)[:, None]
    segments = Segments(begin, end, end)
    work = work_in(segments, [(window.sets, rest_component(window)) for window in windows])
    idle = idle_after(windows, segments)
    device_idle = work[0][..., _IDLE].sum(axis=-1)
    return [
        CycleGroup(
            syncs=(Sync(SyncKind.STEP_END, SyncKind.STEP_END, tuple(range(len(windows)))),),
            steps=np.array([bounds[0][n][0] for n in range(fewest)], np.int64),
            begin=begin,
            arrival=end,
            end=end,
            work=work,
            message_bytes=np.full((fewest, 1), np.nan),
            idle_after={
                kind: _with_usual_first_cycle(of_kind, device_idle) for kind, of_kind in idle.items()
            },
        )
    ]


def _with_usual_first_cycle(idle: Array, most: Array) -> Array:
    """``idle`` [N, K, R] with the first cycle raised to the median of the others, at most to ``most`` [K, R].

    How long the hosts waited just before the window is unknown. They are assumed to have waited as long as in later steps.
    """
    usual = np.median(idle[1:], axis=0) if len(idle) > 1 else idle[0]
    first = np.maximum(idle[0], np.minimum(usual, most))
    return np.concatenate((first[None], idle[1:]))


def _rank_steps(window: Window) -> RankSteps:
    steps = window.steps
    unknown = np.full(len(steps), np.nan)
    bounds = np.array([(start, end) for _, start, end in steps], np.int64).reshape(-1, 2)
    forwards = np.diff(np.searchsorted(window.forwards, bounds), axis=1)[:, 0]
    return RankSteps(
        steps=np.array([number for number, _, _ in steps], np.int64),
        start=np.array([start for _, start, _ in steps], float),
        end=np.array([end for _, _, end in steps], float),
        samples=unknown,
        run_delay=unknown,
        cpu=unknown,
        micro_batches=np.where(forwards > 0, forwards, np.nan),
        elements=np.array([window.elements.get(number, np.nan) for number, _, _ in steps], float),
        batch=unknown,
    )
