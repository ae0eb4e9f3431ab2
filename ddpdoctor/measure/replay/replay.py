"""What-if estimates: replay the measured graph with parts removed.

A cycle is replayed from the measured state of its ranks at its beginning. For each synchronisation *k* and rank *r*

    arrival[k, r] = ready[r] + work[k, r]
    end[k]        = max over members of arrival[k, r] + transfer[k]
    ready[r]      = end[k] + lag[k, r]

(at a broadcast, the maximum is over the members for which the rank waits: see ``CycleGroup.released_at``). In a profiler window the
computation that overlaps with a reduction is known as well, and is replayed separately (:mod:`.overlapped`). With nothing changed this
gives the measured times. A scenario removes ``work``, changes ``transfer``, or drops the synchronisation itself, in which case each
member continues with what it computed meanwhile. The method is the what-if analysis of large jobs (Lin et al., "Understanding
Stragglers in Large Model Training Using What-if Analysis", OSDI '25): replay with a cause idealised, compare step times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.graph import CycleGroup, Graph, SegmentClasses
from ddpdoctor.measure.numerics import Array

from .overlapped import length_ns, place_removed_work


class Scenario(msgspec.Struct):
    """Changes of one :class:`CycleGroup`; the arrays may be edited before the replay."""

    removed: Array
    """[N, K, R] ns of work that is removed, from the segment and from what overlaps with the previous synchronisation."""
    transfer: Array
    """[N, K] ns"""
    synchronises: list[bool]
    """[K] whether the members still wait for each other; otherwise the transfer is skipped too."""
    issue_time_saved: Array
    """[N, R] ns by which the time falls that each rank's host needs to issue the step."""


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
        if scenario.synchronises[k]:
            ready[:, members] = _synchronised(group, k, arrival, scenario.transfer[:, k])
        else:
            ready[:, members] = (
                arrival
                if group.concurrent_compute is None
                else arrival + group.concurrent_compute[:, k, members]
            )
    length: Array = np.nanmax(ready, axis=1) - np.nanmax(group.begin, axis=1)
    return length


def _synchronised(group: CycleGroup, k: int, arrival: Array, transfer: Array) -> Array:
    """[N, members] ns: when each member continues."""
    sync = group.syncs[k]
    members = list(sync.members)
    if sync.root is None:
        going_on: Array = (arrival.max(axis=1) + transfer)[:, None] + group.exit_skew[:, k, members]
        return going_on
    return group.released_at(k, arrival) + (group.end[:, k, members] - group.released_at(k))


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
    """Remove ``removed[group]`` ([N, K, R] ns) from the work, and ``alone[group]``, by default the same, from the time in which the
    host issues the step."""

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
    """Drop the synchronisations for which ``chosen(group, k)`` is true. Of the last one of a cycle, where cycles are cut, only the
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
    """[N, K, R] ns that the ranks have in common: for each rank, at most the lower median over the ranks in the same segment, or in the
    corresponding ones of ``classes``.

    ``alone`` is the same work as the rank would have it without other ranks, see :attr:`CycleGroup.work_standalone`.
    """
    parts = np.clip(alone if classes is None else classes.by_class(alone), 0, None)
    middle = np.sort(parts, axis=2)[:, :, (alone.shape[2] - 1) // 2, None]
    most = middle if classes is None else classes.by_segment(np.broadcast_to(middle, parts.shape))
    common: Array = np.minimum(np.clip(work, 0, None), most)
    return common


def idle_after(graph: Graph, kinds: Sequence[str]) -> list[Array]:
    """[N, K, R] ns, group by group: the part common to the ranks of the idle time after these kinds of waiting."""
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


def without_waiting(graph: Graph, kinds: Sequence[str]) -> list[Change]:
    """Remove synchronisations of these kinds, and the idle time that the hosts' waiting there causes."""
    return [
        without_sync(lambda group, k: group.syncs[k].kind in kinds),
        without_work(idle_after(graph, kinds)),
    ]
