"""Find steps in which ranks were suspended from outside: by a signal, a frozen container, or a scheduler.

Such a step does not represent the job, and a long one would dominate the mean. A long step that the job causes, such as a slow read from
storage, is measured. Evidence:

- In a suspended process no thread runs, so the thread that samples the training thread stops as well. In a stall it continues. A thread
that holds the GIL also stops it, but mostly uses a CPU.

- If the launcher is suspended with its ranks, telemetry has no readings either. Otherwise telemetry shows whether a rank uses a CPU.

- If it occurs repeatedly in the same kind of call, or in steps whose calls were not recorded, while the launcher continues, the job causes
it.

Without samples, only a step many times as long as any other counts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.numerics import Ints, format_duration
from ddpdoctor.measure.steplog import SUSPENDED, WARM_UP_STEPS, RankLog, Step
from ddpdoctor.measure.telemetry import HostTelemetry
from ddpdoctor.rundir import listed
from ddpdoctor.rundir.stepevents import EventKind

_WAITS = (EventKind.DATA, EventKind.ITERATION, EventKind.SAVE, EventKind.LOAD)
"""Kinds of calls in which the job can stop all of its threads: native code that holds the GIL."""

_MOST_NAMED = 8
"""Maximum number of ranks that a note lists."""


class Tuning(msgspec.Struct, frozen=True):
    """Thresholds of suspensions."""

    least_ns: int = 3_000_000_000
    """Minimum length. The sampling thread wakes up at least once a second. In a step that is not recorded in full, it takes a sample from
    the second time on: if there is none for this long, it could not run."""
    least_steps: float = 3.0
    """Minimum length of the step as a multiple of the rank's median step: shorter suspensions do not affect the results."""
    mostly: float = 0.5
    """Minimum length of the suspension as a share of the time by which the step exceeds the median."""
    computes: float = 0.2
    """A process that was running or runnable for this share of the time was not suspended."""
    most_of_call: int = 2
    """Maximum number of suspensions in the same kind of call; if there are more, the job causes them."""
    silent_readings: float = 3.0
    """Length of a gap in telemetry, as a multiple of the usual interval."""
    readings_before: int = 20
    """Intervals before the step whose median is the usual one. Intervals are random, and double now and then."""
    thinned: int = 3
    """If only samples of every n-th second were read, silence is reduced by this many times n seconds: samples of successive kept seconds
    are n seconds apart, and one or two kept seconds may lack samples by chance."""
    far: float = 20.0
    """Minimum multiple of the longest other step, if there is no other evidence."""
    far_ns: int = 10_000_000_000
    """Minimum length in this case: lazy loading of libraries, or a full disk, takes seconds."""


TUNING = Tuning()


class _Stop(msgspec.Struct, frozen=True):
    """A step in which a rank may have been suspended."""

    place: int
    """Index of the step in its log."""
    ns: int
    call: str
    """Kind of the call in which it occurs, "" for none of ``_WAITS``."""
    has_evidence: bool
    """Whether there is evidence of the suspension other than the step's length."""
    certain: bool = True
    """If False, the job may cause it: it counts only if it is rare."""


def exclude_suspended(
    logs: Sequence[RankLog], hosts: Mapping[str, HostTelemetry]
) -> tuple[list[RankLog], list[str]]:
    """The logs with the suspended steps marked, and notes that name them."""
    marked: list[RankLog] = []
    by_number: dict[int, list[tuple[int, _Stop]]] = defaultdict(list)
    for log in logs:
        stops = _stops(log, hosts.get(log.host))
        for stop in stops:
            by_number[log.steps[stop.place].number].append((log.rank, stop))
        steps = list(log.steps)
        for stop in stops:
            steps[stop.place] = steps[stop.place].with_mark(SUSPENDED)
        marked.append(replace(log, steps=tuple(steps)) if stops else log)
    return marked, [_note(number, stops, len(logs)) for number, stops in sorted(by_number.items())]


def _note(number: int, stops: Sequence[tuple[int, _Stop]], world: int) -> str:
    ranks = [rank for rank, _ in stops]
    who = (
        "The job was"
        if len(ranks) == world
        else f"Rank{'s' if len(ranks) > 1 else ''} {listed(ranks, _MOST_NAMED)}"
    )
    was = "" if len(ranks) == world else " were" if len(ranks) > 1 else " was"
    length = format_duration(max(stop.ns for _, stop in stops))
    if any(stop.has_evidence for _, stop in stops):
        return f"{who}{was} suspended for {length} in step {number}: this step and the next are excluded."
    return (
        f"{who}{was} suspended, or stuck, for {length} in step {number}, many times as long as any other step, and "
        "no sample shows why: this step and the next are excluded."
    )


def _stops(log: RankLog, host: HostTelemetry | None) -> list[_Stop]:
    """The suspensions of a rank. Stops that the job may cause (``certain`` is False) count if few occur in the same kind of call."""
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
    by_call: dict[str, list[_Stop]] = defaultdict(list)
    for stop in stops:
        if not stop.certain:
            by_call[stop.call].append(stop)
    rare = [stop for group in by_call.values() if len(group) <= TUNING.most_of_call for stop in group]
    return [stop for stop in stops if stop.certain] + rare


def _least_ns(beyond_ns: int) -> float:
    """Minimum length of a suspension in a step that is ``beyond_ns`` longer than the usual one."""
    return max(TUNING.least_ns, TUNING.mostly * beyond_ns)


class _Evidence(msgspec.Struct, frozen=True):
    """Evidence of whether a rank was suspended in a long step."""

    log: RankLog
    host: HostTelemetry | None
    lengths: Ints
    """[N] length of its steps, ns."""
    sampled: Ints
    """Times of its stack samples, in order."""
    readings: Ints
    """Times of its host's telemetry, by the wall clock."""

    def find_stop(self, place: int, usual_ns: int) -> _Stop | None:
        """The suspension in this step; None if there was none."""
        step, beyond_ns = self.log.steps[place], int(self.lengths[place]) - usual_ns
        quiet = self._telemetry_gap(step, beyond_ns)
        if place < WARM_UP_STEPS and not quiet:
            # Libraries are loaded and kernels compiled in warm-up steps, and these are excluded anyway.
            return None
        stop = self._longest_silence(place, beyond_ns)
        if stop is None and not quiet:
            # Without other evidence, the step must be much longer than all but at most one other.
            others = np.sort(np.delete(self.lengths, place))
            longest = int(others[-min(TUNING.most_of_call, len(others))])
            far = self.lengths[place] >= max(TUNING.far_ns, TUNING.far * longest)
            without_evidence = not len(self.sampled) and not len(self.readings) and far
            return _Stop(place, beyond_ns, "", has_evidence=False) if without_evidence else None
        stop = stop or _Stop(place, beyond_ns, "", has_evidence=True)
        if stop.ns < _least_ns(beyond_ns):
            return None
        runs = self._had_cpu(step, stop.ns)
        if quiet:
            return replace(stop, certain=not runs)
        if runs or (stop.call and runs is None):
            return None
        return replace(stop, certain=step.in_full and not stop.call)

    def _longest_silence(self, place: int, beyond_ns: int) -> _Stop | None:
        """The longest time in the step without a sample; None if sampling does not cover the step, or samples were thinned out and this
        explains the silence."""
        step, sampled = self.log.steps[place], self.sampled
        if not len(sampled) or sampled[0] > step.end_ns:
            return None
        if sampled[-1] < step.start_ns and self.log.steps[-1].end_ns - step.end_ns > TUNING.least_ns:
            # Sampling ended before the step.
            return None
        low, high = bisect_left(sampled, step.start_ns), bisect_left(sampled, step.end_ns)
        moments = np.concatenate(([step.start_ns], sampled[low:high], [step.end_ns]))
        longest = int(np.diff(moments).argmax())
        start, end = int(moments[longest]), int(moments[longest + 1])
        every_s = self.log.samples_every_s
        thinned_ns = TUNING.thinned * every_s * 1_000_000_000 if every_s > 1 else 0
        ns = min(end - start - thinned_ns, beyond_ns)
        if thinned_ns and ns < _least_ns(beyond_ns):
            return None
        margin = (end - start) // 10
        holding = [
            event.kind
            for event in step.events
            if event.kind in _WAITS
            and step.start_of(event) <= start + margin
            and step.end_of(event) >= end - margin
        ]
        return _Stop(place, ns, holding[0] if holding else "", has_evidence=True)

    def _had_cpu(self, step: Step, ns: int) -> bool | None:
        """Whether the training thread was running or runnable during the suspension, or else whether telemetry shows CPU use of the rank's
        processes; None if unknown."""
        if step.cpu_ns is not None:
            return step.cpu_ns + (step.run_delay_ns or 0) >= TUNING.computes * ns
        if self.host is None:
            return None
        times, percent = self.host.rank_column(self.log.rank, "cpu_percent")
        start, end = step.recorded_ns
        # The first reading in the step also covers the time before.
        known = percent[(times >= start) & (times < end)][1:]
        known = known[~np.isnan(known)]
        return float(known.mean()) >= 100 * TUNING.computes if len(known) else None

    def _telemetry_gap(self, step: Step, beyond_ns: int) -> bool:
        """Whether the launcher's telemetry of this host has a gap as long as the step's excess over the usual."""
        readings = self.readings
        if len(readings) < 3:
            return False
        start, end = step.recorded_ns
        low = max(0, int(np.searchsorted(readings, start)) - 1)
        high = int(np.searchsorted(readings, end)) + 1
        holes = np.diff(readings[low:high])
        if not len(holes) or high > len(readings):
            return False
        before = np.diff(readings[max(0, low - TUNING.readings_before) : low + 1])
        usual = float(np.median(before if len(before) else np.diff(readings)))
        return bool(holes.max() >= max(TUNING.silent_readings * usual, _least_ns(beyond_ns)))
