"""What-if estimates: replay the measured graph with parts removed.

A cycle is replayed from the measured state of its ranks at its beginning. For each synchronisation *k* and rank *r*

    arrival[k, r] = ready[r] + work[k, r]
    end[k]        = max over members of arrival[k, r] + transfer[k]
    ready[r]      = end[k] + lag[k, r]

(at a broadcast, the maximum is over the members for which the rank waits: see ``CycleGroup.released_at``). In a profiler window the
computation that overlaps with a reduction is known as well, and is replayed with overlap, see below. Without changes, both give the
measured times. A scenario removes ``work``, changes ``transfer``, or removes the synchronisation itself, so that each member continues
with its concurrent computation. The method is the what-if analysis of large jobs (Lin et al., "Understanding
Stragglers in Large Model Training Using What-if Analysis", OSDI '25): replay without a cause, compare step times.

With overlap, each rank's computation and its collectives run concurrently. A bucket that is reduced during the backward pass ends
earlier on a faster link, or without a straggler, but the next one is not ready earlier, because the backward pass has to reach it. For
bucket *k* and rank *r*, with ``ready`` from the trace (the end of the computation before it, even if the bucket is queued then),

    lane[k, r]  = ready[k, r] + shift[r] - removed work of r since the computation last waited
    start[k, r] = max(lane[k, r], end[k - 1, r], end[j, r]), k - 1 being the one before in the same process group, and j
                  the collective of any group after which it was queued (a reduction across hosts after those within hosts)
    end[k, r]   = max over members of start[k, r] + transfer[k] + lag[k, r]

The computation is shifted, ``shift[r] = end[k, r] - measured end[k, r]``, if it waits for the collective: the last bucket of a backward
pass, every collective that is not DDP's, and collectives for which it was idle (see ``graph.segments``: sharded parameters, tensor
parallelism in the backward pass). An uncertain dependency shifts it by its probability times that. This is dPRO's method (Hu et al.,
MLSys '22), reduced to a step of data parallel training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.graph import CycleGroup, Graph, SegmentClasses
from ddpdoctor.measure.numerics import Array


def place_removed_work(group: CycleGroup, removed: Array) -> Array:
    """[N, K, R] ns: ``removed`` work, moved to the collectives for which it made the rank ready later.

    ``removed`` is measured by segments, which end when a rank's part of a collective starts. A rank whose part was queued until the late
    rank arrived has computed more by then, so the late rank's excess appears only after its last bucket. The ready time shows it earlier:
    if the rank was ready L later than the others, L of its excess (at most all of it) came before. No work is moved across a collective
    for which the computation waits, and none is added.
    """
    if not removed.any():
        return removed
    late = np.nan_to_num(np.clip(group.ready - _lower_median(group.ready), 0, None))
    takes_part = ~np.isnan(group.ready)
    passed_on = 1.0 - group.waits_for_end
    following = np.zeros_like(removed)
    for k in range(removed.shape[1] - 2, -1, -1):
        following[:, k] = passed_on[k] * (removed[:, k + 1] + following[:, k + 1])
    moved = np.zeros_like(removed)
    removed_so_far, placed_so_far = np.zeros_like(group.begin), np.zeros_like(group.begin)
    for k in range(removed.shape[1]):
        removed_so_far = removed_so_far + removed[:, k]
        whole = removed_so_far + following[:, k]
        excess = np.clip(whole - _lower_median(whole), 0, None)
        least = np.where(takes_part[:, k], np.minimum(late[:, k], excess), 0.0)
        now = np.minimum(np.maximum(np.maximum(removed_so_far, placed_so_far), least), whole)
        moved[:, k] = now - placed_so_far
        removed_so_far, placed_so_far = passed_on[k] * removed_so_far, passed_on[k] * now
    return moved


def _lower_median(values: Array) -> Array:
    """Lower median over the last axis, which is kept."""
    known = np.maximum((~np.isnan(values)).sum(axis=-1, keepdims=True), 1)
    middle: Array = np.take_along_axis(np.sort(values, axis=-1), (known - 1) // 2, axis=-1)
    return middle


def length_ns(
    group: CycleGroup, removed: Array, transfer: Array, synchronises: Sequence[bool], issue_time_saved: Array
) -> Array:
    """[N] ns: the length of each cycle by the module's formula with overlap, at least the time in which the slowest host issues it.

    The arguments are fields of a :class:`Scenario`, ``removed`` after :func:`place_removed_work`.
    """
    free_from: dict[tuple[str, tuple[int, ...]], Array] = {}
    ends: list[Array] = []
    shift, removed_since_wait, latest_end = (
        np.zeros_like(group.begin),
        np.zeros_like(group.begin),
        group.begin.copy(),
    )
    for k, (sync, waits) in enumerate(zip(group.syncs, group.waits_for_end, strict=True)):
        members = list(sync.members)
        removed_since_wait[:, members] += removed[:, k, members]
        lane = np.maximum(
            group.ready[:, k, members] + shift[:, members] - removed_since_wait[:, members],
            group.begin[:, members],
        )
        if synchronises[k]:
            # Each process group has its own stream, which may wait for another group's stream.
            busy = free_from.get((sync.group, sync.members), group.begin[:, members])
            start = np.maximum(np.maximum(lane, busy), _queue_released_at(group, k, ends)[:, members])
            own_end = start.max(axis=1)[:, None] + transfer[:, k, None] + group.exit_skew[:, k, members]
            free_from[sync.group, sync.members] = own_end
            latest_end[:, members] = np.maximum(latest_end[:, members], own_end)
        else:
            own_end = lane + group.concurrent_compute[:, k, members]
        ends.append(np.full_like(latest_end, -np.inf))
        ends[k][:, members] = own_end
        shift[:, members] += waits[members] * (own_end - group.end[:, k, members] - shift[:, members])
        removed_since_wait[:, members] *= 1.0 - waits[members]
    length: Array = np.nanmax(latest_end, axis=1) - np.nanmax(group.begin, axis=1)
    least: Array = (group.issue_time_ns - issue_time_saved).max(axis=1)
    return np.maximum(length, least)


def _queue_released_at(group: CycleGroup, k: int, ends: Sequence[Array]) -> Array:
    """[N, R] ns: replayed earliest start (from ``ends``) of the parts of collective ``k`` that were queued after another collective; -inf
    for parts that were not."""
    after: Array = np.full(group.begin.shape, -np.inf)
    for number in np.unique(group.queued_after[:, k]):
        if 0 <= number < k:
            queued = group.arrival[:, k] - group.end[:, number]
            after = np.where(group.queued_after[:, k] == number, ends[number] + queued, after)
    return after


class Scenario(msgspec.Struct):
    """Changes of one :class:`CycleGroup`; the arrays may be edited before the replay."""

    removed: Array
    """[N, K, R] ns of work that is removed, from the segment and from what overlaps with the previous synchronisation."""
    transfer: Array
    """[N, K] ns"""
    synchronises: list[bool]
    """[K] whether the members still wait for each other; otherwise the transfer is skipped too."""
    issue_time_saved: Array
    """[N, R] ns that each rank's host saves of the time to issue the step."""


Change = Callable[[CycleGroup, int, Scenario], None]
"""Edits the scenario of the group at this position in the graph."""


def baseline(group: CycleGroup) -> Scenario:
    """The scenario without changes."""
    nothing = np.zeros(group.arrival.shape)
    return Scenario(nothing, group.transfer.copy(), [True] * len(group.syncs), nothing[:, 0].copy())


def replay(group: CycleGroup, scenario: Scenario) -> Array:
    """[N] ns: the length of each cycle in the scenario."""
    if group.on_device:
        removed = place_removed_work(group, scenario.removed)
        return length_ns(group, removed, scenario.transfer, scenario.synchronises, scenario.issue_time_saved)
    ready = group.begin.copy()
    own = group.work.sum(axis=3)
    work = own - np.minimum(scenario.removed, np.maximum(own, 0.0))
    for k, sync in enumerate(group.syncs):
        members = list(sync.members)
        arrival = ready[:, members] + work[:, k, members]
        if not scenario.synchronises[k]:
            ready[:, members] = arrival + group.concurrent_compute[:, k, members]
        elif sync.root is None:
            common_end = arrival.max(axis=1) + scenario.transfer[:, k]
            ready[:, members] = common_end[:, None] + group.exit_skew[:, k, members]
        else:
            measured = group.end[:, k, members] - group.released_at(k)
            ready[:, members] = group.released_at(k, arrival) + measured
    length: Array = np.nanmax(ready, axis=1) - np.nanmax(group.begin, axis=1)
    return length


def replay_all(graph: Graph, changes: Sequence[Change] = ()) -> Array:
    """[cycles] ns: lengths of all cycles, group after group, with the changes applied in order."""
    lengths = []
    for position, group in enumerate(graph.groups):
        scenario = baseline(group)
        for change in changes:
            change(group, position, scenario)
        lengths.append(replay(group, scenario))
    return np.concatenate(lengths) if lengths else np.empty(0)


def without_work(removed: Sequence[Array], alone: Sequence[Array] | None = None) -> Change:
    """Remove ``removed[group]`` ([N, K, R] ns) from the work, and ``alone[group]`` (default: the same) from the time in which the host
    issues the step."""

    def change(group: CycleGroup, position: int, scenario: Scenario) -> None:
        scenario.removed = scenario.removed + removed[position]
        scenario.issue_time_saved = scenario.issue_time_saved + (removed if alone is None else alone)[
            position
        ].sum(axis=1)

    return change


def without_transfer(removed: Sequence[Array]) -> Change:
    """Remove ``removed[group]`` ([N, K] ns) from the transfers."""

    def change(group: CycleGroup, position: int, scenario: Scenario) -> None:
        scenario.transfer = np.maximum(scenario.transfer - removed[position], 0.0)

    return change


def without_sync(chosen: Callable[[CycleGroup, int], bool]) -> Change:
    """Remove the synchronisations for which ``chosen(group, k)`` is true. For the last one of a cycle, where cycles are cut, only the
    transfer is removed."""

    def change(group: CycleGroup, position: int, scenario: Scenario) -> None:
        for k in range(len(group.syncs)):
            if not chosen(group, k):
                continue
            if k == len(group.syncs) - 1:
                scenario.transfer[:, k] = 0.0
            else:
                scenario.synchronises[k] = False

    return change


def common_part(work: Array, alone: Array, classes: SegmentClasses | None = None) -> Array:
    """[N, K, R] ns that the ranks have in common: the ``work`` of each rank, limited to the lower median over the ranks of ``alone`` in the
    same segment, or in the corresponding segments of ``classes``.

    ``alone`` is the standalone work, see :attr:`CycleGroup.work_standalone`.
    """
    parts = np.clip(alone if classes is None else classes.by_class(alone), 0, None)
    middle = np.sort(parts, axis=2)[:, :, (alone.shape[2] - 1) // 2, None]
    most = middle if classes is None else classes.by_segment(np.broadcast_to(middle, parts.shape))
    common: Array = np.minimum(np.clip(work, 0, None), most)
    return common


def idle_after(graph: Graph, kinds: Sequence[str]) -> list[Array]:
    """[N, K, R] ns, group by group: idle time after these kinds of waiting that the ranks have in common."""
    return [
        sum(
            (
                common_part(idle, idle, group.segment_classes)
                for kind, idle in group.idle_after.items()
                if kind in kinds
            ),
            np.zeros(group.arrival.shape),
        )
        for group in graph.groups
    ]
