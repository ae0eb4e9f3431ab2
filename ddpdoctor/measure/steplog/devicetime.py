"""Step logs in device time: forward, backward and optimizer as the GPU ran them, from the CUDA events of the whole run.

A log records when the host issued work. If a step's CUDA events were recorded, its events can be moved to when the device
ran them, and the analysis of CPU jobs applies: a rank arrives at a gradient reduction when its device has computed the
gradients, and the reduction ends on all ranks together. Other collectives are omitted, because their host times do not show
when they ran.

Clocks are aligned in two steps. A CUDA event completes no earlier than it is recorded. So, over neighbouring steps, the
maximum of (an event on the host) - (the event on the device's clock) is the offset of the two clocks, minus the
smallest run-ahead of the host: none if the device waits for the host at any of these events, as after a late batch or a checkpoint.
That remainder is removed by comparing ranks: a gradient reduction ends on all of them at the same moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.numerics import Ints, running, running_median
from ddpdoctor.rundir.stepevents import EventKind

from .log import RankLog
from .records import DeviceTimes, Event, Step


class Tuning(msgspec.Struct, frozen=True):
    """Parameters for aligning the clocks of devices with those of their hosts."""

    neighbours: int = 101
    """Steps over which clock drift is neglected: a few minutes, some ppm."""
    fewest_steps: int = 8
    """Steps timed on all ranks; with fewer, a median or maximum may be random."""


TUNING = Tuning()

_TIMED: dict[str, tuple[str, str]] = {
    EventKind.FORWARD: ("fwd", "fwd_end"),
    EventKind.BACKWARD: ("bwd", "bwd_end"),
    EventKind.OPTIMIZER: ("opt", "opt_end"),
}
"""Kind of event → the names of its marks."""
_OMITTED_KINDS = (EventKind.COLLECTIVE, EventKind.BARRIER, EventKind.WAIT, EventKind.BROADCAST)


def in_device_time(logs: Sequence[RankLog]) -> list[RankLog] | None:
    """``logs`` in device time, restricted to the steps timed on the device of every rank; None if there are fewer than
    ``TUNING.fewest_steps``."""
    if not logs or not all(log.device_times for log in logs):
        return None
    timed = [
        {
            step.number: one
            for step in log.steps
            if (one := timed_step(step, log.device_times.get(step.number))) is not None
        }
        for log in logs
    ]
    common = sorted(set.intersection(*(set(steps) for steps in timed)))
    if len(common) < TUNING.fewest_steps:
        return None
    chosen = [[steps[number] for number in common] for steps in timed]
    return [
        replace(
            log,
            steps=tuple(step.on_host_clock(ns) for step, ns in zip(steps, ahead_ns.tolist(), strict=True)),
            on_device_time=True,
        )
        for log, steps, ahead_ns in zip(logs, chosen, _host_clock_offsets(chosen), strict=True)
    ]


class _TimedStep(msgspec.Struct, frozen=True):
    """A step with its timed events on its device's clock."""

    step: Step
    """As the host recorded it."""
    start_ns: int
    """On the device's own clock."""
    length_ns: int
    events: tuple[Event, ...]
    """Timed events: ns after ``start_ns``. Others: ns after the step's start on the host."""
    ahead_ns: int
    """Lower bound of the time by which the host's clock is ahead of the device's."""

    @property
    def last_reduction_ns(self) -> int:
        """End of the last gradient reduction, on the device's own clock."""
        reduced = [e.end_ns for e in self.events if e.kind == EventKind.BACKWARD and e.reductions]
        return self.start_ns + max(reduced)

    def on_host_clock(self, ahead_ns: int) -> Step:
        """The step on the hosts' clock, which is ``ahead_ns`` ahead of the device's. Host events keep their times."""
        start_ns = self.start_ns + ahead_ns
        lag_ns = self.step.start_ns - start_ns
        events = tuple(
            event if event.kind in _TIMED else replace(event, start_ns=event.start_ns + lag_ns)
            for event in self.events
        )
        return replace(self.step, start_ns=start_ns, end_ns=start_ns + self.length_ns, events=events)


def timed_step(step: Step, times: DeviceTimes | None) -> _TimedStep | None:
    """The step with its device work on the device's own clock. None if marks and events disagree, or no gradients were
    reduced in the step."""
    if times is None:
        return None
    counts: Counter[str] = Counter()
    events: list[Event] = []
    # Of each mark, ns after the step's start: on the host minus on the device.
    recorded = [0]
    for event in sorted(step.events, key=lambda event: event.start_ns):
        if event.kind in _TIMED:
            timed = _timed_event(event, times, counts[event.kind])
            if timed is None:
                return None
            recorded.append(event.start_ns - times.marks_named(_TIMED[event.kind][0])[counts[event.kind]])
            counts[event.kind] += 1
            events.append(timed)
        elif event.kind not in _OMITTED_KINDS:
            events.append(event)
    counts_match = all(len(times.marks_named(begin)) == counts[kind] for kind, (begin, _) in _TIMED.items())
    reduced = any(event.kind in _TIMED and event.reductions for event in events)
    if not counts_match or not reduced:
        return None
    ahead_ns = step.start_ns - times.start_ns + max(recorded)
    return _TimedStep(step, times.start_ns, times.length_ns, tuple(events), ahead_ns)


def _timed_event(event: Event, times: DeviceTimes, number: int) -> Event | None:
    """The ``number``-th event of its kind as the device ran it, ns after the step's start on the device. None if its
    marks are missing or inconsistent."""
    starts, ends = map(times.marks_named, _TIMED[event.kind])
    if len(starts) <= number or len(ends) <= number or ends[number] < starts[number]:
        return None
    start_ns, end_ns = starts[number], ends[number]
    if event.kind == EventKind.OPTIMIZER:
        # A closure runs inside optimizer.step(); the optimizer's own work starts when the closure's backward ends.
        start_ns = max([start_ns, *(at for at in times.marks_named("bwd_end") if at <= end_ns)])
    timed = replace(event, start_ns=start_ns, duration_ns=end_ns - start_ns)
    if not event.reductions:
        return timed
    ready = [at for at in times.marks_named("ready") if start_ns <= at <= end_ns]
    if not ready:
        return None
    own = {"forward_end_ns": ready[-1], "ready_ns": (0,)}
    also = tuple(replace(each, **own) if each.synced else each for each in event.also)
    return replace(timed, also=also, **(own if event.synced else {}))


def _host_clock_offsets(ranks: Sequence[Sequence[_TimedStep]]) -> list[Ints]:
    """By rank: [N] ns by which the hosts' clock is ahead of the device's at each step."""
    ahead = [
        running(np.array([timed.ahead_ns for timed in steps]), TUNING.neighbours).max(axis=-1)
        for steps in ranks
    ]
    ends = np.array(
        [
            np.array([timed.last_reduction_ns for timed in steps]) + rank_ahead
            for steps, rank_ahead in zip(ranks, ahead, strict=True)
        ]
    )
    early = ends - np.median(ends, axis=0).astype(np.int64)
    return [
        rank_ahead - running_median(rank_early, TUNING.neighbours)
        for rank_ahead, rank_early in zip(ahead, early, strict=True)
    ]
