"""What the training thread of a rank was doing at any time, from its step log.

To a checkpoint belongs what a script does before it calls ``torch.save``, and after: ``state_dict()``, copies, a file's name.

Nothing records it but the time itself: a gap between the phases in which the rank saves is longer than that gap is in other steps.
Where ranks meet in the gap, at a barrier behind the save for example, it matters on which side of it the gap is longer: what others wait
for there is over at the barrier.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import EMPTY, Intervals, subtract, union, union_of
from ddpdoctor.measure.phases import NO_GAPS, Gaps, gaps_between
from ddpdoctor.measure.taxonomy import Component
from ddpdoctor.rundir import EventKind

from .records import Event, Step

_FEWEST_USUAL = 3
"""Gaps without a save from which on it is known how long such a gap usually is: a pattern's fewest, as rules have it."""


def prepared_for(saves: Intervals, gaps: Gaps, recorded: Intervals, meetings: Intervals) -> Intervals:
    """The time that belongs to the checkpoints in the gaps where the ``saves`` lie, ns: what of such a gap neither what is ``recorded``
    nor one of the ``meetings`` covers, beyond the median of the same kind of gap without a save. None of it where nearly each gap of the
    kind has one."""
    at = gaps.at(saves[0])
    begun, at = saves[0][at >= 0], at[at >= 0]
    saving, first = np.unique(at, return_index=True)
    free = subtract(gaps.times, union_of(recorded, meetings))
    whose = gaps.at(free[0])
    length = np.bincount(whose, free[1] - free[0], minlength=len(gaps.kind))
    without = np.ones(len(gaps.kind), bool)
    without[saving] = False
    usual_ns = {}
    for kind in np.unique(gaps.kind[saving]).tolist():
        others = length[without & (gaps.kind == kind)]
        usual_ns[kind] = float(np.median(others)) if len(others) >= _FEWEST_USUAL else np.inf
    pieces = [EMPTY]
    for gap, own_saves in zip(saving.tolist(), np.split(begun, first[1:]), strict=False):
        own = slice(*np.searchsorted(whose, (gap, gap + 1)))
        times = free[0][own], free[1][own]
        pieces.append(_beyond_usual(times, own_saves, meetings, usual_ns[int(gaps.kind[gap])]))
    return union_of(*pieces)


def _beyond_usual(times: Intervals, saves: NDArray[Any], meetings: Intervals, usual_ns: float) -> Intervals:
    """The ``times`` of one gap without ``usual_ns`` of them. The meetings divide the gap into parts: what is usual is taken first from
    those behind the last of the ``saves``, from the last part on, then from those before, and only the rest from parts with a save."""
    part = np.searchsorted(meetings[1], times[0], side="right")
    with_save = np.searchsorted(meetings[1], saves, side="right")
    behind = part > with_save.max()
    order = np.lexsort((np.where(behind, -part, part), np.isin(part, with_save), ~behind))
    lengths = (times[1] - times[0])[order]
    usual = np.empty(len(order))
    usual[order] = np.clip(usual_ns - (np.cumsum(lengths) - lengths), 0, lengths)
    return union(times[0] + usual, times[1])


_EPOCH_START_BATCHES = 1
"""Batches after ``iter(loader)`` that still wait for the workers to start."""

_ON_HOST = (Component.COLLECTION, Component.CHECKPOINT, Component.EPOCH_START, Component.DATA)
_ON_DEVICE = (Component.OPTIMIZER, Component.BACKWARD, Component.FORWARD)
_WHOLE_EVENTS: dict[str, Component] = {
    EventKind.OPTIMIZER: Component.OPTIMIZER,
    EventKind.COLLECTION: Component.COLLECTION,
    EventKind.SAVE: Component.CHECKPOINT,
    EventKind.FORWARD: Component.FORWARD,
    EventKind.EVALUATION: Component.FORWARD,
}
"""Kind of event → the component that it is from its start to its end."""
_PHASES: dict[str, Component] = {
    EventKind.DATA: Component.DATA,
    EventKind.ITERATION: Component.DATA,
    EventKind.FORWARD: Component.FORWARD,
    EventKind.BACKWARD: Component.BACKWARD,
    EventKind.OPTIMIZER: Component.OPTIMIZER,
}
"""Kind of event → the phase of a training step that it is."""
_MEETINGS = (EventKind.BARRIER, EventKind.COLLECTIVE, EventKind.WAIT)
"""Kinds of events in which ranks wait for each other between phases."""
_Spans = dict[Component, list[tuple[int, int]]]


class Activities(msgspec.Struct, frozen=True):
    """Disjoint intervals of each component, ns after ``origin_ns``.

    Where activities nest, the more specific one counts: a garbage collection inside a forward pass is a collection. In
    device time, a device that is at work comes first: what its host does meanwhile holds up nothing.
    """

    origin_ns: int
    """Epoch ns."""
    sets: dict[str, Intervals]
    """By component."""
    gaps: Gaps = NO_GAPS
    """Between the phases; in device time nobody knows them."""

    def since(self, origin_ns: int) -> Activities:
        """The same, told from another origin."""
        by_ns = self.origin_ns - origin_ns
        if not by_ns:
            return self
        moved = {component: (starts + by_ns, ends + by_ns) for component, (starts, ends) in self.sets.items()}
        return Activities(origin_ns, moved, self.gaps.shifted(by_ns))

    def unmarked(self, component: Component) -> Intervals:
        """The gaps whose operators are of this kind of work, where nothing in them was recorded."""
        left = self.gaps.of(component)
        for recorded in self.sets.values():
            left = subtract(left, recorded)
        return left


def activities_of(
    steps: Sequence[Step], origin_ns: int, with_workers: Collection[int], on_device_time: bool
) -> Activities:
    """What a rank did in these steps; ``with_workers``: its loaders that have worker processes."""
    spans = _spans(steps, origin_ns, with_workers)
    gaps = NO_GAPS if on_device_time else _gaps(steps, origin_ns)
    sets: dict[str, Intervals] = {}
    taken = EMPTY
    for component in (*_ON_DEVICE, *_ON_HOST) if on_device_time else (*_ON_HOST, *_ON_DEVICE):
        table = np.array(spans.pop(component, []), float).reshape(-1, 2)
        recorded = union(table[:, 0], table[:, 1])
        sets[component] = subtract(recorded, taken)
        taken = union_of(taken, recorded)
    saves = sets[Component.CHECKPOINT]
    if len(saves[0]):
        prepared = prepared_for(saves, gaps, taken, _meetings(steps, origin_ns))
        sets[Component.CHECKPOINT] = union_of(saves, prepared)
    return Activities(origin_ns, sets, gaps)


def _meetings(steps: Sequence[Step], origin_ns: int) -> Intervals:
    """Where the rank may wait for others between its phases."""
    times = [
        (step.start_of(event) - origin_ns, step.end_of(event) - origin_ns)
        for step in steps
        for event in step.events
        if event.kind in _MEETINGS
    ]
    table = np.array(times, float).reshape(-1, 2)
    return union(table[:, 0], table[:, 1])


def _gaps(steps: Sequence[Step], origin_ns: int) -> Gaps:
    """The gaps between the phases. A backward pass lasts until its gradients are reduced."""
    phases: _Spans = defaultdict(list)
    for step in steps:
        start_ns = step.start_ns - origin_ns
        for event in step.events:
            phase = _PHASES.get(event.kind)
            if phase is not None:
                phases[phase].append((start_ns + event.start_ns, start_ns + event.end_ns))
    tables = {phase: np.array(times, float).T for phase, times in phases.items()}
    return gaps_between({phase: (table[0], table[1]) for phase, table in tables.items()})


def _spans(steps: Sequence[Step], origin_ns: int, with_workers: Collection[int]) -> _Spans:
    """(start, end) of what was recorded of each component, ns after the origin."""
    spans: _Spans = defaultdict(list)
    fresh: Counter[int] = Counter()
    for step in steps:
        start_ns = step.start_ns - origin_ns
        for event in step.events:
            component = _component(event, fresh, with_workers)
            if component is not None:
                end_ns = event.gradients_ready_ns if component is Component.BACKWARD else event.end_ns
                spans[component].append((start_ns + event.start_ns, start_ns + end_ns))
    return spans


def _component(event: Event, fresh: Counter[int], with_workers: Collection[int]) -> Component | None:
    """What an event is; ``fresh`` counts, by loader, the batches to come that still wait for its workers to start."""
    if event.kind == EventKind.ITERATION:
        fresh[event.loader] = _EPOCH_START_BATCHES if event.loader in with_workers else 0
        return Component.EPOCH_START
    if event.kind == EventKind.DATA:
        starting = fresh[event.loader] > 0
        fresh[event.loader] -= 1
        return Component.EPOCH_START if starting or event.exhausted else Component.DATA
    if event.kind == EventKind.BACKWARD:
        return Component.BACKWARD
    return _WHOLE_EVENTS.get(event.kind)
