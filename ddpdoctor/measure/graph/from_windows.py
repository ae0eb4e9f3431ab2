"""Profiler windows of all ranks → the dependency graph of the window.

On a device the chain of communication kernels is followed: a rank's segment runs from the end of its previous collective to the start
of its own part in the next. What its device (or, for a job on CPUs, its training thread) did in that time is the work of the segment. A
bucket that is reduced during the backward pass therefore costs only the time for which the communication stream was idle.

Windows without step marks: an optimizer that works on whole lists of tensors is recognised by its kernels.

What those kernels do between two reductions of gradients is one update of the parameters, with the clipping before it and the zeroing
after it; a step lasts from the end of one update to the end of the next. Updates have the same number on all ranks, by the matched
collective after which each comes, independently of where the windows begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.align import align_and_match
from ddpdoctor.measure.numerics import EMPTY, Array, Ints, subtract, union, union_of
from ddpdoctor.measure.taxonomy import HOST_IDLE, INDEX, Component, LateCause, SyncKind
from ddpdoctor.measure.window import Window, launches
from ddpdoctor.trace import classify

from .cutting import Cut, cut_into_cycles, matched_collectives
from .graph import CycleGroup, Graph, RankSteps, Sync, excluded_steps, recorded_steps
from .segments import Segments, compute_timeline, cycle_group, idle_after, rest_component, work_in
from .standalone_times import issue_time_ns, standalone_data_of_windows, with_issue_times

Marks = Sequence[tuple[int, int, int]]


class _Tuning(msgspec.Struct, frozen=True):
    shortest: float = 0.3
    """Share of the usual distance between updates: what comes sooner is part of the same update, such as a norm that is reduced before
    it."""
    whole: float = 0.9
    """Share of the usual step that a window must show before its first update for that step to count as whole."""


_TUNING = _Tuning()


def with_steps_of_updates(windows: Sequence[Window], rows: Ints) -> Sequence[Window]:
    """The windows with steps by updates, where no rank's trace marks steps; ``rows`` [M, R] are the matched collectives."""
    if any(window.steps or not window.on_device for window in windows):
        return windows
    found = [_updates(window, rows[:, r]) for r, window in enumerate(windows)]
    if not all(len(behind) for behind, _ in found):
        return windows
    # Matched collectives after which at least half of the ranks have an update.
    places, counts = np.unique(np.concatenate([behind for behind, _ in found]), return_counts=True)
    behind = places[2 * counts >= len(found)]
    if len(behind) < 2:
        return windows
    return [
        replace(window, steps=_steps(window, behind, *own))
        for window, own in zip(windows, found, strict=True)
    ]


def _updates(window: Window, matched: Ints) -> tuple[Ints, Ints]:
    """([U] the matched collective after which each update comes, [U] when its last kernel ended; where launches were recorded, when
    that was launched)."""
    trace = window.trace
    kernels = np.flatnonzero(trace.category_mask("kernel") & trace.name_mask(classify.is_optimizer_kernel))
    known = np.flatnonzero(matched >= 0)
    known = known[window.collectives.of_kind(SyncKind.GRADIENTS)[matched[known]]]
    if not len(kernels) or not len(known):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    kernels = kernels[np.argsort(trace.start_ns[kernels], kind="stable")]
    # By their starts: the order of a collective's end and the kernel that waits for it is uncertain by microseconds.
    begins = window.collectives.start[matched[known]]
    order = np.argsort(begins, kind="stable")
    start = trace.start_ns[kernels] + window.shifted_ns
    before = np.searchsorted(begins[order], start, side="right") - 1
    lasts = np.flatnonzero((before >= 0) & np.append(before[1:] != before[:-1], True))
    calls = launches(trace, kernels[lasts])
    over = np.where(calls >= 0, trace.end_ns[calls], trace.end_ns[kernels[lasts]]) + window.shifted_ns
    # Without the updates that are too close to the next one to be a step.
    distance = np.diff(over)
    usual = np.median(distance[distance >= np.median(distance)]) if len(distance) else 0.0
    kept = np.append(distance >= _TUNING.shortest * usual, np.full(min(len(over), 1), True))
    return known[order][before[lasts]][kept], over[kept]


def _steps(window: Window, agreed: Ints, behind: Ints, over: Ints) -> Marks:
    """One rank's steps, numbered by the updates that the ranks agree on."""
    place = np.searchsorted(agreed, behind)
    same = (place < len(agreed)) & (agreed[np.minimum(place, len(agreed) - 1)] == behind)
    updates = list(zip(place[same].tolist(), over[same].tolist(), strict=True))
    steps = [
        (number, start, end) for (before, start), (number, end) in pairwise(updates) if number == before + 1
    ]
    if not steps:
        return []
    first, until = updates[0]
    usual = float(np.median([end - start for _, start, end in steps]))
    if until - window.span[0] >= _TUNING.whole * usual:
        steps.insert(0, (first, window.span[0], until))
    return steps


_IDLE = [INDEX[component] for component in HOST_IDLE]


def graph_of_windows(windows: Sequence[Window]) -> tuple[Graph, list[Window]]:
    """Align, match and build; one window per rank, ordered by rank.

    Also returns the windows on the common clock, with two components that need all windows: unmatched communication and unrecorded
    time.
    """
    aligned, matched = align_and_match(windows)
    origin = min((window.span[0] for window in aligned), default=0)
    # From here to the end, times count from the first event of any rank.
    own = []
    for window in _alike(aligned):
        # Exposed communication as a component, for where that is not matched: the parts between collectives, or all of it.
        exposed = subtract(union(window.collectives.start, window.collectives.end), window.compute)
        unmatched = subtract(exposed, union_of(EMPTY, *window.sets.values()))
        own.append(window.with_set(Component.UNMATCHED, unmatched).shifted(-origin))
    usable = len(matched.rows) > 0 and matched.refused is None
    own = list(with_steps_of_updates(own, matched.rows)) if usable else own
    table = matched_collectives(own, matched.rows)
    cut = cut_into_cycles(table) if usable else Cut({})
    seen = own
    if cut.whole_window:
        # Nothing is known of a rank before its first event.
        seen = [window.with_set(Component.UNSEEN, union([0], [window.span[0]])) for window in own]
    # The cycles between matched collectives, with the work hidden in waits for other ranks.
    timelines = [compute_timeline(window) for window in seen] if cut.cycles else []
    groups = [cycle_group(syncs, cycles, table, seen, timelines) for syncs, cycles in cut.cycles.items()]
    groups = [of.with_standalone(LateCause.DATA, standalone_data_of_windows(of, seen)) for of in groups]
    if groups and all(window.on_device for window in seen):
        times_ns = np.array([issue_time_ns(window) for window in seen])
        groups = [with_issue_times(group, times_ns) for group in groups]
    groups = groups or _unmatched_cycles(seen)
    steps = [_rank_steps(window) for window in seen]
    numbers = recorded_steps(steps)

    def reason(number: int) -> str:
        return "no collectives matched" if number - 1 in numbers else "no step before it in the window"

    graph = Graph(
        source="trace",
        ranks=tuple(window.rank for window in seen),
        groups=groups,
        steps=steps,
        set_aside=excluded_steps(steps, groups, reason),
        matched=len(matched.rows) if usable else 0,
        unmatched=matched.unmatched,
        refused=matched.refused,
        clock_error_ns=matched.error_ns,
        coverage=matched.coverage if usable else None,
    )
    return graph, [window.shifted(origin) for window in seen]


def _alike(windows: Sequence[Window]) -> Sequence[Window]:
    """The windows; the optimizer's work is counted as other computation in all of them where some lack launches, and so cannot separate
    it."""
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
    """Cycles without matched collectives: each rank separately, from step mark to step mark."""
    # The window itself where no step is marked.
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
            idle_after={kind: _as_usual_at_first(of_kind, device_idle) for kind, of_kind in idle.items()},
        )
    ]


def _as_usual_at_first(idle: Array, most: Array) -> Array:
    """``idle`` [N, K, R] with the first cycle's no less than usual, up to ``most`` [K, R].

    How long the hosts waited just before the window is unknown: they are assumed to have waited as in its steps.
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
        micro_batches=np.where(forwards > 0, forwards, np.nan),
        elements=np.array([window.elements.get(number, np.nan) for number, _, _ in steps], float),
    )
