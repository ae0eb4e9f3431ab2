"""What the training thread did as each sample of a rank was taken: found once for a log, and asked for each cause."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ddpdoctor.measure.numerics import Ints, Mask
from ddpdoctor.measure.phases import Gap
from ddpdoctor.measure.steplog import RankLog, Step
from ddpdoctor.measure.taxonomy import Component
from ddpdoctor.rundir import EventKind

from .holding import Holders, lines_in, moments_of

EVENTS: dict[Component, tuple[EventKind, ...]] = {
    Component.DATA: (EventKind.DATA,),
    Component.EPOCH_START: (EventKind.ITERATION, EventKind.DATA),
    Component.BACKWARD: (EventKind.BACKWARD,),
    Component.OPTIMIZER: (EventKind.OPTIMIZER,),
    Component.COLLECTION: (EventKind.COLLECTION,),
    Component.CHECKPOINT: (EventKind.SAVE,),
}
"""Component → kinds of events whose call line is its line where no sample says more."""
_INSIDE_EVENTS = (
    EventKind.DATA,
    EventKind.ITERATION,
    EventKind.BACKWARD,
    EventKind.OPTIMIZER,
    EventKind.COLLECTION,
    EventKind.SAVE,
    EventKind.COLLECTIVE,
    EventKind.BARRIER,
    EventKind.WAIT,
    EventKind.LOAD,
)
"""Events that are no work of the rank's own Python code; a forward pass is told apart by itself."""
_BITS = {kind.value: 1 << place for place, kind in enumerate((*_INSIDE_EVENTS, EventKind.FORWARD))}
_FORWARD = _BITS[EventKind.FORWARD.value]
_AFTER_COLLECTION_NS = 2_000_000
"""The thread that takes samples cannot run during a collection. It does as soon as that is over, and still finds the
line that collected."""
_PAIRS_AT_ONCE = 1 << 20
"""Of a sample and an event of its step: some ten megabytes for each column."""


def kinds_of(components: Iterable[Component]) -> set[EventKind]:
    """Kinds of events that are these kinds of work."""
    return {kind for component in components for kind in EVENTS.get(component, ())}


class Taken:
    """Those of some samples of one rank that lie in its steps, step by step."""

    def __init__(self, log: RankLog, samples: Ints, holders: Holders) -> None:
        starts = np.array([step.start_ns for step in log.steps], np.int64)
        ends = np.array([step.end_ns for step in log.steps], np.int64)
        step = np.searchsorted(starts, samples[:, 0], side="right") - 1
        at = np.flatnonzero(step >= 0)
        at = at[samples[at, 0] < ends[step[at]]]
        at = at[np.argsort(_place_of_first(step[at]), kind="stable")]
        rows = samples[at]
        self._log = log
        self.step = step[at]
        """[S] position of the step in the log."""
        self.taken_ns = rows[:, 0].copy()
        self.held_ns = rows[:, 3].copy()
        self._moments = moments_of(rows)
        self._doing = _bits(log.steps, self.step, self._moments - starts[self.step])
        lines, which = lines_in(rows)
        shown = holders.shown[log.rank]
        known = np.array([each in shown for each in lines], bool)
        self.places = [shown[each] for each in lines if each in shown]
        """What they show, by the different pairs of lines."""
        self.place = np.where(known, np.cumsum(known) - 1, -1)[which]
        """[S] which of ``places`` each shows; -1 where that is not known."""

    def __len__(self) -> int:
        return len(self.step)

    def while_doing(self, components: Sequence[Component]) -> Mask:
        """[S] those taken while the thread did this kind of work."""
        wanted = sum(_BITS[kind.value] for kind in kinds_of(components))
        inside = self._doing & ~_FORWARD
        outside = np.where(
            (self._doing & _FORWARD) != 0, Component.FORWARD in components, Component.HOST in components
        )
        chosen: Mask = np.where(inside != 0, (inside & wanted) != 0, outside)
        return chosen

    def in_gap(self, gap: Gap) -> Mask:
        """[S] those taken in gaps of this kind between phases."""
        gaps, origin_ns = self._log.activities.gaps, self._log.activities.origin_ns
        if gap not in gaps.kinds:
            return np.zeros(len(self), bool)
        chosen: Mask = gaps.kind_at(self._moments - origin_ns) == gaps.kinds.index(gap)
        return chosen


def _place_of_first(step: Ints) -> Ints:
    """[S] of each sample's step, where the first sample of it stands."""
    _, first, which = np.unique(step, return_index=True, return_inverse=True)
    return first[which]


def _bits(steps: Sequence[Step], step: Ints, at_ns: Ints) -> Ints:
    """[S] the kinds of events of its step in which a sample lies, ``at_ns`` after the step's start."""
    bits = np.zeros(len(step), np.int64)
    begins, ends, kinds, first, count = _events(steps, np.unique(step))
    for part in _parts(count[step]):
        each = count[step[part]]
        sample = np.repeat(np.arange(part.start, part.stop), each)
        within = np.arange(len(sample)) - np.repeat(np.cumsum(each) - each, each)
        event = first[step[sample]] + within
        inside = (begins[event] <= at_ns[sample]) & (at_ns[sample] < ends[event])
        np.bitwise_or.at(bits, sample[inside], kinds[event[inside]])
    return bits


def _events(steps: Sequence[Step], wanted: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Begin, end and kind of the events of the ``wanted`` steps; by step, where its own begin and how many there are."""
    first, count = np.zeros(len(steps), np.int64), np.zeros(len(steps), np.int64)
    found: list[tuple[int, int, int]] = []
    after = EventKind.COLLECTION.value
    for position in wanted.tolist():
        first[position] = len(found)
        for event in steps[position].events:
            if (bit := _BITS.get(event.kind)) is not None:
                later_ns = _AFTER_COLLECTION_NS if event.kind == after else 0
                found.append((event.start_ns, event.end_ns + later_ns, bit))
        count[position] = len(found) - first[position]
    table = np.array(found, np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2], first, count


def _parts(count: Ints) -> Iterator[slice]:
    """Samples in turn, so that no part has many more pairs of sample and event than are looked at at once."""
    reached = np.cumsum(count)
    begin = 0
    while begin < len(count):
        before = int(reached[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(reached, before + _PAIRS_AT_ONCE, side="right")))
        yield slice(begin, end)
        begin = end
