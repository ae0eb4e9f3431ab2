"""All stack samples of a run as one table: time, step, activity of the training thread, and call stack of each sample.

Select rows with :class:`RankSamples`; :meth:`Samples.weights` sums them up by stack.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from enum import IntEnum
from functools import cached_property

import msgspec
import numpy as np

from ddpdoctor.measure.numerics import Array, Ints, Mask, holds, union
from ddpdoctor.measure.phases import Gap
from ddpdoctor.measure.places import Stack
from ddpdoctor.measure.steplog import WARM_UP_STEPS, RankLog, Step, no_samples
from ddpdoctor.measure.taxonomy import Component
from ddpdoctor.rundir import EventKind

from .gil import ASKED_NS, CallStack, GilOwners, begin_wait, gil_owners_of, moments_of

EVENTS: dict[Component, tuple[EventKind, ...]] = {
    Component.DATA: (EventKind.DATA,),
    Component.EPOCH_START: (EventKind.ITERATION, EventKind.DATA),
    Component.BACKWARD: (EventKind.BACKWARD,),
    Component.OPTIMIZER: (EventKind.OPTIMIZER,),
    Component.COLLECTION: (EventKind.COLLECTION,),
    Component.CHECKPOINT: (EventKind.SAVE,),
}
"""Component → kinds of events whose call line is used where samples give none."""
_INSIDE_EVENTS = (
    *dict.fromkeys(kind for kinds in EVENTS.values() for kind in kinds),
    EventKind.COLLECTIVE,
    EventKind.BARRIER,
    EventKind.WAIT,
    EventKind.LOAD,
)
"""Events that are not the rank's own Python code. A forward pass has a bit of its own."""
_BITS = {kind.value: 1 << place for place, kind in enumerate((*_INSIDE_EVENTS, EventKind.FORWARD))}
_FORWARD = _BITS[EventKind.FORWARD.value]
_AFTER_COLLECTION_NS = 2_000_000
"""The sampling thread cannot run during a garbage collection. It runs right after it, and still finds the line that
collected."""


def kinds_of(components: Iterable[Component]) -> set[EventKind]:
    """Kinds of events that are these kinds of work."""
    return {kind for component in components for kind in EVENTS.get(component, ())}


class Kind(IntEnum):
    """Kind of a sample, see :mod:`.gil`."""

    SEEN = 0
    """A sample at a random moment, which shows where the thread was."""
    FOLLOWING = 1
    """A sample at a random moment that shows the line after the one that held the GIL."""
    BURST = 2
    """The first burst sample of a wait that ended with a request for the GIL."""


class RankSamples(msgspec.Struct, frozen=True, eq=False, dict=True):
    """Samples of one rank in the order in which they were taken, burst samples last; S rows, N steps."""

    log: RankLog
    time_ns: Ints
    """[S] moment of the work that it is of, epoch ns."""
    step: Ints
    """[S] position of its step in the log; -1 outside all steps."""
    stack: Ints
    """[S] index into :attr:`Samples.stacks`; -1 where the line is unknown."""
    kind: Ints
    """[S] a :class:`Kind`."""

    @cached_property
    def numbers(self) -> Ints:
        """[N] numbers of the log's steps."""
        return np.array([step.number for step in self.log.steps], np.int64)

    @cached_property
    def lengths_ns(self) -> Ints:
        """[N] lengths of the log's steps."""
        return np.array([step.length_ns for step in self.log.steps], np.int64)

    @cached_property
    def _doing(self) -> Ints:
        """[S] bits of the kinds of events that contain each sample."""
        return _doing(self.log.steps, self.time_ns)

    @cached_property
    def _gap(self) -> Ints:
        """[S] index of the kind of gap between phases that contains it; -1: none."""
        return self.log.activities.gaps.kind_at(self.time_ns - self.log.activities.origin_ns)

    @cached_property
    def per_burst(self) -> float:
        """Number of ordinary samples that a burst sample stands for: those in ``ASKED_NS``."""
        in_steps = np.count_nonzero((self.step >= 0) & (self.kind != Kind.BURST))
        return ASKED_NS * in_steps / max(self.log.burst_ns, 1)

    def steps_of(self, numbers: Collection[int]) -> Mask:
        """[N] mask of the log's steps with these numbers."""
        return np.isin(self.numbers, np.fromiter(numbers, np.int64, len(numbers)))

    def in_steps(self, wanted: Mask) -> Mask:
        """[S] mask of samples in the ``wanted`` [N] steps."""
        inside: Mask = np.append(wanted, False)[self.step]
        return inside

    def while_doing(self, components: Sequence[Component], gap: Gap | None = None) -> Mask:
        """[S] mask of samples taken while the thread did this kind of work; optionally only in gaps of this kind."""
        wanted = sum(_BITS[kind.value] for kind in kinds_of(components))
        inside = self._doing & ~_FORWARD
        outside = np.where(
            (self._doing & _FORWARD) != 0, Component.FORWARD in components, Component.HOST in components
        )
        chosen: Mask = np.where(inside != 0, (inside & wanted) != 0, outside)
        if gap is not None:
            kinds = self.log.activities.gaps.kinds
            chosen &= self._gap == kinds.index(gap) if gap in kinds else False
        return chosen


class Weights(msgspec.Struct, frozen=True):
    """Weight of some samples by stack, [K] each, in samples at random moments."""

    seen: Array
    """Samples that show where the thread was."""
    before: Array
    """Samples that show a follower, attributed to the stacks that probably held the GIL."""
    following: Array
    """The other samples that show a follower, at the stacks that they show."""
    burst: Array
    """Burst samples, as ordinary ones: another estimate of ``before``."""

    @property
    def at_random(self) -> Array:
        """All but burst samples."""
        return self.seen + self.before + self.following


class Samples(msgspec.Struct, frozen=True, eq=False, dict=True):
    """Samples of all ranks of a run; K stacks."""

    stacks: list[CallStack]
    """Each once."""
    ranks: list[RankSamples]
    """By position of the log."""
    gil_owners: GilOwners

    @cached_property
    def outside(self) -> Mask:
        """[K] whether the innermost line is known and outside torch."""
        return np.array([each.innermost is not None and not each.in_torch for each in self.stacks], bool)

    def weights(self, position: int, chosen: Mask | slice = slice(None)) -> Weights:
        """Weights of the ``chosen`` rows of the rank at ``position``."""
        rows, gil_owners, count = self.ranks[position], self.gil_owners, len(self.stacks)
        kind, stack = rows.kind[chosen], rows.stack[chosen]
        seen, following, bursts = (
            np.bincount(stack[(stack >= 0) & (kind == each)], minlength=count).astype(float) for each in Kind
        )
        shares = gil_owners.share * following[gil_owners.follower]
        before = np.bincount(gil_owners.owner, shares, count).astype(float)
        following[gil_owners.follower] = 0.0
        return Weights(seen, before, following, bursts * rows.per_burst)

    def by_stack(self, weights: Array, whole: bool = False) -> dict[Stack, float]:
        """Weight by call path, of ``weights`` [K] that are not 0. Paths are of the user's lines; ``whole``: with the innermost one."""
        found: defaultdict[Stack, float] = defaultdict(float)
        for number in np.flatnonzero(weights).tolist():
            stack = self.stacks[number]
            found[stack.whole if whole else stack.lines] += float(weights[number])
        return found


def samples_of(logs: Sequence[RankLog]) -> Samples:
    """The samples of ``logs``, which must be on one clock."""
    stacks: dict[CallStack, int] = {}
    rows = [np.concatenate([log.samples, log.burst_samples]) for log in logs]
    shown = [_shown(log, of_rank, stacks) for log, of_rank in zip(logs, rows, strict=True)]
    every, shows = np.concatenate([no_samples(), *rows]), np.concatenate([no_samples()[:, 1], *shown])
    place = [log.steps_at(moments_of(of_rank)) for log, of_rank in zip(logs, rows, strict=True)]
    in_training = np.concatenate([no_samples()[:, 1], *place]) >= WARM_UP_STEPS
    follows, gil_owners = gil_owners_of(stacks, shows, every[:, 3], in_training)
    of_ranks = np.split(follows, np.cumsum([len(of_rank) for of_rank in rows]))
    ranks = [_of_rank(*of_rank) for of_rank in zip(logs, rows, shown, of_ranks[: len(logs)], strict=True)]
    return Samples(list(stacks), ranks, gil_owners)


def _shown(log: RankLog, rows: Ints, stacks: dict[CallStack, int]) -> Ints:
    """[S] number of the stack that each row shows, -1 for none. New stacks are added to ``stacks``."""
    of_user = np.unique(rows[:, 1], return_inverse=True)[1]
    innermost, of_innermost = np.unique(rows[:, 2], return_inverse=True)
    # The ids are untrusted input, and may be too large to combine two into one number.
    both = of_user * len(innermost) + of_innermost
    _, first, which = np.unique(both, return_index=True, return_inverse=True)
    numbers = np.full(len(first), -1)
    for place in np.argsort(first, kind="stable").tolist():
        user, inner = map(log.sample_where.get, rows[first[place], 1:3].tolist())
        if user is not None:
            stack = CallStack(user.stack, None if inner is None else inner.stack[0])
            numbers[place] = stacks.setdefault(stack, len(stacks))
    return numbers[which]


def _of_rank(log: RankLog, rows: Ints, stack: Ints, follows: Mask) -> RankSamples:
    """The samples of one rank; ``stack`` [S] is what each shows, ``follows`` [S] whether that ran after the holder of the GIL."""
    time_ns, bursts = moments_of(rows), np.arange(len(rows)) >= len(log.samples)
    step = log.steps_at(time_ns)
    asked = np.flatnonzero(bursts & ~follows & (step >= 0))
    doing = _doing(log.steps, time_ns[asked])
    kept = ~bursts
    kept[asked] = begin_wait(rows[asked, 0], rows[asked, 3], step[asked], doing)
    kind = np.where(bursts, Kind.BURST, np.where(follows, Kind.FOLLOWING, Kind.SEEN))
    return RankSamples(log, *(column[kept] for column in (time_ns, step, stack, kind)))


def _doing(steps: Sequence[Step], moments: Ints) -> Ints:
    """[S] bits of the kinds of events that contain each of the ``moments``; events are cut at the ends of their step."""
    doing = np.zeros(len(moments), np.int64)
    spans: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for step in steps if len(moments) else ():
        for event in step.events:
            later_ns = _AFTER_COLLECTION_NS if event.kind == EventKind.COLLECTION else 0
            begin, end = step.start_of(event), step.end_of(event) + later_ns
            spans[event.kind].append((max(begin, step.start_ns), min(end, step.end_ns)))
    for kind in spans.keys() & _BITS.keys():
        begins, ends = np.array(spans[kind], np.int64).T
        doing[holds(union(begins, ends), moments)] |= _BITS[kind]
    return doing
