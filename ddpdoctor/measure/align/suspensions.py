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

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.numerics import Ints, lasting
from ddpdoctor.measure.steplog import SUSPENDED, WARM_UP_STEPS, RankLog, Step
from ddpdoctor.measure.telemetry import HostTelemetry
from ddpdoctor.rundir import EventKind, listed

_WAITS = (EventKind.DATA, EventKind.ITERATION, EventKind.SAVE, EventKind.LOAD)
"""Kinds of calls in which a job's own stall keeps all threads from running: native code that holds the interpreter's lock."""

_MOST_NAMED = 8
"""Ranks that a sentence names one by one, as elsewhere."""


class Tuning(msgspec.Struct, frozen=True):
    """What tells a stop from outside from a long step of the job's own."""

    least_ns: int = 2_000_000_000
    """The sampling thread looks every 0.4 s at the most: silent for so long it was stopped, or kept from running."""
    least_steps: float = 3.0
    """Multiple of the rank's median step: what is shorter does not disturb its numbers."""
    mostly: float = 0.5
    """Of what the step took beyond the median."""
    computes: float = 0.2
    """A process that had a CPU, or waited for one, for this share of the time was not stopped."""
    most_alike: int = 2
    """Stops in the same kind of call; what happens more often is the job's own."""
    silent_readings: float = 3.0
    """Telemetry is silent where so many readings in a row are missing."""
    far: float = 20.0
    """Multiple of the longest other step, where nothing else tells."""
    far_ns: int = 10_000_000_000
    """And so long at least: libraries that are loaded late, or a full disk, take seconds."""


TUNING = Tuning()


class _Stop(msgspec.Struct, frozen=True):
    """A step in which a rank may have been stopped."""

    place: int
    """Of the step in its log."""
    ns: int
    call: str
    """Kind of the call that holds it, "" for none of ``_WAITS``."""
    seen: bool
    """Whether something tells that the process was stopped, beyond the length of the step."""
    sure: bool = True
    """False: it may be the job's own, which does the same again and again."""


def exclude_suspended(
    logs: Sequence[RankLog], hosts: Mapping[str, HostTelemetry]
) -> tuple[list[RankLog], list[str]]:
    """The logs with a mark on the steps in which ranks were stopped; and, in sentences, which those are."""
    marked: list[RankLog] = []
    by_number: dict[int, list[tuple[int, _Stop]]] = defaultdict(list)
    for log in logs:
        stops = _stops(log, hosts.get(log.host))
        for stop in stops:
            by_number[log.steps[stop.place].number].append((log.rank, stop))
        marked.append(_marked(log, stops))
    return marked, [_note(number, stops, len(logs)) for number, stops in sorted(by_number.items())]


def _marked(log: RankLog, stops: Sequence[_Stop]) -> RankLog:
    if not stops:
        return log
    steps = list(log.steps)
    for stop in stops:
        steps[stop.place] = steps[stop.place].marked(SUSPENDED)
    return replace(log, steps=tuple(steps))


def _note(number: int, stops: Sequence[tuple[int, _Stop]], world: int) -> str:
    ranks = [rank for rank, _ in stops]
    who = (
        "The job was"
        if len(ranks) == world
        else f"Rank{'s' if len(ranks) > 1 else ''} {listed(ranks, _MOST_NAMED)}"
    )
    was = "" if len(ranks) == world else " were" if len(ranks) > 1 else " was"
    length = lasting(max(stop.ns for _, stop in stops))
    if any(stop.seen for _, stop in stops):
        return f"{who}{was} suspended for {length} in step {number}: this step and the next are excluded."
    return (
        f"{who}{was} suspended, or stuck, for {length} in step {number}, many times as long as any other step, and "
        "no sample shows why: this step and the next are excluded."
    )


def _stops(log: RankLog, host: HostTelemetry | None) -> list[_Stop]:
    """Where the rank was stopped. What silences it in the same kind of call, without computing, may be the job's own: that
    counts where it is seldom."""
    lengths = np.array([step.length_ns for step in log.steps], np.int64)
    if len(lengths) < 2:
        return []
    usual = int(np.median(lengths))
    long = np.flatnonzero(lengths >= max(TUNING.least_ns, TUNING.least_steps * usual)).tolist()
    if not long:
        return []
    readings = np.empty(0, np.int64) if host is None else host.host_column("cpu_percent")[0]
    evidence = _Evidence(log, host, lengths, np.sort(log.samples[:, 0]), readings)
    stops = [stop for place in long if (stop := evidence.find_stop(place, usual)) is not None]
    alike: dict[str, list[_Stop]] = defaultdict(list)
    for stop in stops:
        if not stop.sure:
            alike[stop.call].append(stop)
    seldom = [stop for group in alike.values() if len(group) <= TUNING.most_alike for stop in group]
    return [stop for stop in stops if stop.sure] + seldom


class _Evidence(msgspec.Struct, frozen=True):
    """What tells whether a rank was stopped in a long step."""

    log: RankLog
    host: HostTelemetry | None
    lengths: Ints
    """[N] of its steps, ns."""
    sampled: Ints
    """Times of its stack samples, in order."""
    readings: Ints
    """Times of its host's telemetry, by the wall clock."""

    def find_stop(self, place: int, usual_ns: int) -> _Stop | None:
        """The stop in this step; None where there was none."""
        step, beyond_ns = self.log.steps[place], int(self.lengths[place]) - usual_ns
        quiet = self._telemetry_gap(step, beyond_ns)
        if place < WARM_UP_STEPS and not quiet:
            # Libraries are loaded and kernels compiled in them, and they are set aside anyway.
            return None
        stop = self._longest_silence(place, beyond_ns)
        if stop is None:
            unseen = not len(self.sampled) and not len(self.readings) and self._far_longest(place)
            return _Stop(place, beyond_ns, "", seen=quiet) if quiet or unseen else None
        if stop.ns < max(TUNING.least_ns, TUNING.mostly * beyond_ns):
            return None
        runs = self._had_cpu(step, stop.ns)
        if quiet or (not stop.call and not runs):
            return stop
        return replace(stop, sure=False) if runs is False else None

    def _far_longest(self, place: int) -> bool:
        """Whether the step is far beyond all but at most one other."""
        others = np.sort(np.delete(self.lengths, place))
        longest = int(others[-min(TUNING.most_alike, len(others))])
        return bool(self.lengths[place] >= max(TUNING.far_ns, TUNING.far * longest))

    def _longest_silence(self, place: int, beyond_ns: int) -> _Stop | None:
        """The longest time in the step without a sample; None where the sampling does not tell."""
        step, sampled = self.log.steps[place], self.sampled
        if not len(sampled) or sampled[0] > step.end_ns:
            return None
        if sampled[-1] < step.start_ns and self.log.steps[-1].end_ns - step.end_ns > TUNING.least_ns:
            # The sampling had ended.
            return None
        low, high = bisect_left(sampled, step.start_ns), bisect_left(sampled, step.end_ns)
        moments = np.concatenate(([step.start_ns], sampled[low:high], [step.end_ns]))
        longest = int(np.diff(moments).argmax())
        start, end = int(moments[longest]), int(moments[longest + 1])
        margin = (end - start) // 10
        holding = [
            event.kind
            for event in step.events
            if event.kind in _WAITS
            and step.start_of(event) <= start + margin
            and step.end_of(event) >= end - margin
        ]
        return _Stop(place, min(end - start, beyond_ns), holding[0] if holding else "", seen=True)

    def _had_cpu(self, step: Step, ns: int) -> bool | None:
        """Whether the training thread had a CPU meanwhile or waited for one, or the rank's processes, as telemetry saw them,
        had one; None: not known."""
        if step.cpu_ns is not None:
            return step.cpu_ns + (step.run_delay_ns or 0) >= TUNING.computes * ns
        if self.host is None:
            return None
        times, percent = self.host.rank_column(self.log.rank, "cpu_percent")
        start, end = step.recorded_ns
        # The first reading in the step is of the time before as well.
        known = percent[(times >= start) & (times < end)][1:]
        known = known[~np.isnan(known)]
        return float(known.mean()) >= 100 * TUNING.computes if len(known) else None

    def _telemetry_gap(self, step: Step, beyond_ns: int) -> bool:
        """Whether the launcher's telemetry of this host has a hole as long as what the step took beyond the usual."""
        readings = self.readings
        if len(readings) < 3:
            return False
        start, end = step.recorded_ns
        low = max(0, int(np.searchsorted(readings, start)) - 1)
        high = int(np.searchsorted(readings, end)) + 1
        holes = np.diff(readings[low:high])
        usual = float(np.median(np.diff(readings)))
        if not len(holes) or high > len(readings):
            return False
        least = max(TUNING.least_ns, TUNING.silent_readings * usual, TUNING.mostly * beyond_ns)
        return bool(holes.max() >= least)
