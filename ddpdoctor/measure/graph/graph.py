"""The dependency graph of a run: cycles of work and synchronisation, in a form that can be measured, attributed and replayed.

A *cycle* is a step seen from the synchronisation points: from the end of the last one in step *i - 1* to the end of the last one in
step *i*. All ranks are together at both ends, so cycles are independent of each other, and their mean length is the mean step time.
Inside, each rank works in *segments*, from its own end of one synchronisation to its own arrival at the next:

    begin -> work -> arrival | wait | transfer | own end -> work -> arrival ...

Cycles with the same sequence of synchronisations are kept in one :class:`CycleGroup` of dense arrays with axes N (cycles), K
(synchronisations), R (ranks) and C (components of work). Times are float64 ns on the run's common clock; NaN where a rank takes no
part.

Ranks are compared by corresponding segments. Segments that end at synchronisations of different ranks can be the same part of a step:
where hosts reduce among their own ranks first, each rank is in one of several groups that do the same at the same place. The first
segment before a reduction within a host then corresponds to the first one of each other host. Segments correspond if they end at a
synchronisation of the same kind, of as many ranks and of the same backward pass, and have the same place among those in the rank's own
cycle.

Every step that was recorded is measured, or has a reason why not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import msgspec
import numpy as np
from msgspec.structs import force_setattr, replace

from ddpdoctor.measure.align import MatchCoverage
from ddpdoctor.measure.numerics import Array, Ints, nan_median
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.taxonomy import INDEX, STANDALONE, Component, LateCause

READY_BATCH_SHARE = 0.02
"""Share of a step up to which taking a batch means that it was ready: its tensors come through shared memory and a queue in tenths of a
millisecond. This is not a wait for data, but part of the host's time to launch the step."""
_TRACE = 1e-3
"""ns, and share of the largest idle time: a remainder that avoids division by zero where no rank shows the other idle."""
_DEFAULT: Array = np.empty(0)
"""What a field of a group has before its default is known."""


class Sync(msgspec.Struct, frozen=True):
    """One synchronisation in a cycle's sequence."""

    kind: str
    """A :class:`~ddpdoctor.measure.taxonomy.SyncKind`."""
    name: str
    members: tuple[int, ...]
    """Positions of the ranks that take part."""
    micro: int = 0
    """Number of the backward pass within the step, for gradients."""
    group: str = ""
    root: int | None = None
    """Position of the root of a broadcast, for which all others wait; None where all wait for all."""
    size: int = 0
    """Ranks in its process group, recorded or not; 0 where unknown."""
    update: int = 0
    """Number of optimizer steps before it in the step: a GAN has two, which train one model after the other."""


class CycleGroup(msgspec.Struct, frozen=True, dict=True):
    """Cycles with the same sequence of synchronisations."""

    syncs: tuple[Sync, ...]
    steps: Ints
    """[N] step number."""
    begin: Array
    """[N, R] own end of the previous cycle's last synchronisation."""
    arrival: Array
    """[N, K, R]"""
    end: Array
    """[N, K, R] own end."""
    work: Array
    """[N, K, R, C] ns of each component in the segment before the arrival. The components of a segment add up
    to its length."""
    message_bytes: Array
    """[N, K] bytes that a rank contributes; NaN where unknown."""
    recorded: Array | None = None
    """[N, R, C] ns of each component in the cycle by the marks of the step logs alone, before ``work`` is refined; None for a window."""
    hidden: Array | None = None
    """[N, K, R, C] ns of each component that runs concurrently with the synchronisation, between own arrival and own end; None where
    none can. A rank that waits in a reduction while its backward pass continues computes as much as the late one, so both counts belong
    together."""
    hidden_after_ready: Array = _DEFAULT
    """[N, K, R, C] ns of ``hidden`` after the rank was ready for its last synchronisation. Ranks that wait there do much of the next
    cycle's work meanwhile, and the late one does it afterwards: on all ranks it belongs to the next cycle."""
    carried_in: Array = _DEFAULT
    """[N, R, C] ns of the cycle's work that the rank did before the cycle in that way."""
    concurrent_compute: Array = _DEFAULT
    """[N, K, R] ns of computation between own arrival and own end: work that remains if the synchronisation is removed."""
    concurrent_compute_in_wait: Array = _DEFAULT
    """[N, K, R] ns of it while the rank waits for the last one to arrive."""
    exposed: Array | None = None
    """[N, K] ns of the transfer that a faster link would save: the minimum over the members of the time in which that member does not
    compute. None where nothing overlaps with a transfer."""
    standalone_ns: dict[str, Array] = msgspec.field(default_factory=dict)
    """[N, R] ns, by the kinds of :data:`STANDALONE`, that each rank would take if it waited for no other rank. More than measured where
    its loader's workers prepare batches, or its host issues work, while it waits for others. A missing kind: as measured."""
    issue_time_ns: Array = _DEFAULT
    """[N, R] ns that each rank's host needs to issue the step, a lower bound of the rank's step time (see :mod:`.standalone_times`); 0
    where unknown."""
    ready: Array = _DEFAULT
    """[N, K, R] when each part could have started if the previous synchronisation had been over: earlier than the arrival where it was
    queued."""
    queued_after: Ints | Array = _DEFAULT
    """[N, K, R] place of the collective, of any group, after which each part of the same rank was queued; -1 where it was not queued, or
    queues are unknown."""
    idle_after: dict[str, Array] = msgspec.field(default_factory=dict)
    """[N, K, R] ns of the work that is a device's idle time after its host waited for it, by the kind of synchronisation (see
    ``window.idle``). {}: none, or unknown."""
    on_device: bool = False
    """Collectives run on a device concurrently with the computation, which waits for only some of them (see ``replay.replay``)."""
    dependency_probability: Array = _DEFAULT
    """[K, R] probability that the rank's computation waits for the collective (see :mod:`.segments`)."""

    def __post_init__(self) -> None:
        """Where nothing overlaps with synchronisations: no hidden work, no queues, ready at the arrival."""
        absent = {
            "hidden_after_ready": np.broadcast_to(0.0, self.work.shape),
            "carried_in": np.broadcast_to(0.0, (len(self.steps), *self.work.shape[2:])),
            "concurrent_compute": np.broadcast_to(0.0, self.arrival.shape),
            "concurrent_compute_in_wait": np.broadcast_to(0.0, self.arrival.shape),
            "issue_time_ns": np.broadcast_to(0.0, self.begin.shape),
            "ready": self.arrival,
            "queued_after": np.broadcast_to(-1, self.arrival.shape),
            "dependency_probability": np.broadcast_to(0.0, self.arrival.shape[1:]),
        }
        for name, values in absent.items():
            if getattr(self, name) is _DEFAULT:
                force_setattr(self, name, values)

    @cached_property
    def last_arrival(self) -> Array:
        """[N, K] when the last member arrives."""
        latest: Array = np.nanmax(self.arrival, axis=2)
        return latest

    @cached_property
    def common_end(self) -> Array:
        """[N, K] when the synchronisation is over: the median of the members' own ends, at the earliest the last arrival.

        A member cannot finish before the last one has arrived; ends differ by how soon each thread wakes up.
        """
        return np.maximum(nan_median(self.end, axis=2), self.last_arrival)

    @cached_property
    def transfer(self) -> Array:
        """[N, K] ns from the last arrival to the common end."""
        return self.common_end - self.last_arrival

    @cached_property
    def exit_skew(self) -> Array:
        """[N, K, R] own end minus common end; negative where a rank continues before the others."""
        return self.end - self.common_end[:, :, None]

    @cached_property
    def released(self) -> Array:
        """[N, K, R] when each rank stops waiting for others (see :meth:`released_at`): between own arrival and own end."""
        released = self.arrival.copy()
        for k, sync in enumerate(self.syncs):
            own = list(sync.members)
            released[:, k, own] = np.clip(self.released_at(k), self.arrival[:, k, own], self.end[:, k, own])
        return released

    @cached_property
    def wait(self) -> Array:
        """[N, K, R] ns in which the rank waits for others."""
        return self.released - self.arrival

    @cached_property
    def segment_classes(self) -> SegmentClasses:
        """Corresponding segments of the ranks."""
        return segment_classes(self.syncs, self.arrival.shape[2])

    def released_at(self, k: int, arrival: Array | None = None) -> Array:
        """[N, members] time at which each member may leave, for the measured or other arrivals [N, members]: the last arrival.

        At a broadcast it is the root's arrival, or the last member's for members that left only after that: how far a broadcast
        synchronises depends on its algorithm (trees forward data, small messages are buffered).
        """
        sync = self.syncs[k]
        members = list(sync.members)
        measured = self.arrival[:, k, members]
        at = measured if arrival is None else arrival
        last: Array = at.max(axis=1, keepdims=True)
        if sync.root is None:
            return np.broadcast_to(last, at.shape)
        root = members.index(sync.root)
        waits_for_all = self.end[:, k, members] >= measured.max(axis=1, keepdims=True)
        return np.where(waits_for_all, last, np.maximum(at, at[:, [root]]))

    def with_dependencies(self, waits: bool) -> CycleGroup:
        """The group with every uncertain dependency set: computations wait (``waits``) or do not."""
        likely = self.dependency_probability
        decided = np.where((likely > 0) & (likely < 1), float(waits), likely)
        return replace(self, dependency_probability=decided)

    def with_standalone(self, kind: str, standalone_ns: Array | None) -> CycleGroup:
        """The group with the standalone time of one kind, [N, R] ns; unchanged for None."""
        if standalone_ns is None:
            return self
        return replace(self, standalone_ns={**self.standalone_ns, kind: standalone_ns})

    @cached_property
    def work_standalone(self) -> Array:
        """[N, K, R, C] ns: the work, with the wait for data and for the host that the rank would have without other ranks."""
        work = self.work.copy() if self.standalone_ns else self.work
        if LateCause.DATA in self.standalone_ns:
            # Where data is waited for: by this rank, or else by any.
            data = work[..., INDEX[Component.DATA]]
            own = np.where(data.sum(axis=1, keepdims=True) > 0, data, data.sum(axis=2, keepdims=True))
            missing = np.clip(self.standalone_ns[LateCause.DATA] - data.sum(axis=1), 0, None)
            data += missing[:, None, :] * own / np.maximum(own.sum(axis=1, keepdims=True), 1.0)
        if LateCause.HOST in self.standalone_ns:
            self._add_standalone_host(work)
        return work

    def _add_standalone_host(self, work: Array) -> None:
        """Add to ``work`` the hidden idle time where the device of the rank with the most visible idle time idles."""
        columns = [INDEX[component] for component in (Component.DATA, *STANDALONE[LateCause.HOST])]
        idle = work[..., columns]
        taking = idle[..., 0].sum(axis=1, keepdims=True) <= READY_BATCH_SHARE * self.duration[:, None, None]
        idle[..., 0] *= taking
        shown = idle.sum(axis=(1, 3)).argmax(axis=1)
        most = idle[np.arange(len(idle)), :, shown][:, :, None]
        takes_part = ~np.isnan(self.arrival)[..., None]
        pattern = np.maximum(most - idle, _TRACE * np.abs(most) + _TRACE) * takes_part
        missing = np.clip(self.standalone_ns[LateCause.HOST] - idle[..., 1:].sum(axis=(1, 3)), 0, None)
        whole = np.maximum(pattern.sum(axis=(1, 3), keepdims=True), _TRACE)
        work[..., columns] += missing[:, None, :, None] * pattern / whole

    @cached_property
    def work_with_overlap(self) -> Array:
        """[N, K, R, C] ns: :attr:`work_standalone`, with what overlapped with the previous synchronisation."""
        return self.with_overlap(self.work_standalone)

    def with_overlap(self, work: Array) -> Array:
        """[N, K, R, C] ns: ``work`` with what overlapped with the previous synchronisation.

        What overlaps with the cycle's last synchronisation belongs to the next cycle; this cycle begins with ``carried_in``.
        """
        if self.hidden is None:
            return work
        work = work.copy()
        hidden_in_cycle = self.hidden - self.hidden_after_ready
        for r in range(work.shape[2]):
            own = [k for k, sync in enumerate(self.syncs) if r in sync.members]
            work[:, own[0], r] += self.carried_in[:, r]
            for k, following in pairwise(own):
                work[:, following, r] += hidden_in_cycle[:, k, r]
        return work

    @cached_property
    def duration(self) -> Array:
        """[N] ns: the cycle's length, latest end to latest end."""
        length: Array = np.nanmax(self.end, axis=(1, 2)) - np.nanmax(self.begin, axis=1)
        return length


class RankSteps(msgspec.Struct, frozen=True):
    """One rank's steps as recorded, measured or excluded."""

    steps: Ints
    start: Array
    end: Array
    samples: Array
    """[N] samples that the loaders gave in the step; NaN where unknown."""
    run_delay: Array
    """[N] ns in which the training thread was runnable but had no CPU; NaN where unknown."""
    micro_batches: Array
    """[N] backward passes."""
    cpu: Array | None = None
    """[N] ns that the training thread ran on a CPU; NaN where unknown. None if it does not compute all of the step."""
    elements: Array | None = None
    """[N] elements of the forwards' inputs, or in traces with shapes those of all operators: the amount of work where samples are
    unknown or differ in size; NaN where unknown."""


class Graph(msgspec.Struct, frozen=True):
    """A run, ready to be measured."""

    source: str
    """"step-log" or "trace"."""
    ranks: tuple[int, ...]
    """Rank numbers, by position."""
    groups: list[CycleGroup]
    steps: list[RankSteps]
    """By position."""
    set_aside: dict[str, int] = msgspec.field(default_factory=dict)
    """Number of steps that are not measured, by reason."""
    why: Mapping[int, str] = msgspec.field(default_factory=dict)
    """Of a step log, the reason by number, of steps that :func:`ddpdoctor.measure.steplog.select_steps` excludes."""
    matched: int = 0
    unmatched: int = 0
    refused: str | None = None
    clock_error_ns: float | None = None
    coverage: MatchCoverage | None = None
    """Of a window: how many collectives were found on all ranks."""

    @property
    def cycles(self) -> int:
        """Measured cycles."""
        return sum(len(group.steps) for group in self.groups)

    @property
    def mean_cycle_ns(self) -> float:
        """Mean cycle length, ns: the mean step time on the critical path. NaN without cycles."""
        return float(self.lengths_ns.mean()) if self.groups else float("nan")

    @property
    def lengths_ns(self) -> Array:
        """[cycles] ns of each cycle, group after group."""
        return np.concatenate([np.empty(0), *(group.duration for group in self.groups)])

    @property
    def numbers(self) -> Ints:
        """[cycles] step number of each cycle, group after group."""
        return np.concatenate([np.empty(0, np.int64), *(group.steps for group in self.groups)])


class SegmentClasses(msgspec.Struct, frozen=True):
    """Corresponding segments: the K segments of R ranks as S parts of a step. A rank has each part at most once."""

    part: Ints
    """[K, R] part of the step; -1 where the rank takes no part in what ends the segment."""
    segment: Ints
    """[S, R] segment of each part; -1 where the rank has no such part."""

    def by_class(self, values: Array) -> Array:
        """[N, S, R, ...] of ``values`` [N, K, R, ...]; 0 where a rank has no such part."""
        return _placed(values, self.segment)

    def by_segment(self, values: Array) -> Array:
        """[N, K, R, ...] of ``values`` [N, S, R, ...]; 0 where a rank takes no part."""
        return _placed(values, self.part)


def segment_classes(syncs: Sequence[Sync], world: int) -> SegmentClasses:
    """The corresponding segments of a sequence of synchronisations of ``world`` ranks."""
    if all(len(sync.members) == world for sync in syncs):
        same = np.broadcast_to(np.arange(len(syncs))[:, None], (len(syncs), world))
        return SegmentClasses(same, same)
    part = np.full((len(syncs), world), -1)
    numbers: dict[tuple[object, ...], int] = {}
    seen: Counter[tuple[object, ...]] = Counter()
    for k, sync in enumerate(syncs):
        what = (sync.kind, sync.micro, len(sync.members))
        for rank in sync.members:
            seen[(rank, *what)] += 1
            part[k, rank] = numbers.setdefault((*what, seen[(rank, *what)]), len(numbers))
    segment = np.full((len(numbers), world), -1)
    ends, ranks = np.nonzero(part >= 0)
    segment[part[ends, ranks], ranks] = ends
    return SegmentClasses(part, segment)


def _placed(values: Array, places: Ints) -> Array:
    """``values`` [N, X, R, ...] at ``places`` [Y, R]: [N, Y, R, ...]; 0 where a place is -1."""
    taken: Array = values[:, places, np.arange(places.shape[1])]
    taken[:, places < 0] = 0.0
    return taken


LEFT_OUT = "left out of a long log"
"""Steps that were recorded and not read, see ``steplog.bound``."""


def recorded_steps(steps: Iterable[RankSteps]) -> set[int]:
    """Numbers of the steps that any rank recorded."""
    return {int(number) for of_rank in steps for number in of_rank.steps}


def measured_steps(groups: Iterable[CycleGroup]) -> set[int]:
    """Numbers of the steps that are measured."""
    return {int(number) for group in groups for number in group.steps}


def excluded_steps(
    steps: Iterable[RankSteps], groups: Iterable[CycleGroup], reason: Callable[[int], str]
) -> dict[str, int]:
    """Number of steps that are not measured, by ``reason`` of their numbers."""
    left = recorded_steps(steps) - measured_steps(groups)
    return dict(Counter(reason(number) for number in sorted(left)))


def all_excluded_steps(graph: Graph, logs: Sequence[RankLog]) -> dict[str, int]:
    """Number of excluded steps of ``graph`` by reason, with the steps of ``logs`` that it does not contain, and those that were not
    read."""
    known = recorded_steps(graph.steps) | measured_steps(graph.groups)
    unknown = {step.number for log in logs for step in log.steps} - known
    reason = "outside the profiled window" if graph.source == "trace" else "not timed on every device"
    more = {reason: len(unknown), LEFT_OUT: max((log.left_out for log in logs), default=0)}
    return {**graph.set_aside, **{reason: count for reason, count in more.items() if count}}
