"""The step log of one rank (:class:`RankLog`), and what follows from it alone: the activities of the training thread over time, the
training loaders, the steps with evaluation.

The time of a checkpoint includes unrecorded work before and after ``torch.save``: ``state_dict()``, copies, building a file name. It is
estimated from the gap between two phases that contains the save: the excess over the same gap in other steps counts as checkpoint
time. If ranks synchronise within the gap, for example at a barrier after the save, the barrier divides the gap, and the excess is
assigned to the side on which it lies: the other ranks wait only for what is before the barrier.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import EMPTY, Intervals, Ints, place_in, subtract, union, union_of
from ddpdoctor.measure.phases import NO_GAPS, Gaps, gaps_between
from ddpdoctor.measure.places import Where
from ddpdoctor.measure.taxonomy import Component
from ddpdoctor.rundir.reader import RankRecord
from ddpdoctor.rundir.stepevents import EventKind

from .records import EVALUATED, DeviceTimes, Event, Step, WorkerLog
from .syncpoints import SyncPoint, has_ddp, sync_points_of

_MAX_STEPS_PER_BATCH = 3
"""A loader that gives batches in at least one of this many steps is a training loader. Two alternating training loaders both qualify; a
loader used for evaluation every few steps does not."""
UNKNOWN_LINES = "at which source lines this rank spends its time is known from its recorded calls alone"
"""Part of notes on missing samples."""


def first(infos: Sequence[dict[str, Any]], key: str) -> Any:
    """The first value of ``key`` that is not None."""
    return next((info[key] for info in infos if info.get(key) is not None), None)


def no_samples() -> Ints:
    """An empty table of samples, [0, 4]."""
    return np.empty((0, 4), np.int64)


class RankLog(msgspec.Struct, frozen=True, eq=False, dict=True):
    """The records of one rank's hook. Immutable; :meth:`shifted` returns a copy on another clock.

    Derived values, such as ``sync_points``, are computed at first use and cached.
    """

    rank: int
    record: RankRecord
    steps: Sequence[Step] = ()
    where: Mapping[int, Where] = msgspec.field(default_factory=dict)
    samples: Ints = msgspec.field(default_factory=no_samples)
    """[S, 4] epoch ns, user line, innermost line, ns that the sampling thread waited for the GIL (0 below
    :data:`ddpdoctor.rundir.stepevents.HELD_NS`). Lines are ids into ``sample_where``."""
    sample_where: Mapping[int, Where] = msgspec.field(default_factory=dict)
    samples_every_s: int = 1
    """Samples of every n-th second were read; more than 1 if there were too many."""
    burst_samples: Ints = msgspec.field(default_factory=no_samples)
    """[C, 4] like ``samples``: the burst samples (taken in close succession) that waited for the GIL."""
    burst_ns: int = 0
    """Total length of the bursts, ns."""
    notes: Sequence[str] = ()
    device_times: Mapping[int, DeviceTimes] = msgspec.field(default_factory=dict)
    """By step number, for the steps whose CUDA events were recorded."""
    on_device_time: bool = False
    """Whether forward, backward and optimizer have device times, see :mod:`.devicetime`."""
    left_out: int = 0
    """Steps of the whole run, or of this training, that were recorded but not read, see :mod:`.read_limit`; the same on all ranks."""
    group_ends_ns: Sequence[int] = ()
    """When the rank destroyed a process group, or ended; wall clock, epoch ns."""
    follows_training: bool = False
    """Whether this is one training (:mod:`.trainings`) of a process and not its first."""
    later_trainings_end_ns: int | None = None
    """End of the process's later trainings, wall clock, epoch ns; None if there are none."""
    saved: int | None = None
    """The last step in which a checkpoint was saved, including steps not read and the one in which the rank ended; None if none was."""
    workers: Sequence[WorkerLog] = ()
    """Records of its data loader workers, on their own clock."""

    @property
    def host(self) -> str:
        """Host name."""
        return self.record.host

    @property
    def computes_on_device(self) -> bool:
        """Whether the rank computes on a device, according to its record."""
        return self.record.info.get("device") not in (None, "cpu")

    @property
    def start_ns(self) -> int:
        """Start of the first step, epoch ns; 0 if there is none."""
        return self.steps[0].start_ns if self.steps else 0

    @cached_property
    def sync_points(self) -> list[SyncPoint]:
        """The rank's synchronisations, in order of arrival."""
        return sync_points_of(self.steps, self.record.info)

    @cached_property
    def has_ddp(self) -> bool:
        """Whether DDP reduces the rank's gradients."""
        return has_ddp(self.steps, self.record.info)

    @cached_property
    def activities(self) -> Activities:
        """Activities of the training thread since :attr:`start_ns`."""
        return activities_of(self.steps, self.start_ns, self.loaders_with_workers, self.on_device_time)

    @cached_property
    def main_loaders(self) -> frozenset[int]:
        """Ids of the loaders that give batches in at least a third of the fully recorded steps. Other loaders are for evaluation."""
        used: Counter[int] = Counter()
        for step in self.steps:
            used.update({event.loader for event in step.events if event.gives_batch})
        most = sum(step.in_full for step in self.steps)
        return frozenset(loader for loader, times in used.items() if times * _MAX_STEPS_PER_BATCH >= most)

    @cached_property
    def evaluated(self) -> frozenset[int]:
        """Numbers of the steps with evaluation: a forward without gradients, batches from a loader not in ``main_loaders``, or models in
        evaluation mode."""
        return frozenset(
            step.number
            for step in self.steps
            if EVALUATED in step.marks
            or any(
                event.kind == EventKind.EVALUATION or (event.gives_batch and not self.is_of_training(event))
                for event in step.events
            )
        )

    def is_of_training(self, event: Event) -> bool:
        """Whether an event of a loader is of one that gives training batches. All loaders are if none is in :attr:`main_loaders`."""
        return not self.main_loaders or event.loader in self.main_loaders

    @cached_property
    def usual_loader(self) -> int | None:
        """Id of the loader that gave the most training batches."""
        events = (event for step in self.steps for event in step.events)
        batches = Counter(each.loader for each in events if each.gives_batch and self.is_of_training(each))
        return batches.most_common(1)[0][0] if batches else None

    @cached_property
    def main_loader_settings(self) -> dict[str, Any] | None:
        """Recorded settings of :attr:`usual_loader`."""
        every = enumerate(self.record.info.get("loaders") or [])
        found = (loader for place, loader in every if loader.get("id", place) == self.usual_loader)
        return next(({"id": self.usual_loader, **loader} for loader in found), None)

    @property
    def loaders_with_workers(self) -> set[int]:
        """Ids of the loaders with worker processes, from rank.json or, if that is lost, from the steps."""
        info = self.record.info
        if info.get("loaders") or "rank" in info:
            stated = enumerate(info.get("loaders") or [])
            return {int(of.get("id", place)) for place, of in stated if of.get("num_workers")}
        events = (event for step in self.steps for event in step.events)
        return {event.loader for event in events if event.shows_ready_batches}

    def steps_at(self, moments: Ints) -> Ints:
        """[M] index of the step that contains each of the ``moments`` [M] (epoch ns); -1 if none does."""
        bounds = np.array([(step.start_ns, step.end_ns) for step in self.steps], np.int64).reshape(-1, 2)
        return place_in((bounds[:, 0], bounds[:, 1]), moments)

    def shifted(self, steps_ns: Ints, samples_ns: Ints | int) -> RankLog:
        """The log with steps moved by ``steps_ns`` [N] and samples by ``samples_ns`` [S]; itself if nothing moves."""
        samples, burst_samples = self.samples, self.burst_samples
        if np.any(samples_ns):
            samples = samples.copy()
            samples[:, 0] += samples_ns
            samples.flags.writeable = False
            burst_samples = self.burst_samples.copy()
            burst_samples[:, 0] += _shift_of(burst_samples[:, 0], self.samples[:, 0], samples_ns)
            burst_samples.flags.writeable = False
        steps = self.steps
        if steps_ns.any():
            steps = tuple(step.shifted(ns) for step, ns in zip(steps, steps_ns.tolist(), strict=True))
        if steps is self.steps and samples is self.samples:
            return self
        return replace(self, steps=steps, samples=samples, burst_samples=burst_samples)


def _shift_of(times: Ints, known: Ints, shifts: Ints | int) -> Ints | int:
    """Shift of each of ``times``: that of the last of the ``known`` times before it. ``known`` times move by ``shifts``."""
    if isinstance(shifts, int) or not len(known):
        return 0 if not isinstance(shifts, int) else shifts
    moved: Ints = shifts[np.maximum(np.searchsorted(known, times, side="right") - 1, 0)]
    return moved


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
    starting: set[int] = set()
    spans = _times(
        steps, origin_ns, lambda event: _component(event, starting, with_workers), until_ready=True
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


def _component(event: Event, starting: set[int], with_workers: Collection[int]) -> Component | None:
    """Component of an event. ``starting``: loaders whose next batch still waits for the start of their workers."""
    if event.kind == EventKind.ITERATION:
        if event.loader in with_workers:
            starting.add(event.loader)
        return Component.EPOCH_START
    if event.kind == EventKind.DATA:
        is_first = event.loader in starting
        starting.discard(event.loader)
        return Component.EPOCH_START if is_first or event.exhausted else Component.DATA
    return _WHOLE_EVENTS.get(event.kind)
