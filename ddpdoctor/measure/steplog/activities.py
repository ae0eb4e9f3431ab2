"""Activities of a rank's training thread over time, from its step log.

The time of a checkpoint includes unrecorded work before and after ``torch.save``: ``state_dict()``, copies, building a file name. It is
estimated from the gap between two phases that contains the save: the excess over the same gap in other steps counts as checkpoint
time. If ranks synchronise within the gap, for example at a barrier after the save, the barrier divides the gap, and the excess is
assigned to the side on which it lies: the other ranks wait only for what is before the barrier.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import EMPTY, Intervals, subtract, union, union_of
from ddpdoctor.measure.phases import NO_GAPS, Gaps, gaps_between
from ddpdoctor.measure.taxonomy import Component
from ddpdoctor.rundir import EventKind

from .records import Event, Step

_FEWEST_USUAL = 3
"""Fewest gaps without a save from which the typical length of such a gap is computed."""


def unrecorded_checkpoint_time(
    saves: Intervals, gaps: Gaps, recorded: Intervals, waits: Intervals
) -> Intervals:
    """Checkpoint time outside ``torch.save``, in the gaps that contain ``saves``, ns.

    It is the part of a gap that neither ``recorded`` work nor ``waits`` for other ranks cover, minus the median of that part over
    the gaps of the same kind without a save. Empty if fewer than ``_FEWEST_USUAL`` gaps of the kind have no save.
    """
    at = gaps.at(saves[0])
    save_starts, at = saves[0][at >= 0], at[at >= 0]
    gaps_with_save, first = np.unique(at, return_index=True)
    free = subtract(gaps.times, union_of(recorded, waits))
    gap_of_free = gaps.at(free[0])
    length = np.bincount(gap_of_free, free[1] - free[0], minlength=len(gaps.kind))
    has_no_save = np.ones(len(gaps.kind), bool)
    has_no_save[gaps_with_save] = False
    usual_ns = {}
    for kind in np.unique(gaps.kind[gaps_with_save]).tolist():
        others = length[has_no_save & (gaps.kind == kind)]
        usual_ns[kind] = float(np.median(others)) if len(others) >= _FEWEST_USUAL else np.inf
    pieces = [EMPTY]
    for gap, saves_in_gap in zip(gaps_with_save.tolist(), np.split(save_starts, first[1:]), strict=False):
        own = slice(*np.searchsorted(gap_of_free, (gap, gap + 1)))
        times = free[0][own], free[1][own]
        pieces.append(_excess_over_usual(times, saves_in_gap, waits, usual_ns[int(gaps.kind[gap])]))
    return union_of(*pieces)


def _excess_over_usual(times: Intervals, saves: NDArray[Any], waits: Intervals, usual_ns: float) -> Intervals:
    """The ``times`` of one gap, with ``usual_ns`` of them removed.

    The ``waits`` divide the gap into parts. ``usual_ns`` is removed first from the parts after the last save, the last part first, then
    from the parts before it, and the rest from the parts with a save.
    """
    part = np.searchsorted(waits[1], times[0], side="right")
    with_save = np.searchsorted(waits[1], saves, side="right")
    is_after_last_save = part > with_save.max()
    order = np.lexsort(
        (np.where(is_after_last_save, -part, part), np.isin(part, with_save), ~is_after_last_save)
    )
    lengths = (times[1] - times[0])[order]
    usual = np.empty(len(order))
    usual[order] = np.clip(usual_ns - (np.cumsum(lengths) - lengths), 0, lengths)
    return union(times[0] + usual, times[1])


_EPOCH_START_BATCHES = 1
"""Batches after ``iter(loader)`` that still wait for the start of the workers."""

_ON_HOST = (Component.COLLECTION, Component.CHECKPOINT, Component.EPOCH_START, Component.DATA)
_ON_DEVICE = (Component.OPTIMIZER, Component.BACKWARD, Component.FORWARD)
_WHOLE_EVENTS: dict[str, Component] = {
    EventKind.OPTIMIZER: Component.OPTIMIZER,
    EventKind.COLLECTION: Component.COLLECTION,
    EventKind.SAVE: Component.CHECKPOINT,
    EventKind.FORWARD: Component.FORWARD,
    EventKind.BACKWARD: Component.BACKWARD,
    EventKind.EVALUATION: Component.FORWARD,
}
"""Kind of event → its component. A backward pass counts until its gradients are ready."""
_PHASES: dict[str, Component] = {
    EventKind.DATA: Component.DATA,
    EventKind.ITERATION: Component.DATA,
    EventKind.FORWARD: Component.FORWARD,
    EventKind.BACKWARD: Component.BACKWARD,
    EventKind.OPTIMIZER: Component.OPTIMIZER,
}
"""Kind of event → phase of a training step."""
_WAITS: dict[str, str] = dict.fromkeys((EventKind.BARRIER, EventKind.COLLECTIVE, EventKind.WAIT), "wait")
"""Kinds of events in which the rank may wait for others between its phases."""


class Activities(msgspec.Struct, frozen=True):
    """Disjoint intervals of each component, ns after ``origin_ns``.

    For nested activities the more specific one counts: a garbage collection inside a forward pass is a collection. In device
    time, device work takes precedence: concurrent host work delays nothing.
    """

    origin_ns: int
    """Epoch ns."""
    sets: dict[str, Intervals]
    """By component."""
    gaps: Gaps = NO_GAPS
    """Between the phases; empty in device time."""

    def since(self, origin_ns: int) -> Activities:
        """The same activities, relative to another origin (epoch ns)."""
        by_ns = self.origin_ns - origin_ns
        if not by_ns:
            return self
        moved = {component: (starts + by_ns, ends + by_ns) for component, (starts, ends) in self.sets.items()}
        return Activities(origin_ns, moved, self.gaps.shifted(by_ns))

    def unrecorded_gaps(self, component: Component) -> Intervals:
        """The gaps whose operators count as ``component``, minus the recorded activities."""
        left = self.gaps.of(component)
        for recorded in self.sets.values():
            left = subtract(left, recorded)
        return left


def activities_of(
    steps: Sequence[Step], origin_ns: int, with_workers: Collection[int], on_device_time: bool
) -> Activities:
    """Activities in these steps. ``with_workers``: ids of the rank's loaders with worker processes."""
    starting_batches: Counter[int] = Counter()
    spans = _times(
        steps, origin_ns, lambda event: _component(event, starting_batches, with_workers), until_ready=True
    )
    gaps = NO_GAPS
    if not on_device_time:
        gaps = gaps_between(_times(steps, origin_ns, lambda event: _PHASES.get(event.kind)))
    sets: dict[str, Intervals] = {}
    covered = EMPTY
    for component in (*_ON_DEVICE, *_ON_HOST) if on_device_time else (*_ON_HOST, *_ON_DEVICE):
        recorded = union(*spans.get(component, EMPTY))
        sets[component] = subtract(recorded, covered)
        covered = union_of(covered, recorded)
    saves = sets[Component.CHECKPOINT]
    if len(saves[0]):
        waits = _times(steps, origin_ns, lambda event: _WAITS.get(event.kind)).get("wait", EMPTY)
        unrecorded = unrecorded_checkpoint_time(saves, gaps, covered, union(*waits))
        sets[Component.CHECKPOINT] = union_of(saves, unrecorded)
    return Activities(origin_ns, sets, gaps)


_Sort = TypeVar("_Sort", bound=str)


def _times(
    steps: Sequence[Step],
    origin_ns: int,
    sort_of: Callable[[Event], _Sort | None],
    *,
    until_ready: bool = False,
) -> dict[_Sort, Intervals]:
    """(starts, ends) of the events of each sort, ns after the origin. A backward pass ends when its gradients are reduced, with
    ``until_ready`` when they are ready."""
    times: defaultdict[_Sort, list[tuple[int, int]]] = defaultdict(list)
    for step in steps:
        start_ns = step.start_ns - origin_ns
        for event in step.events:
            if (sort := sort_of(event)) is not None:
                is_ready = until_ready and event.kind == EventKind.BACKWARD
                end_ns = event.gradients_ready_ns if is_ready else event.end_ns
                times[sort].append((start_ns + event.start_ns, start_ns + end_ns))
    tables = {sort: np.array(pairs, float).T for sort, pairs in times.items()}
    return {sort: (table[0], table[1]) for sort, table in tables.items()}


def _component(
    event: Event, starting_batches: Counter[int], with_workers: Collection[int]
) -> Component | None:
    """Component of an event. ``starting_batches``: by loader, how many of the next batches still wait for the start of its workers."""
    if event.kind == EventKind.ITERATION:
        starting_batches[event.loader] = _EPOCH_START_BATCHES if event.loader in with_workers else 0
        return Component.EPOCH_START
    if event.kind == EventKind.DATA:
        starting = starting_batches[event.loader] > 0
        starting_batches[event.loader] -= 1
        return Component.EPOCH_START if starting or event.exhausted else Component.DATA
    return _WHOLE_EVENTS.get(event.kind)
