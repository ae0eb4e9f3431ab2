"""One clock for step logs: steps on monotonic time, and hosts aligned by the ends of their collectives.

A step has an exact duration, from the monotonic clock, and a start by the wall clock. The wall clock may be set during a run,
and continues while a machine sleeps. Step n + 1 begins when step n ends, so a rank's time is the sum of its durations. The wall clock
is used only to relate the ranks of a host, and to bridge steps that are missing. Hosts are aligned by the collectives that their ranks
leave together. Hosts that only issue work to devices do not leave them together. They are aligned likewise, because a graph of step logs
assumes common ends, but this is no measurement of their clocks. A rank's profiler window is put on the time of its steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.numerics import Ints, format_duration, running_median
from ddpdoctor.measure.steplog import OPENED, PROFILED, Key, RankLog, Step, SyncPoint
from ddpdoctor.measure.window import Window, read_window
from ddpdoctor.stages import WINDOWS_READ, Progress, Stage, no_progress, progress_counter
from ddpdoctor.trace import RankTrace

from .trace_clocks import ClockFit, fit_clock


class OrderTuning(msgspec.Struct, frozen=True):
    """Thresholds for clocks that were set."""

    neighbours: int = 33
    """Readings of the wall clock whose median is used: a single one is wrong if another process interrupted it."""
    same_ns: int = 1_000_000
    """If readings differ by less, the clock was not set."""
    reading_ns: int = 100_000
    """Largest difference between two readings of clocks that agree; a trace is not copied for less."""
    reported_ns: int = 100_000_000
    """Minimum jump of a clock that is reported: time servers occasionally set a clock by less."""


ORDER = OrderTuning()


def use_monotonic_time(logs: Sequence[RankLog]) -> tuple[list[RankLog], list[str]]:
    """The logs with their steps and stack samples on the monotonic time of their run, and notes on clocks that were set. ``moved_ns``
    of a step is its shift from the wall clock."""
    hosts: dict[str, list[_Rank]] = defaultdict(list)
    for log in logs:
        if log.steps:
            hosts[log.host].append(_Rank.of(log))
    notes: list[str] = []
    ordered: dict[int, RankLog] = {}
    for host, ranks in hosts.items():
        leader = max(ranks, key=lambda rank: (-rank.block[-1], len(rank.block)))
        for rank in ranks:
            placed = rank if rank is leader else rank.placed_by(leader)
            ordered[id(rank.log)] = placed.corrected_log()
        for step, ns in leader.clock_jumps():
            how = f"was set {'forward' if ns > 0 else 'back'} by {format_duration(abs(ns))}"
            slept = ", or the machine slept," if ns > 0 else ""
            notes.append(
                f"The clock of host {host} {how}{slept} during step {step}. "
                "Step times come from the monotonic clock, which is not affected."
            )
    return [ordered.get(id(log), log) for log in logs], notes


def blocks(steps: Sequence[Step]) -> Ints:
    """[N] number of the block of consecutive steps to which each step belongs."""
    numbers = np.array([step.number for step in steps], np.int64)
    return np.concatenate(([0], np.cumsum(np.diff(numbers) != 1))) if len(numbers) else numbers


class _Rank(msgspec.Struct, frozen=True):
    """One rank's steps, [N] each, and their reconstructed time."""

    log: RankLog
    number: Ints
    recorded: Ints
    """Starts by the wall clock, ns."""
    time: Ints
    """Starts on the time of the run, ns."""
    block: Ints

    @classmethod
    def of(cls, log: RankLog) -> _Rank:
        """Each step begins when the one before ends; the first step, and steps after a gap, begin at their wall-clock times."""
        recorded = np.array([step.start_ns for step in log.steps], np.int64)
        length = np.array([step.length_ns for step in log.steps], np.int64)
        block = blocks(log.steps)
        gap = np.maximum(np.diff(recorded), length[:-1])
        apart = np.where(np.diff(block) > 0, gap, length[:-1])
        time = recorded[0] + np.concatenate(([0], np.cumsum(apart)))
        return cls(log, np.array([step.number for step in log.steps], np.int64), recorded, time, block)

    @property
    def ahead(self) -> Ints:
        """[N] ns by which the wall clock is ahead of the time of the run."""
        return self.recorded - self.time

    def placed_by(self, leader: _Rank) -> _Rank:
        """The rank shifted to the time of ``leader``, a rank of the same host, by the wall clock, which both read in the same steps."""
        places = {number: place for place, number in enumerate(leader.number.tolist())}
        theirs, own = leader.ahead, self.ahead
        time = self.time.copy()
        shift_ns = 0
        edges = [0, *(np.flatnonzero(np.diff(self.block)) + 1).tolist(), len(self.block)]
        for first, stop in pairwise(edges):
            numbers = enumerate(self.number[first:stop].tolist(), first)
            common = [(row, places[number]) for row, number in numbers if number in places]
            if common:
                mine, other = np.array(common).T
                shift_ns = int(np.median(own[mine] - theirs[other]))
            time[first:stop] += shift_ns
        return replace(self, time=time)

    def clock_jumps(self) -> Iterator[tuple[int, int]]:
        """(step, ns) of each jump of the wall clock."""
        ahead = running_median(self.ahead, ORDER.neighbours)
        for place in np.flatnonzero(np.abs(np.diff(ahead)) >= ORDER.reported_ns):
            yield int(self.number[place]), int(ahead[place + 1] - ahead[place])

    def corrected_log(self) -> RankLog:
        """The rank's log on the time of the run."""
        return self.log.shifted(-self.ahead, _samples_moved(self, self.log.samples[:, 0]))


def _samples_moved(rank: _Rank, times: Ints) -> Ints:
    """[S] ns to add to each wall-clock time to get the time of the run, constant between two jumps of the wall clock.

    A clock that is set back shows the same times twice. The next period begins when times decrease.
    """
    ahead = running_median(rank.ahead, ORDER.neighbours)
    cuts = [0]
    for place in np.flatnonzero(np.diff(ahead)).tolist():
        if abs(int(ahead[place + 1]) - int(ahead[cuts[-1]])) > ORDER.same_ns:
            cuts.append(place + 1)
    aheads = ahead[cuts].tolist()
    lasts = [*(cut - 1 for cut in cuts[1:]), len(ahead) - 1]
    # Ends of the periods, by the wall clock.
    ends = [
        int(rank.time[last]) + rank.log.steps[last].length_ns + by_ns
        for last, by_ns in zip(lasts, aheads, strict=True)
    ]
    moved, period, before = np.full(len(times), -aheads[0]), 0, None
    for place, at in enumerate(times.tolist() if len(cuts) > 1 else ()):
        back = before is not None and at < before - ORDER.same_ns
        while period + 1 < len(cuts) and (back or at > ends[period]):
            period, back = period + 1, False
        moved[place], before = -aheads[period], at
    return moved


class HostsTuning(msgspec.Struct, frozen=True):
    """Thresholds for comparing the clocks of two hosts, and for clocks that were set in a gap of the recording."""

    fewest: int = 3
    """Minimum number of collectives in which both hosts took part: the median of fewer is not reliable."""
    around_gap: int = 32
    """Collectives on either side of a gap that are compared."""
    set_ns: int = 20_000_000
    """A clock was set in a gap if the difference between the clocks changes by this much more than drift."""
    most_drift: float = 5e-4
    """Largest rate at which time servers slew a clock."""
    run_ahead_steps: float = 3.0
    """If hosts only issue work to devices, only an offset of more than this many median steps is surely one of their clocks: hosts are a
    step or two ahead of their devices."""
    run_ahead_ns: int = 1_000_000_000
    """The same, ns: if steps are short, hosts are about a thousand kernels ahead."""


HOSTS = HostsTuning()


def align_logs(logs: Sequence[RankLog]) -> tuple[list[RankLog], list[str]]:
    """(logs on the first host's clock, notes on the offsets of the hosts' clocks). Hosts are aligned by the ends of collectives in which
    ranks of both took part, directly or via a third host."""
    hosts: dict[str, list[RankLog]] = defaultdict(list)
    for log in logs:
        hosts[log.host].append(log)
    if len(hosts) < 2:
        return list(logs), []
    leader, *others = hosts
    own = {host: _host_ends(of_host) for host, of_host in hosts.items()}
    on_clock = {leader: hosts[leader]}
    corrections: dict[str, _Correction] = {}
    unaligned, references = others, [own[leader]]
    while unaligned and references:
        found = {}
        for host in unaligned:
            tried = (_correction(reference, own[host]) for reference in references)
            if (correction := next(filter(None, tried), None)) is not None:
                found[host] = correction
                on_clock[host] = [correction.applied(log) for log in hosts[host]]
        corrections |= found
        unaligned = [host for host in unaligned if host not in found]
        references = [_host_ends(on_clock[host]) for host in found] if unaligned else []
    aligned = {
        id(log): moved
        for host, of_host in on_clock.items()
        for log, moved in zip(hosts[host], of_host, strict=True)
    }
    run_ahead_ns = _run_ahead_ns(logs)
    notes = [_host_note(leader, host, corrections.get(host), run_ahead_ns) for host in others]
    return [aligned.get(id(log), log) for log in logs], [note for note in notes if note is not None]


def _run_ahead_ns(logs: Sequence[RankLog]) -> float | None:
    """Largest offset between two hosts that may be due to how far they run ahead of their devices; None without devices."""
    lengths_ns = [step.length_ns for log in logs for step in log.steps if log.computes_on_device]
    return (
        max(HOSTS.run_ahead_ns, HOSTS.run_ahead_steps * float(np.median(lengths_ns))) if lengths_ns else None
    )


def _host_note(
    leader: str, host: str, correction: _Correction | None, run_ahead_ns: float | None
) -> str | None:
    if correction is None:
        return (
            f"Hosts {leader} and {host} have no collectives in common: their clocks could not be compared, "
            "and were not aligned."
        )
    fit = correction.fit
    if run_ahead_ns is not None:
        if abs(fit.offset_ns) <= run_ahead_ns:
            return None
        return (
            f"Clock of host {host}: about {fit.offset_ns / 1e9:+.1f} s against {leader}, which was corrected."
        )
    if not correction.exceeds_error:
        return f"Clock of host {host}: no offset against {leader} beyond the error of {fit.error_ns / 1e6:.3f} ms."
    return (
        f"Clock of host {host}: {fit.offset_ns / 1e6:+.3f} ms against {leader}, drift {fit.drift * 1e6:+.1f} ppm, corrected by "
        f"{fit.pairs} collectives to within about {max(fit.error_ns, 1e3) / 1e6:.3f} ms."
    )


_HostEnds = Mapping[Key, tuple[SyncPoint, int]]
"""Collectives that all ranks leave together → (the part of the host's first rank in it, the block of consecutive steps to which it belongs
on that rank)."""


def _host_ends(logs: Sequence[RankLog]) -> _HostEnds:
    ends: dict[Key, tuple[SyncPoint, int]] = {}
    for log in logs:
        numbers = [step.number for step in log.steps]
        of_step = dict(zip(numbers, blocks(log.steps).tolist(), strict=True))
        for point in log.sync_points:
            if point.root is None:
                ends.setdefault(point.key, (point, of_step[point.step]))
    return ends


class _Correction(msgspec.Struct, frozen=True):
    """The correction from a host's clock to the leader's clock."""

    clock_jumps: Sequence[tuple[int, int]]
    """(first step after a gap in which the clock was set, ns); corrected before ``fit`` is applied."""
    fit: ClockFit

    @property
    def exceeds_error(self) -> bool:
        """Whether the offset is larger than its error."""
        return abs(self.fit.offset_ns) > self.fit.error_ns

    def applied(self, log: RankLog) -> RankLog:
        """A log of this host on the leader's clock."""
        numbers = np.array([step.number for step in log.steps], np.int64)
        starts = np.array([step.start_ns for step in log.steps], np.int64)
        sampled = log.samples[:, 0].copy()
        for step, by_ns in self.clock_jumps:
            behind = numbers >= step
            if behind.any():
                begin = starts[behind.argmax()]
                sampled -= np.where(sampled >= begin, by_ns, 0)
                starts -= np.where(behind, by_ns, 0)
        if self.exceeds_error:
            starts += self.fit.correction(starts)
            sampled += self.fit.correction(sampled)
        recorded = np.array([step.start_ns for step in log.steps], np.int64)
        return log.shifted(starts - recorded, sampled - log.samples[:, 0])


def _correction(reference: _HostEnds, other: _HostEnds) -> _Correction | None:
    """The correction by the collectives of two hosts; None if they have too few in common."""
    keys = sorted(reference.keys() & other.keys(), key=lambda key: reference[key][0].end_ns)
    if len(keys) < HOSTS.fewest:
        return None
    reference_ends, theirs = (
        np.array([of[key][0].end_ns for key in keys], np.int64) for of in (reference, other)
    )
    # Clock jumps across gaps, which only the wall clock bridges.
    blocks_of = (np.array([of[key][1] for key in keys], np.int64) for of in (reference, other))
    edges = np.any([np.diff(block) != 0 for block in blocks_of], axis=0)
    clock_jumps = []
    ahead = theirs - reference_ends
    for row in (np.flatnonzero(edges) + 1).tolist():
        if by_ns := _jump_at(reference_ends, ahead, row):
            theirs[row:] -= by_ns
            clock_jumps.append((other[keys[row]][0].step, by_ns))
    return _Correction(clock_jumps, fit_clock(reference_ends, theirs))


def _jump_at(reference_ends: Ints, ahead: Ints, row: int) -> int:
    """ns by which a clock was set before this row; 0 if drift explains the difference."""
    before = slice(max(0, row - HOSTS.around_gap), row)
    behind = slice(row, row + HOSTS.around_gap)
    by_ns = int(np.median(ahead[behind]) - np.median(ahead[before]))
    apart_ns = abs(float(np.median(reference_ends[behind]) - np.median(reference_ends[before])))
    return by_ns if abs(by_ns) > HOSTS.set_ns + HOSTS.most_drift * apart_ns else 0


def windows_of(
    traces: Sequence[RankTrace], own: Sequence[RankLog], progress: Progress = no_progress
) -> list[Window]:
    """The profiler window of each trace. Its steps come from the ranks' step logs, which are more reliable than step markers in
    traces. If any rank has no log, all use the markers: collectives of windows with different starts cannot be matched well."""
    logs: dict[int | None, RankLog] = {log.rank: log for log in own if log.steps}
    traces = [trace for trace in traces if _is_of_training(trace, logs.get(trace.meta.rank))]
    by_logs = all(trace.meta.rank in logs for trace in traces)
    report_progress = progress_counter(progress, Stage.ALIGN, end=WINDOWS_READ)
    windows: list[Window] = []
    for done, trace in enumerate(traces):
        report_progress(done, len(traces))
        windows.append(_window(trace, logs.get(trace.meta.rank), by_logs))
    return windows


def _window(trace: RankTrace, log: RankLog | None, by_log: bool) -> Window:
    if log is None or not by_log:
        return read_window(trace, host=log.host if log is not None else "")
    profiled = steps_of_profiler_window(trace, log.steps)
    bounds = [(step.number, step.start_ns, step.end_ns) for step in profiled]
    return read_window(_move_trace(trace, profiled), bounds or None, log.host)


def _move_trace(trace: RankTrace, profiled: Sequence[Step]) -> RankTrace:
    """A rank's trace, recorded by the wall clock, moved to the time of its ``profiled`` steps."""
    moved_ns = int(np.median([step.moved_ns for step in profiled])) if profiled else 0
    if abs(moved_ns) < ORDER.reading_ns:
        return trace
    return replace(trace, start_ns=trace.start_ns + moved_ns)


def steps_of_profiler_window(trace: RankTrace, steps: Sequence[Step]) -> list[Step]:
    """The steps of the profiler window closest to the trace's events; [] for an empty trace."""
    if not trace.size:
        return []
    windows: list[list[Step]] = []
    for step in steps:
        if PROFILED in step.marks:
            if OPENED in step.marks or not windows:
                windows.append([])
            windows[-1].append(step)
    if len(windows) <= 1:
        return windows[0] if windows else []
    median_ns = int(np.median(trace.start_ns))

    def distance_ns(window: Sequence[Step]) -> int:
        # Wall-clock times, as in the trace.
        return max(window[0].recorded_ns[0] - median_ns, median_ns - window[-1].recorded_ns[1], 0)

    return min(windows, key=distance_ns)


def _is_of_training(trace: RankTrace, log: RankLog | None) -> bool:
    """Whether a trace may be of the steps of its rank's ``log``. This is always true if there is only one training."""
    if log is None or not trace.size or not (log.follows_training or log.later_trainings_end_ns):
        return True
    return log.steps[0].recorded_ns[0] <= int(np.median(trace.start_ns)) <= log.steps[-1].recorded_ns[1]
