"""Step logs in device time: forward, backward and optimizer where the GPU ran them, by the CUDA events of the whole run.

A log says when the host issued work. Where a step's CUDA events were read, too, the same events can be put where the
device ran them, and then what measures a job on CPUs measures this one: a rank arrives at the reduction of its
gradients when its device is done with them, and all go on together. Collectives that the host called otherwise are
left out, since the host's times say little of them.

The clocks need tying twice. An event passes at the earliest when it is recorded: over neighbouring steps, the largest
of (when a step began on the host) - (when it began on the device's own clock) is how far the two clocks are apart, less
the least by which the host ran ahead. What is left of that is taken out over the ranks: a reduction of gradients ends
on all of them at the same moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import Array
from ddpdoctor.rundir import EventKind

from .log import DeviceTimes, Event, RankLog, Step

_NEIGHBOURS = 101
"""Steps over which the clocks are taken to drift by nothing: some ppm of a few minutes at most."""
_FEWEST_STEPS = 8
_TIMED: dict[str, tuple[str, str]] = {
    EventKind.FORWARD: ("fwd", "fwd_end"),
    EventKind.BACKWARD: ("bwd", "bwd_end"),
    EventKind.OPTIMIZER: ("opt", "opt_end"),
}
"""Kind of event → the names of its marks."""
_LEFT_OUT = (EventKind.COLLECTIVE, EventKind.BARRIER, EventKind.WAIT, EventKind.BROADCAST)


def in_device_time(logs: Sequence[RankLog]) -> list[RankLog] | None:
    """``logs`` with only the steps that were timed on the device of every rank, in device time; None where there are too
    few of them."""
    if not logs or not all(log.device_times for log in logs):
        return None
    moved = [
        {step.number: found for step in log.steps if (found := _moved(step, log.device_times)) is not None}
        for log in logs
    ]
    common = sorted(set.intersection(*(set(of) for of in moved)))
    if len(common) < _FEWEST_STEPS:
        return None
    ends = []
    for log, of_rank in zip(logs, moved, strict=True):
        of_host = {step.number: step.start for step in log.steps}
        lag = np.array([of_host[number] - of_rank[number].start for number in common])
        offset = _around(lag, np.max)
        for number, ns in zip(common, offset.tolist(), strict=True):
            _shift(of_rank[number], ns)
        ends.append([_last_reduction(of_rank[number]) for number in common])
    table = np.array(ends)
    early = table - np.median(table, axis=0).astype(np.int64)
    for row, of_rank in zip(early, moved, strict=True):
        for number, ns in zip(common, _around(row, np.median).tolist(), strict=True):
            _shift(of_rank[number], -ns)
    return [
        replace(log, steps=[of_rank[number] for number in common], on_device_time=True)
        for log, of_rank in zip(logs, moved, strict=True)
    ]


def _moved(step: Step, timed: dict[int, DeviceTimes]) -> Step | None:
    """The step with what ran on its device on that one's own clock; what the host did stays where it was. None where its
    marks and its events do not say the same, or no gradients were reduced in it."""
    times = timed.get(step.number)
    if times is None:
        return None
    events: list[Event] = []
    counts = dict.fromkeys(_TIMED, 0)
    reduced = False
    for event in sorted(step.events, key=lambda event: event.start_ns):
        if event.kind in _LEFT_OUT:
            continue
        if event.kind not in _TIMED:
            events.append(event)
            continue
        span = _span(times, *_TIMED[event.kind], counts[event.kind])
        counts[event.kind] += 1
        if span is None:
            return None
        place = msgspec.structs.replace(event, start_ns=span[0], duration_ns=span[1] - span[0])
        if event.reductions:
            ready = [
                at for name, at in times.marks if name == "ready" and span[0] <= times.start + at <= span[1]
            ]
            if not ready:
                return None
            own = {"forward_end_ns": times.start + ready[-1], "ready_ns": [0]}
            also = [msgspec.structs.replace(each, **own) if each.synced else each for each in event.also]
            place = msgspec.structs.replace(place, also=also, **(own if event.synced else {}))
            reduced = True
        events.append(place)
    if not reduced or any(
        sum(name == begin for name, _ in times.marks) != counts[kind] for kind, (begin, _) in _TIMED.items()
    ):
        return None
    return replace(step, start=times.start, end=times.start + times.marks[-1][1], events=events)


def _span(times: DeviceTimes, begin: str, end: str, number: int) -> tuple[int, int] | None:
    starts = [at for name, at in times.marks if name == begin]
    ends = [at for name, at in times.marks if name == end]
    if len(starts) <= number or len(ends) <= number or ends[number] < starts[number]:
        return None
    first, last = starts[number], ends[number]
    if begin == "opt":
        # A closure runs inside the optimizer's step, whose own work begins after it.
        first = max([first, *(at for name, at in times.marks if name == "bwd_end" and at <= last)])
    return times.start + first, times.start + last


def _shift(step: Step, ns: int) -> None:
    step.start += ns
    step.end += ns
    for event in step.events:
        if event.kind in _TIMED:
            event.move(ns)


def _last_reduction(step: Step) -> int:
    return max(event.end_ns for event in step.events if event.kind == EventKind.BACKWARD and event.reductions)


def _around(values: NDArray[np.int64], summary: Callable[..., Array]) -> NDArray[np.int64]:
    """[N] → [N]: ``summary`` of each value and its neighbours."""
    half = min(_NEIGHBOURS // 2, len(values) - 1)
    padded = np.pad(values, half, mode="edge")
    return summary(sliding_window_view(padded, 2 * half + 1), axis=-1).astype(np.int64)
