"""The dependency graph of a run: cycles of work and synchronisations. The later stages measure, attribute and replay it.

A *cycle* lasts from the end of the last synchronisation of step *i - 1* to the end of the last one of step *i*. All ranks are together
at both ends, so cycles are independent of each other, and their mean length is the mean step time. In a cycle each rank works in
*segments*, from its own end of one synchronisation to its own arrival at the next:

    begin -> work -> arrival | wait | transfer | own end -> work -> arrival ...

Cycles with the same sequence of synchronisations are in one :class:`CycleGroup` of dense arrays with axes N (cycles), K
(synchronisations), R (ranks) and C (components of work). Times are float64 ns on the run's common clock; NaN if a rank takes no part.

Ranks are compared by corresponding segments. Segments that end at synchronisations of different process groups can be the same part of a
step. For example, if each host reduces among its own ranks first, the segments before these reductions correspond. Two segments correspond
if they end at synchronisations of the same kind, with the same number of ranks, in the same backward pass, and if each is the n-th such
segment of its rank.

Every recorded step is measured, or excluded with a reason.
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
from ddpdoctor.measure.numerics import Array, Ints, Mask, nan_median
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.taxonomy import INDEX, STANDALONE, Component, LateCause, SyncKind

from .lateness import Lateness, lateness_of

READY_BATCH_SHARE = 0.02
"""If fetching a batch takes at most this share of a step, the batch was ready: its tensors arrive through shared memory and a queue within
tenths of a millisecond. This time is part of the host's time to launch the step, not a wait for data."""
_REMAINDER = 1e-3
"""A small amount that avoids division by zero: in ns, and as a share of the largest idle time."""
_UNSET: Array = np.empty(0)
"""Placeholder of a field of :class:`CycleGroup` until its default value is computed."""


class Sync(msgspec.Struct, frozen=True):
    """One synchronisation in a cycle's sequence."""

    kind: str
    """A :class:`~ddpdoctor.measure.taxonomy.SyncKind`."""
    name: str
    members: tuple[int, ...]
    """Positions of the ranks that take part."""
    micro: int = 0
    """For gradients: number of the backward pass within the step."""
    group: str = ""
    root: int | None = None
    """Position of the root of a broadcast, for which the other members wait; None if all members wait for each other."""
    size: int = 0
    """Ranks in its process group, recorded or not; 0 if unknown."""
    update: int = 0
    """Number of optimizer steps before it in the step. A GAN has two per step, one for each model."""


class CycleGroup(msgspec.Struct, frozen=True, dict=True):
    """Cycles with the same sequence of synchronisations."""

    syncs: tuple[Sync, ...]
    steps: Ints
    """[N] step number."""
    begin: Array
    """[N, R] the rank's own end of the previous cycle's last synchronisation."""
    arrival: Array
    """[N, K, R]"""
    end: Array
    """[N, K, R] the rank's own end."""
    work: Array
    """[N, K, R, C] ns of each component in the segment before the arrival. The components of a segment add up to its length."""
    message_bytes: Array
    """[N, K] bytes that a rank contributes; NaN if unknown."""
    recorded: Array | None = None
    """[N, R, C] ns of each component in the cycle, as the step logs' events show it; ``work`` may be refined later. None for a window."""
    hidden: Array | None = None
    """[N, K, R, C] ns of each component between own arrival and own end, concurrently with the synchronisation; None if nothing can
    overlap. A rank that waits in a reduction while its backward pass continues computes as much as the late rank, so its work is the sum
    of ``work`` and ``hidden``."""
    hidden_after_ready: Array = _UNSET
    """[N, K, R, C] ns of the part of ``hidden`` after the rank was ready for the cycle's last synchronisation. Ranks that wait there
    already do part of the next cycle's work, which the late rank does afterwards; so on all ranks this part counts in the next cycle."""
    carried_in: Array = _UNSET
    """[N, R, C] ns of the cycle's work that the rank did before the cycle began (``hidden_after_ready`` of the previous cycle)."""
    concurrent_compute: Array = _UNSET
    """[N, K, R] ns of computation between own arrival and own end, which remains to be done if the synchronisation is removed."""
    concurrent_compute_in_wait: Array = _UNSET
    """[N, K, R] ns of ``concurrent_compute`` while the rank waits for the last one to arrive."""
    exposed: Array | None = None
    """[N, K] ns of the transfer that a faster link could save at most: the time in which a member does not compute during it, minimum over
    the members. None if nothing overlaps with a transfer."""
    standalone_ns: dict[str, Array] = msgspec.field(default_factory=dict)
    """[N, R] ns that each rank would take if it waited for no other rank, by the kinds of work in :data:`STANDALONE`. This is more than
    measured if the rank's loader workers prepare batches, or its host issues work, while it waits for others. For a missing kind, it is as
    measured."""
    issue_time_ns: Array = _UNSET
    """[N, R] ns that the rank's host needs to issue the step, a lower bound of the rank's step time (see :mod:`.standalone_times`); 0
    if unknown."""
    ready: Array = _UNSET
    """[N, K, R] when the rank's part could have started if the collective before it had already ended. Earlier than the arrival if the part
    was queued behind that collective."""
    queued_after: Ints | Array = _UNSET
    """[N, K, R] index k of the rank's collective (of any process group) behind which its part was queued; -1 if it was not queued, or if
    this is unknown."""
    idle_after: dict[str, Array] = msgspec.field(default_factory=dict)
    """Kind of synchronisation → [N, K, R] ns of the segment in which the device is idle because its host had waited in such a
    synchronisation (see ``window.idle``). {} if there is none, or if it is unknown."""
    on_device: bool = False
    """Whether collectives run on a device concurrently with the computation, which waits for only some of them (see ``replay.replay``)."""
    dependency_probability: Array = _UNSET
    """[K, R] probability that the rank's computation waits for the collective (see :mod:`.segments`)."""

    def __post_init__(self) -> None:
        """Set the defaults: nothing overlaps with synchronisations, nothing is queued, ranks are ready at their arrival."""
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
            if getattr(self, name) is _UNSET:
                force_setattr(self, name, values)

    @cached_property
    def last_arrival(self) -> Array:
        """[N, K] when the last member arrived."""
        latest: Array = np.nanmax(self.arrival, axis=2)
        return latest

    @cached_property
    def common_end(self) -> Array:
        """[N, K] when the synchronisation is over: the median of the members' own ends, but not before the last arrival.

        Own ends differ because threads wake up at different times.
        """
        return np.maximum(nan_median(self.end, axis=2), self.last_arrival)

    @cached_property
    def transfer(self) -> Array:
        """[N, K] ns from the last arrival to the common end."""
        return self.common_end - self.last_arrival

    @cached_property
    def exit_skew(self) -> Array:
        """[N, K, R] own end minus common end; negative if the rank continues earlier than most."""
        return self.end - self.common_end[:, :, None]

    @cached_property
    def released(self) -> Array:
        """[N, K, R] when each rank stops waiting for others (see :meth:`released_at`), limited to its own arrival and own end."""
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
    def waits_for_end(self) -> Array:
        """[K, R] probability that the computation of a rank waits for the end of a collective on a device: 1 for collectives that are not
        DDP's and for the last bucket of a backward pass, else as measured. 0 if the rank takes no part."""
        last_of = {
            (sync.micro, sync.group, sync.members): k
            for k, sync in enumerate(self.syncs)
            if sync.kind == SyncKind.GRADIENTS
        }
        waits: Array = np.zeros(self.arrival.shape[1:])
        for k, sync in enumerate(self.syncs):
            is_last = last_of.get((sync.micro, sync.group, sync.members)) == k
            waits[k, list(sync.members)] = is_last or sync.kind != SyncKind.GRADIENTS
        return np.maximum(waits, np.where(np.isnan(self.arrival[0]), 0.0, self.dependency_probability))

    @cached_property
    def lateness(self) -> Lateness:
        """The lateness of each rank at each synchronisation."""
        return lateness_of(self)

    @cached_property
    def segment_classes(self) -> SegmentClasses:
        """The corresponding segments of the ranks."""
        return segment_classes(self.syncs, self.arrival.shape[2])

    def released_at(self, k: int, arrival: Array | None = None) -> Array:
        """[N, members] when each member may leave the synchronisation: at the last arrival, except at a broadcast. ``arrival`` [N, members]
        replaces the measured arrivals.

        A member may leave a broadcast when it and the root have arrived. But if in the run it left after the last arrival, it is assumed to
        wait for all members: whether a broadcast does so depends on its algorithm (trees forward data, small messages are buffered).
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
        """Return the group with every uncertain dependency decided: computations wait (``waits``) or do not."""
        likely = self.dependency_probability
        decided = np.where((likely > 0) & (likely < 1), float(waits), likely)
        return replace(self, dependency_probability=decided)

    def with_standalone(self, kind: str, standalone_ns: Array | None) -> CycleGroup:
        """Return the group with the standalone time of one kind, [N, R] ns; unchanged for None."""
        if standalone_ns is None:
            return self
        return replace(self, standalone_ns={**self.standalone_ns, kind: standalone_ns})

    @cached_property
    def work_standalone(self) -> Array:
        """[N, K, R, C] ns of ``work``, in which the waits for data and for the host are as long as they would be if the rank waited for no
        other."""
        work = self.work.copy() if self.standalone_ns else self.work
        if LateCause.DATA in self.standalone_ns:
            # The missing time is added to the segments in which this rank waits for data; if there are none, to those in which any rank
            # does.
            data = work[..., INDEX[Component.DATA]]
            own = np.where(data.sum(axis=1, keepdims=True) > 0, data, data.sum(axis=2, keepdims=True))
            missing = np.clip(self.standalone_ns[LateCause.DATA] - data.sum(axis=1), 0, None)
            data += missing[:, None, :] * own / np.maximum(own.sum(axis=1, keepdims=True), 1.0)
        if LateCause.HOST in self.standalone_ns:
            self._add_standalone_host(work)
        return work

    def _add_standalone_host(self, work: Array) -> None:
        """Add to ``work`` the idle time that waiting for other ranks hid. It is distributed over segments as on the rank with the most
        visible idle time."""
        columns = [INDEX[component] for component in (Component.DATA, *STANDALONE[LateCause.HOST])]
        idle = work[..., columns]
        was_ready = (
            idle[..., 0].sum(axis=1, keepdims=True) <= READY_BATCH_SHARE * self.duration[:, None, None]
        )
        idle[..., 0] *= was_ready
        most_idle = idle.sum(axis=(1, 3)).argmax(axis=1)
        reference = idle[np.arange(len(idle)), :, most_idle][:, :, None]
        takes_part = ~np.isnan(self.arrival)[..., None]
        pattern = np.maximum(reference - idle, _REMAINDER * np.abs(reference) + _REMAINDER) * takes_part
        missing = np.clip(self.standalone_ns[LateCause.HOST] - idle[..., 1:].sum(axis=(1, 3)), 0, None)
        whole = np.maximum(pattern.sum(axis=(1, 3), keepdims=True), _REMAINDER)
        work[..., columns] += missing[:, None, :, None] * pattern / whole

    @cached_property
    def work_with_overlap(self) -> Array:
        """[N, K, R, C] ns of :attr:`work_standalone` and of the work that overlapped with the previous synchronisation."""
        return self.with_overlap(self.work_standalone)

    def with_overlap(self, work: Array) -> Array:
        """[N, K, R, C] ns of ``work`` and of the work that overlapped with the previous synchronisation.

        Work that overlaps with the cycle's last synchronisation counts in the next cycle: that of the previous cycle (``carried_in``) is
        added to the first segment.
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
    def reduced_again(self) -> Mask:
        """[K] whether the same gradients are reduced once more before the optimizer steps: in a later micro-batch of the same group, by
        messages that include those of this one. Another module of the group has messages of other sizes, or another number of them."""
        sizes = np.nan_to_num(self.message_bytes).max(axis=0, initial=0.0).tolist()
        # Messages by size, of each micro-batch of a group between two steps of its optimizer.
        passes: dict[tuple[str, int], dict[int, Counter[float]]] = {}
        for sync, size in zip(self.syncs, sizes, strict=True):
            if sync.kind == SyncKind.GRADIENTS:
                micros = passes.setdefault((sync.group, sync.update), {})
                micros.setdefault(sync.micro, Counter())[size] += 1
        repeated = {
            (*key, micro): any(messages <= later for number, later in micros.items() if number > micro)
            for key, micros in passes.items()
            for micro, messages in micros.items()
        }
        return np.array(
            [
                sync.kind == SyncKind.GRADIENTS and repeated[sync.group, sync.update, sync.micro]
                for sync in self.syncs
            ],
            bool,
        )

    @cached_property
    def duration(self) -> Array:
        """[N] ns from the latest end in the previous cycle to the latest end in this one."""
        length: Array = np.nanmax(self.end, axis=(1, 2)) - np.nanmax(self.begin, axis=1)
        return length


class RankSteps(msgspec.Struct, frozen=True):
    """All recorded steps of one rank, measured or excluded."""

    steps: Ints
    start: Array
    end: Array
    samples: Array
    """[N] samples in the step's batches; NaN if unknown."""
    run_delay: Array
    """[N] ns in which the training thread was runnable but had no CPU; NaN if unknown."""
    micro_batches: Array
    """[N] backward passes; in traces, forward passes."""
    cpu: Array
    """[N] CPU time of the training thread, ns; NaN if unknown, or if a device does the computation."""
    elements: Array
    """[N] elements of the inputs of forward passes; in traces with shapes, amount of work of all operators (see
    ``window.Window.elements``). Used if samples are unknown or differ in size. NaN if unknown."""
    batch: Array
    """[N] samples per batch, mean over the step's batches; NaN if unknown."""


class Graph(msgspec.Struct, frozen=True):
    """The dependency graph of a run."""

    source: str
    """"step-log" or "trace"."""
    ranks: tuple[int, ...]
    """Rank numbers, by position."""
    groups: list[CycleGroup]
    steps: list[RankSteps]
    """By position."""
    set_aside: dict[str, int] = msgspec.field(default_factory=dict)
    """Number of excluded steps, by reason."""
    why: Mapping[int, str] = msgspec.field(default_factory=dict)
    """Step number → reason, of steps that :func:`ddpdoctor.measure.steplog.select_steps` excludes; {} for a window."""
    matched: int = 0
    unmatched: int = 0
    refused: str | None = None
    clock_error_ns: float | None = None
    coverage: MatchCoverage | None = None
    """For a window: how many collectives were found on all ranks."""

    @property
    def cycles(self) -> int:
        """Measured cycles."""
        return sum(len(group.steps) for group in self.groups)

    @property
    def mean_cycle_ns(self) -> float:
        """Mean cycle length in ns, which is the mean step time on the critical path. NaN without cycles."""
        return float(self.lengths_ns.mean()) if self.groups else float("nan")

    @property
    def ranks_meet(self) -> bool:
        """Whether the ranks synchronise in the cycles. If not, each rank's cycle ends with its own step."""
        return not any(sync.kind == SyncKind.STEP_END for group in self.groups for sync in group.syncs)

    @property
    def lengths_ns(self) -> Array:
        """[cycles] length of each cycle in ns, group after group."""
        return np.concatenate([np.empty(0), *(group.duration for group in self.groups)])

    @property
    def numbers(self) -> Ints:
        """[cycles] step number of each cycle, group after group."""
        return np.concatenate([np.empty(0, np.int64), *(group.steps for group in self.groups)])


class SegmentClasses(msgspec.Struct, frozen=True):
    """Classes of corresponding segments. Each class is a part of the step: the K segments of R ranks become S parts. A rank has at most one
    segment in each."""

    part: Ints
    """[K, R] the part to which the segment belongs; -1 if the rank is no member of the synchronisation that ends the segment."""
    segment: Ints
    """[S, R] the segment of each part; -1 if the rank has no such part."""

    def by_class(self, values: Array) -> Array:
        """Return ``values`` [N, K, R, ...] as [N, S, R, ...]; 0 if a rank has no such part."""
        return _taken_at(values, self.segment)

    def by_segment(self, values: Array) -> Array:
        """Return ``values`` [N, S, R, ...] as [N, K, R, ...]; 0 if a rank is no member."""
        return _taken_at(values, self.part)


def segment_classes(syncs: Sequence[Sync], world: int) -> SegmentClasses:
    """Return the corresponding segments of a sequence of synchronisations of ``world`` ranks."""
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


def _taken_at(values: Array, places: Ints) -> Array:
    """``values`` [N, X, R, ...] at ``places`` [Y, R], as [N, Y, R, ...]; 0 if a place is -1."""
    taken: Array = values[:, places, np.arange(places.shape[1])]
    taken[:, places < 0] = 0.0
    return taken


LEFT_OUT = "left out of a long log"
"""Reason for steps that were recorded but not read, see ``steplog.read_limit``."""


def recorded_steps(steps: Iterable[RankSteps]) -> set[int]:
    """Return the numbers of the steps that any rank recorded."""
    return {int(number) for of_rank in steps for number in of_rank.steps}


def measured_steps(groups: Iterable[CycleGroup]) -> set[int]:
    """Return the numbers of the measured steps."""
    return {int(number) for group in groups for number in group.steps}


def excluded_steps(
    steps: Iterable[RankSteps], groups: Iterable[CycleGroup], reason: Callable[[int], str]
) -> dict[str, int]:
    """Return the number of excluded steps by reason; ``reason`` returns the reason for a step number."""
    left = recorded_steps(steps) - measured_steps(groups)
    return dict(Counter(reason(number) for number in sorted(left)))


def all_excluded_steps(graph: Graph, logs: Sequence[RankLog]) -> dict[str, int]:
    """Return the number of excluded steps of ``graph`` by reason, including the steps of ``logs`` that it does not contain, and steps that
    were not read."""
    known = recorded_steps(graph.steps) | measured_steps(graph.groups)
    unknown = {step.number for log in logs for step in log.steps} - known
    reason = "outside the profiled window" if graph.source == "trace" else "not timed on every device"
    more = {reason: len(unknown), LEFT_OUT: max((log.left_out for log in logs), default=0)}
    return {**graph.set_aside, **{reason: count for reason, count in more.items() if count}}
