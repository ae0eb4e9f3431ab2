"""Steps in which ranks were stopped from outside: by a signal, a frozen container, a scheduler that gives the machine to others.

Such a step says nothing of the job, and one of an hour would drown all others in the mean. A long step of the job's own, as a
batch that comes from a storage that hangs, says much, and stays. What tells them apart:

- In a process that is stopped no thread runs, so the one that samples the training thread falls silent; in a stall it goes
  on. What holds the interpreter's lock silences it, too, but computes.
- Where the launcher is stopped along with its ranks, telemetry has no readings either. Where it goes on, it sees whether a
  rank computes.
- What happens again and again in the same kind of call, while the launcher goes on, is the job's own.

Where nothing was sampled, only a step that takes many times as long as any other can be one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import lasting
from ddpdoctor.measure.steplog import SUSPENDED, WARM_UP_STEPS, RankLog, Step
from ddpdoctor.measure.telemetry import HostTelemetry
from ddpdoctor.rundir import EventKind

_LEAST_NS = 2_000_000_000
"""The sampling thread looks every 0.4 s at the most: silent for so long it was stopped, or kept from running."""
_LEAST_STEPS = 3.0
"""Multiple of the rank's median step: what is shorter does not disturb its numbers."""
_MOSTLY = 0.5
"""Of what the step took beyond the median."""
_COMPUTES = 0.2
"""A process that had a CPU, or waited for one, for this share of the time was not stopped."""
_MOST_ALIKE = 2
_SILENT_READINGS = 3.0
"""Telemetry is silent where so many readings in a row are missing."""
_FAR = 20.0
"""Multiple of the longest other step, where nothing else tells."""
_FAR_NS = 10_000_000_000
_WAITS = (EventKind.DATA, EventKind.ITERATION, EventKind.SAVE, EventKind.LOAD)
"""Kinds of calls in which a job's own stall keeps all threads from running: native code that holds the interpreter's lock."""


@dataclass(frozen=True)
class _Stop:
    step: Step
    ns: int
    call: str
    """Kind of the call that holds it, "" for none of ``_WAITS``."""
    seen: bool
    """Whether something tells that the process was stopped, beyond the length of the step."""


def set_suspended_aside(logs: Sequence[RankLog], hosts: Mapping[str, HostTelemetry]) -> list[str]:
    """Mark the steps, in place, in which ranks were stopped; what was found, in sentences."""
    by_step: dict[int, list[tuple[int, _Stop]]] = defaultdict(list)
    for log in logs:
        for stop in _stops(log, hosts.get(log.host)):
            by_step[stop.step.number].append((log.rank, stop))
    notes = []
    for number, found in sorted(by_step.items()):
        for _, stop in found:
            stop.step.marks = (*stop.step.marks, SUSPENDED)
        notes.append(_told(number, found, len(logs)))
    return notes


def _told(number: int, found: Sequence[tuple[int, _Stop]], world: int) -> str:
    ranks = [rank for rank, _ in found]
    who = "The job was" if len(ranks) == world else f"Rank{'s' if len(ranks) > 1 else ''} {_listed(ranks)}"
    was = "" if len(ranks) == world else " were" if len(ranks) > 1 else " was"
    length = lasting(max(stop.ns for _, stop in found))
    if any(stop.seen for _, stop in found):
        return f"{who}{was} suspended for {length} in step {number}: it is set aside, with the one behind it."
    return (
        f"{who}{was} suspended, or stood still, for {length} in step {number}, many times as long as any other step takes, and "
        "nothing was sampled that would tell why: it is set aside, with the one behind it."
    )


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown


def _stops(log: RankLog, host: HostTelemetry | None) -> list[_Stop]:
    lengths = np.array([step.end - step.start for step in log.steps], np.int64)
    if len(lengths) < 2:
        return []
    usual = int(np.median(lengths))
    long = np.flatnonzero(lengths >= max(_LEAST_NS, _LEAST_STEPS * usual)).tolist()
    if not long:
        return []
    sampled = np.sort(np.array([at for at, _, _ in log.samples], np.int64))
    readings = _readings(host)
    found, alike = [], defaultdict(list)
    for place in long:
        step = log.steps[place]
        beyond = int(lengths[place]) - usual
        stop = _silence(log, step, sampled, beyond)
        quiet = _quiet(readings, step, beyond)
        if place < WARM_UP_STEPS and not quiet:
            # Libraries are loaded and kernels compiled in them, and they are set aside anyway.
            continue
        if stop is None:
            if quiet:
                found.append(_Stop(step, beyond, "", seen=True))
            elif not len(sampled) and not len(readings) and _far(lengths, place):
                found.append(_Stop(step, beyond, "", seen=False))
            continue
        if stop.ns < max(_LEAST_NS, _MOSTLY * beyond):
            continue
        runs = _runs(log, step, stop.ns, host)
        if quiet or (not stop.call and not runs):
            found.append(stop)
        elif runs is False:
            alike[stop.call].append(stop)
    found += [stop for stops in alike.values() if len(stops) <= _MOST_ALIKE for stop in stops]
    return found


def _far(lengths: NDArray[np.int64], place: int) -> bool:
    """Whether the step is far beyond all but at most one other."""
    others = np.sort(np.delete(lengths, place))
    longest = int(others[-_MOST_ALIKE]) if len(others) >= _MOST_ALIKE else int(others[-1])
    return bool(lengths[place] >= max(_FAR_NS, _FAR * longest))


def _silence(log: RankLog, step: Step, sampled: NDArray[np.int64], beyond: int) -> _Stop | None:
    """The longest time in the step without a sample; None where the sampling does not tell."""
    if not len(sampled) or sampled[0] > step.end:
        return None
    if sampled[-1] < step.start and log.steps[-1].end - step.end > _LEAST_NS:
        # The sampling had ended.
        return None
    low, high = bisect_left(sampled, step.start), bisect_left(sampled, step.end)
    moments = np.concatenate(([step.start], sampled[low:high], [step.end]))
    longest = int(np.diff(moments).argmax())
    start, end = int(moments[longest]), int(moments[longest + 1])
    margin = (end - start) // 10
    inside = [
        event.kind
        for event in step.events
        if event.kind in _WAITS and event.start_ns <= start + margin and event.end_ns >= end - margin
    ]
    return _Stop(step, min(end - start, beyond), inside[0] if inside else "", seen=True)


def _runs(log: RankLog, step: Step, ns: int, host: HostTelemetry | None) -> bool | None:
    """Whether the training thread had a CPU meanwhile or waited for one, or the rank's processes, as telemetry saw them, had
    one; None: not known."""
    if step.cpu_ns is not None:
        return step.cpu_ns + (step.run_delay_ns or 0) >= _COMPUTES * ns
    if host is None:
        return None
    times, percent = host.rank_column(log.rank, "cpu_percent")
    # The first reading in the step is of the time before as well.
    inside = (times >= step.start - step.moved_ns) & (times < step.end - step.moved_ns)
    known = percent[inside][1:]
    known = known[~np.isnan(known)]
    return float(known.mean()) >= 100 * _COMPUTES if len(known) else None


def _readings(host: HostTelemetry | None) -> NDArray[np.int64]:
    return np.empty(0, np.int64) if host is None else host.host_column("cpu_percent")[0]


def _quiet(readings: NDArray[np.int64], step: Step, beyond: int) -> bool:
    """Whether the launcher's telemetry of this host has a hole as long as what the step took beyond the usual."""
    if len(readings) < 3:
        return False
    start, end = step.start - step.moved_ns, step.end - step.moved_ns
    low, high = max(0, int(np.searchsorted(readings, start)) - 1), int(np.searchsorted(readings, end)) + 1
    holes = np.diff(readings[low:high])
    usual = float(np.median(np.diff(readings)))
    if not len(holes) or high > len(readings):
        return False
    return bool(holes.max() >= max(_LEAST_NS, _SILENT_READINGS * usual, _MOSTLY * beyond))
