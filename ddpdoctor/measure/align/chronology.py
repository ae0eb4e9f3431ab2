"""The time of a run, from monotonic durations: a clock that is set meanwhile changes no step.

A step of a log has an exact duration, taken from the monotonic clock, and a start by the wall clock, which may be set
in the middle of a run, and which goes on while a machine sleeps. Steps of a rank join: step n + 1 begins where step n
ends. So the steps are put one after the other again, and the wall clock says no more than where the ranks of a host stand
against each other; hosts are tied by their collectives (:mod:`.hosts`). Only where steps are missing in between the
wall clock bridges the gap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.numerics import Ints, lasting, running_median
from ddpdoctor.measure.steplog import RankLog, Step
from ddpdoctor.trace import RankTrace


class Tuning(msgspec.Struct, frozen=True):
    """What counts as a clock that was set, and is told."""

    neighbours: int = 33
    """Readings of the wall clock whose median counts: one that is interrupted by another process tells a wrong time."""
    same_ns: int = 1_000_000
    """Readings this near to each other are of a clock that nobody has set."""
    reading_ns: int = 100_000
    """What two readings of clocks that agree may lie apart: a trace is not copied for that."""
    told_ns: int = 100_000_000
    """A clock that is set by less needs no sentence: time servers do so now and then."""


TUNING = Tuning()


def put_in_order(logs: Sequence[RankLog]) -> tuple[list[RankLog], list[str]]:
    """The logs with their steps, and stack samples, on the monotonic time of their run; and what was set in between, in
    sentences. ``moved_ns`` of a step leads back to the wall clock."""
    hosts: dict[str, list[_Rank]] = defaultdict(list)
    for log in logs:
        if log.steps:
            hosts[log.host].append(_Rank.of(log))
    notes: list[str] = []
    ordered: dict[int, RankLog] = {}
    for host, ranks in hosts.items():
        leader = max(ranks, key=lambda rank: (-rank.block[-1], len(rank.block)))
        for rank in ranks:
            placed = rank if rank is leader else rank.following(leader)
            ordered[id(rank.log)] = placed.ordered_log()
        notes += [_told(host, step, ns) for step, ns in leader.settings()]
    return [ordered.get(id(log), log) for log in logs], notes


def moved_trace(trace: RankTrace, profiled: Sequence[Step]) -> RankTrace:
    """A rank's trace, whose times are of the wall clock, on the time of its steps that the profiler saw."""
    moved_ns = int(np.median([step.moved_ns for step in profiled])) if profiled else 0
    if abs(moved_ns) < TUNING.reading_ns:
        return trace
    return replace(trace, start_ns=trace.start_ns + moved_ns)


def blocks(steps: Sequence[Step]) -> Ints:
    """[N] which steps follow each other without one missing in between: they have the same number here."""
    numbers = np.array([step.number for step in steps], np.int64)
    return np.concatenate(([0], np.cumsum(np.diff(numbers) != 1))) if len(numbers) else numbers


def _told(host: str, step: int, ns: int) -> str:
    how = f"was set {'forward' if ns > 0 else 'back'} by {lasting(abs(ns))}"
    slept = ", or the machine slept," if ns > 0 else ""
    return f"The clock of host {host} {how}{slept} during step {step}. Step times come from the monotonic clock, which is not affected."


class _Rank(msgspec.Struct, frozen=True):
    """One rank's steps, [N] each, and their time as it is put together."""

    log: RankLog
    number: Ints
    recorded: Ints
    """Starts by the wall clock, ns."""
    time: Ints
    """Starts on the time of the run, ns."""
    block: Ints

    @classmethod
    def of(cls, log: RankLog) -> _Rank:
        """Each step where the one before ends, the first and those after a gap where the wall clock has them."""
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

    def following(self, leader: _Rank) -> _Rank:
        """The rank as it stands to the leader, one of the same host, by the wall clock: both read the same one in the same
        steps."""
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

    def settings(self) -> Iterator[tuple[int, int]]:
        """(step, ns): when the wall clock was set by how much."""
        ahead = running_median(self.ahead, TUNING.neighbours)
        for place in np.flatnonzero(np.abs(np.diff(ahead)) >= TUNING.told_ns):
            yield int(self.number[place]), int(ahead[place + 1] - ahead[place])

    def ordered_log(self) -> RankLog:
        """The rank's log on the time of the run."""
        return self.log.shifted(-self.ahead, _samples_moved(_periods(self), self.log.samples[:, 0]))


class _Period(msgspec.Struct, frozen=True):
    """From one setting of the wall clock to the next."""

    end: int
    """By that clock, ns."""
    ahead: int
    """ns by which it is ahead of the time of the run."""


def _periods(rank: _Rank) -> list[_Period]:
    """Of the rank's wall clock, in the order in which they went by."""
    ahead = running_median(rank.ahead, TUNING.neighbours)
    cuts = [0]
    for place in np.flatnonzero(np.diff(ahead)).tolist():
        if abs(int(ahead[place + 1]) - int(ahead[cuts[-1]])) > TUNING.same_ns:
            cuts.append(place + 1)
    lasts = [*(cut - 1 for cut in cuts[1:]), len(ahead) - 1]
    periods = []
    for first, last in zip(cuts, lasts, strict=True):
        end = int(rank.time[last]) + rank.log.steps[last].length_ns + int(ahead[first])
        periods.append(_Period(end, int(ahead[first])))
    return periods


def _samples_moved(periods: Sequence[_Period], times: Ints) -> Ints:
    """[S] what takes times, read from the wall clock one after the other, to the time of the run. A clock that is set back
    shows the same times twice: where they go back, the next period has begun."""
    if len(periods) == 1:
        return np.full(len(times), -periods[0].ahead)
    moved, place, before = [], 0, None
    for at in times.tolist():
        back = before is not None and at < before - TUNING.same_ns
        while place + 1 < len(periods) and (back or at > periods[place].end):
            place, back = place + 1, False
        moved.append(-periods[place].ahead)
        before = at
    return np.array(moved, np.int64)
