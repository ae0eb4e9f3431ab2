"""One rank's profiler window: steps, collectives, and the work of device and host over time.

Times are int64 ns on the trace's own clock; :meth:`Window.shifted` returns a window on the common clock. Windows are immutable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.numerics import EMPTY, Intervals, Ints, Mask, place_in
from ddpdoctor.measure.phases import Gap
from ddpdoctor.measure.taxonomy import SyncKind
from ddpdoctor.trace import RankTrace

from .collectives import ROUNDING_NS, Collectives
from .idle import HostSyncs
from .launches import DEVICE, launches

UNKNOWN_STEP = -1
"""Step number of times outside the marked steps."""
QUEUED_NS = 20_000
"""A collective was queued if it starts within this time after the end of another one."""


class Window(msgspec.Struct, frozen=True):
    """The content of one rank's window."""

    trace: RankTrace
    rank: int
    host: str
    on_device: bool
    """Whether there are device events; else the operators of the training thread are the computation."""
    steps: Sequence[tuple[int, int, int]]
    """(number, start, end) on the host, in order; [] if the trace marks none."""
    span: tuple[int, int]
    """First start and last end of the device's events, or of the host's for a CPU."""
    collectives: Collectives
    sets: Mapping[str, Intervals] = msgspec.field(default_factory=dict)
    """Disjoint interval sets per component of work."""
    compute: Intervals = EMPTY
    """All computation, for overlap."""
    late_launches: Intervals = EMPTY
    """Time during collectives without computation because the host launched it late. A rank that waits in a collective has this idle time
    there, other ranks have it before the collective."""
    shows_host: bool = True
    """Whether the trace records what the host did. Otherwise it is unknown why the device is idle."""
    waits: HostSyncs = HostSyncs()
    """Host synchronisations, on the trace's own clock."""
    idle_after: Mapping[str, Intervals] = msgspec.field(default_factory=dict)
    """The device's idle time that host synchronisations cause, by their kind."""
    phase_gaps: Mapping[Gap, Intervals] = msgspec.field(default_factory=dict)
    """The gaps between the phases of training steps, by kind; on a device, idle time in them and the work that was launched in them. {} if
    the trace does not mark the phases."""
    forwards: Ints = msgspec.field(default_factory=lambda: np.empty(0, np.int64))
    """Starts of DDP's forward calls on the host, one per micro-batch."""
    updates: Ints = msgspec.field(default_factory=lambda: np.empty(0, np.int64))
    """Starts of optimizer steps on the host."""
    elements: Mapping[int, float] = msgspec.field(default_factory=dict)
    """Step → amount of work, if the trace records shapes, see :mod:`.reading`."""
    shifted_ns: int = 0
    """ns by which the window was moved from the trace's own clock."""

    def shifted(self, offset_ns: int) -> Window:
        """Return the window with all times moved by ``offset_ns``."""

        def moved(intervals: Intervals) -> Intervals:
            return intervals[0] + offset_ns, intervals[1] + offset_ns

        return replace(
            self,
            steps=[(number, start + offset_ns, end + offset_ns) for number, start, end in self.steps],
            span=(self.span[0] + offset_ns, self.span[1] + offset_ns),
            collectives=self.collectives.shifted(offset_ns),
            sets={name: moved(intervals) for name, intervals in self.sets.items()},
            compute=moved(self.compute),
            late_launches=moved(self.late_launches),
            idle_after={kind: moved(intervals) for kind, intervals in self.idle_after.items()},
            phase_gaps={gap: moved(intervals) for gap, intervals in self.phase_gaps.items()},
            forwards=self.forwards + offset_ns,
            updates=self.updates + offset_ns,
            shifted_ns=self.shifted_ns + offset_ns,
        )

    def with_set(self, name: str, intervals: Intervals) -> Window:
        """Return the window with the intervals of one component of work added or replaced."""
        return replace(self, sets={**self.sets, name: intervals})

    def micro_batches(self, at: Ints) -> Ints:
        """Return [M] the number within its step of the micro-batch at each host time; 0 if the trace has no forward calls."""
        return (self._count_in_step(self.forwards, at) - 1).clip(min=0)

    def updates_before(self, at: Ints) -> Ints:
        """Return [M] the number of optimizer steps that began before each host time in the same step."""
        return self._count_in_step(self.updates, at)

    def _count_in_step(self, moments: Ints, at: Ints) -> Ints:
        starts = np.array([start for _, start, _ in self.steps], np.int64)
        since = np.concatenate(([self.span[0]], starts))[np.searchsorted(starts, at, side="right")]
        before: Ints = np.searchsorted(moments, at, side="right") - np.searchsorted(
            moments, since, side="left"
        )
        return before.clip(min=0)


def step_of(window: Window, at: Ints) -> Ints:
    """Return [M] the step that contains each host time; :data:`UNKNOWN_STEP` outside the marked steps, 0 if no step is marked.

    Time between two marked steps belongs to the first one, unless the mark of a step is missing in between.
    """
    if not window.steps:
        return np.zeros(len(at), np.int64)
    numbers, starts, ends = (np.array(of_steps) for of_steps in zip(*window.steps, strict=True))
    until = np.where(np.diff(numbers, append=UNKNOWN_STEP) == 1, np.append(starts[1:], ends[-1]), ends)
    own = place_in((starts, until), at)
    return np.where(own >= 0, numbers[own], UNKNOWN_STEP)


def step_of_collectives(window: Window) -> Ints:
    """Return [M] the step in which the host launched each collective; :data:`UNKNOWN_STEP` outside the marked steps.

    A kernel without a recorded launch was launched before the window began, by a host that was ahead of its device. Its own start would be
    in a later step. If no launch was recorded at all, the start counts.
    """
    comms = window.collectives
    steps = step_of(window, comms.issued)
    if window.on_device and comms.launch_known.any():
        steps = np.where(comms.launch_known, steps, UNKNOWN_STEP)
    return steps


def in_steps(window: Window) -> Mask:
    """Return [events of the trace] whether each belongs to a marked step: a device event by its launch, any other event by its start. All
    True if no step is marked.

    An unrecorded launch counts as simultaneous with the latest launch of earlier device events. If no launch was recorded, device events
    count by their own starts.
    """
    trace, at = window.trace, window.trace.start_ns + window.shifted_ns
    if not window.steps:
        return np.ones(trace.size, bool)
    rows = np.flatnonzero(trace.category_mask(*DEVICE))
    calls = launches(trace, rows)
    if (calls >= 0).any():
        launched = np.where(calls >= 0, at[calls], window.steps[0][1] - 1)
        at[rows] = np.where(calls >= 0, launched, np.maximum.accumulate(launched))
    inside: Mask = step_of(window, at) != UNKNOWN_STEP
    return inside


def arrivals(window: Window) -> tuple[Ints, Mask]:
    """Return [M] when each collective can start, ns, and whether it was queued until then.

    On a device each process group has its own stream, and a rank may be in several collectives at the same time. A collective was queued
    if it started when another one ended. On a CPU it can start when the previous one is over, so a rank is in one at a time.
    """
    comms = window.collectives
    if window.on_device:
        order = np.argsort(comms.end, kind="stable")
        before = np.searchsorted(comms.end[order], comms.start + ROUNDING_NS, side="right") - 1
        # A collective shorter than the clock's rounding is not queued after itself.
        before -= (before >= 0) & (order[np.maximum(before, 0)] == np.arange(len(comms)))
        over = comms.end[order[np.maximum(before, 0)]] if len(comms) else comms.end
        return comms.start, (before >= 0) & (comms.start - over < QUEUED_NS)
    order = np.argsort(comms.start, kind="stable")
    over = np.maximum.accumulate(comms.end[order])[:-1]
    arrival, queued = comms.start.copy(), np.zeros(len(comms), bool)
    queued[order[1:]] = comms.start[order[1:]] - over < QUEUED_NS
    arrival[order[1:]] = np.maximum(arrival[order[1:]], over)
    return np.minimum(arrival, comms.end), queued


def with_bucket_sizes(windows: Sequence[Window], bucket_bytes: Sequence[float]) -> list[Window]:
    """Return the windows with the sizes of DDP's buckets set on Gloo's reductions, because Gloo's traces lack them.

    Buckets are reduced in the order of ``bucket_bytes`` in every backward pass. A step is unchanged if its number of reductions is not
    a multiple of the number of buckets.
    """
    return [_with_bucket_sizes(window, bucket_bytes) if len(bucket_bytes) else window for window in windows]


def _with_bucket_sizes(window: Window, bucket_bytes: Sequence[float]) -> Window:
    comms, count = window.collectives, len(bucket_bytes)
    if not np.isnan(comms.bytes).all():
        return window
    order = np.argsort(comms.issued, kind="stable")
    reductions = order[comms.of_kind(SyncKind.GRADIENTS)[order]]
    bounds = np.array([(start, end) for _, start, end in window.steps], np.int64)
    sizes = comms.bytes.copy()
    for first, stop in np.searchsorted(comms.issued[reductions], bounds):
        inside = reductions[first:stop]
        if len(inside) and len(inside) % count == 0:
            sizes[inside] = np.resize(bucket_bytes, len(inside))
    return replace(window, collectives=replace(comms, bytes=sizes))
