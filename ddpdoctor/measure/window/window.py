"""One rank's profiler window: steps, collectives, and what device and host did when.

Times are int64 ns on the trace's own clock; :meth:`Window.shifted` gives a window on the common one. A window is immutable: later
stages return new ones.
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
"""Step number outside the marked steps."""
QUEUED_NS = 20_000
"""A collective that starts within this time after the previous one was queued."""


class Window(msgspec.Struct, frozen=True):
    """The content of one rank's window."""

    trace: RankTrace
    rank: int
    host: str
    on_device: bool
    """Whether there are device events; else the training thread's own operators are the computation."""
    steps: Sequence[tuple[int, int, int]]
    """(number, start, end) on the host, in order; [] where the trace marks none."""
    span: tuple[int, int]
    """First start and last end of anything that runs."""
    collectives: Collectives
    sets: Mapping[str, Intervals] = msgspec.field(default_factory=dict)
    """Disjoint interval sets per component of work."""
    compute: Intervals = EMPTY
    """All computation, for overlap."""
    late_launches: Intervals = EMPTY
    """During a collective: no computation, because the host launched it late. A rank that waits in a collective loses there what others
    lose before it."""
    shows_host: bool = True
    """Whether the trace records what the host did. Otherwise it is unknown why the device idles."""
    waits: HostSyncs = HostSyncs()
    """Host synchronisations; on the trace's own clock."""
    idle_after: Mapping[str, Intervals] = msgspec.field(default_factory=dict)
    """The device's idle time that they cause, by their kind."""
    phase_gaps: Mapping[Gap, Intervals] = msgspec.field(default_factory=dict)
    """The gaps between the phases of training steps, by their kind, with the device's later work for them; {} where the trace does not
    mark the phases."""
    forwards: Ints = msgspec.field(default_factory=lambda: np.empty(0, np.int64))
    """Starts of DDP's forward calls on the host: one per micro-batch."""
    updates: Ints = msgspec.field(default_factory=lambda: np.empty(0, np.int64))
    """Starts of the steps of optimizers on the host."""
    elements: Mapping[int, float] = msgspec.field(default_factory=dict)
    """Step → amount of work, where the trace records shapes, see :mod:`.reading`."""
    shifted_ns: int = 0
    """ns by which the window was moved from the trace's own clock."""

    def shifted(self, offset_ns: int) -> Window:
        """The window with everything moved by ``offset_ns``."""

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
        """The window with one more component of work."""
        return replace(self, sets={**self.sets, name: intervals})

    def micro_batches(self, at: Ints) -> Ints:
        """[M] number, within its step, of the micro-batch at each host time; 0 where the trace shows no forward calls."""
        return (self._since_step(self.forwards, at) - 1).clip(min=0)

    def updates_before(self, at: Ints) -> Ints:
        """[M] number of optimizer steps that began before each host time in its step."""
        return self._since_step(self.updates, at)

    def _since_step(self, moments: Ints, at: Ints) -> Ints:
        starts = np.array([start for _, start, _ in self.steps], np.int64)
        since = np.concatenate(([self.span[0]], starts))[np.searchsorted(starts, at, side="right")]
        before: Ints = np.searchsorted(moments, at, side="right") - np.searchsorted(
            moments, since, side="left"
        )
        return before.clip(min=0)


def step_of(window: Window, at: Ints) -> Ints:
    """[M] step in which each host time lies; :data:`UNKNOWN_STEP` outside the marked steps, 0 where none is marked.

    Time between the marks of two steps belongs to the first one, unless a step's mark is missing there.
    """
    if not window.steps:
        return np.zeros(len(at), np.int64)
    numbers, starts, ends = (np.array(of_steps) for of_steps in zip(*window.steps, strict=True))
    until = np.where(np.diff(numbers, append=UNKNOWN_STEP) == 1, np.append(starts[1:], ends[-1]), ends)
    own = place_in((starts, until), at)
    return np.where(own >= 0, numbers[own], UNKNOWN_STEP)


def step_of_collectives(window: Window) -> Ints:
    """[M] step in which the host launched each collective; :data:`UNKNOWN_STEP` outside the marked steps.

    A kernel without a recorded launch was launched before the window began, by a host that was ahead of its device: by its own start it
    would be in a later step. If no launch was recorded at all, the start counts.
    """
    comms = window.collectives
    steps = step_of(window, comms.issued)
    if window.on_device and comms.launch_known.any():
        steps = np.where(comms.launch_known, steps, UNKNOWN_STEP)
    return steps


def in_steps(window: Window) -> Mask:
    """[events of the trace] whether each is of a marked step: what a device does by its launch, all else by its start. All of them where
    no step is marked.

    An unrecorded launch came after those of what the device did before; where none was recorded, the device's own times count.
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
    """[M] when each collective can start, ns, and whether it was queued until then.

    On a device each process group has its own stream, and a rank may be in several collectives at once: a part was queued where it
    started as another ended. On a CPU a collective can start when the previous one is over, so that a rank is in one at a time.
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
    """The windows with the sizes of DDP's buckets on Gloo's reductions, whose traces lack them.

    Buckets come in the order of ``bucket_bytes`` in every backward pass. A step whose number of reductions is not a multiple of that of
    the buckets is unchanged.
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
    for first, behind in np.searchsorted(comms.issued[reductions], bounds):
        inside = reductions[first:behind]
        if len(inside) and len(inside) % count == 0:
            sizes[inside] = np.resize(bucket_bytes, len(inside))
    return replace(window, collectives=replace(comms, bytes=sizes))
