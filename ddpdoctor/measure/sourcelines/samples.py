"""Counting stack samples: at which of the user's lines the training thread was while it did some kind of work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt

import numpy as np

from ddpdoctor.measure.phases import Gap
from ddpdoctor.measure.steplog import RankLog, Sample, Step, samples_by_step
from ddpdoctor.measure.taxonomy import IN_GAPS, Component
from ddpdoctor.rundir import EventKind

from .callers import Path, distinct
from .fewsamples import most_likely
from .holding import TORCH, Held, Holders, Shown, moment_of
from .ranking import Frame, frame_of

EVENTS: dict[Component, tuple[EventKind, ...]] = {
    Component.DATA: (EventKind.DATA,),
    Component.EPOCH_START: (EventKind.ITERATION, EventKind.DATA),
    Component.BACKWARD: (EventKind.BACKWARD,),
    Component.OPTIMIZER: (EventKind.OPTIMIZER,),
    Component.COLLECTION: (EventKind.COLLECTION,),
    Component.CHECKPOINT: (EventKind.SAVE,),
}
"""Component → kinds of events whose call line is its line where no sample says more."""
_INSIDE_EVENTS = (
    EventKind.DATA,
    EventKind.ITERATION,
    EventKind.BACKWARD,
    EventKind.OPTIMIZER,
    EventKind.COLLECTION,
    EventKind.SAVE,
    EventKind.COLLECTIVE,
    EventKind.BARRIER,
    EventKind.WAIT,
    EventKind.LOAD,
)
"""Events that are no work of the rank's own Python code; a forward pass is told apart by itself."""
_AFTER_COLLECTION_NS = 2_000_000
"""The thread that takes samples cannot run during a collection. It does as soon as that is over, and still finds the
line that collected."""
_COUNTING_SIGMAS = 2.0
"""Counts scatter by their square root: a line stands out by twice that."""


@dataclass(frozen=True)
class SampleCounts:
    """Samples of some ranks in some steps; a sample that may be of an operator counts for less than one."""

    at: Mapping[Frame, float]
    """In the components' time, by line."""
    outside: Mapping[Frame, float]
    """Those of them whose innermost frame is not torch's."""
    behind: Mapping[Frame, float]
    """Those of which only the line is known that follows, see :mod:`.holding`."""
    paths: Mapping[Frame, Mapping[Path, float]]
    """Those at each line, by the lines that called it."""
    samples: int
    """In the components' time, on all lines."""
    taken: int
    """Whatever the thread did."""
    seconds: float
    steps: int
    """Steps times ranks looked at."""


def kinds_of(components: Iterable[Component]) -> set[EventKind]:
    """Kinds of events that are these kinds of work."""
    return {kind for component in components for kind in EVENTS.get(component, ())}


def counted(
    logs: Sequence[RankLog],
    components: Sequence[Component],
    wanted: set[int],
    python_parts: Mapping[int, Mapping[int, float]],
    holders: Holders,
    gap: Gap | None = None,
) -> SampleCounts:
    """Count the samples of the ``wanted`` steps, those of one ``gap`` between phases where it is given. ``python_parts``: by
    rank and line, how much a sample counts for where Python work is meant, and no operators; ``holders``: those of all ranks."""
    tally = _Tally()
    samples, taken, seconds, step_count = 0, 0, 0.0, 0
    only_python = Component.HOST in components and set(components).isdisjoint(IN_GAPS)
    for log in logs:
        steps = [step for step in log.steps if step.number in wanted]
        step_count += len(steps)
        seconds += sum(step.length_ns for step in steps) / 1e9
        by_step = samples_by_step(log.samples, steps)
        taken_here = sum(len(of_step) for _, of_step in by_step)
        taken += taken_here
        held, shown = Held(holders), holders.shown[log.rank]
        for sample in _samples_in(_in_gap(log, by_step, gap), components):
            place = shown.get((sample[1], sample[2]))
            if place is not None:
                samples += 1
                held.sample(place, sample)
        if log.looked_ns:
            looked_ns = log.looked_ns * _part(steps, log.steps)
            looks = _samples_in(_in_gap(log, samples_by_step(log.closer, steps), gap), components)
            known = ((shown[look[1], look[2]], look) for look in looks if (look[1], look[2]) in shown)
            held.close_looks(known, taken_here / looked_ns)
        of_rank = python_parts[log.rank] if only_python else {}
        _tell(held, tally, {shown[key]: of_rank[key[0]] for key in shown if key[0] in of_rank})
    return SampleCounts(
        tally.at, tally.outside, tally.behind, tally.paths, samples, taken, seconds, step_count
    )


@dataclass(frozen=True)
class _Tally:
    """Samples by line, while they are counted."""

    at: defaultdict[Frame, float] = field(default_factory=lambda: defaultdict(float))
    outside: defaultdict[Frame, float] = field(default_factory=lambda: defaultdict(float))
    behind: defaultdict[Frame, float] = field(default_factory=lambda: defaultdict(float))
    paths: defaultdict[Frame, defaultdict[Path, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )


def _tell(held: Held, tally: _Tally, parts: Mapping[Shown, float]) -> None:
    """Put one rank's samples where they belong."""
    for counts, lines in zip(held.settled(), (tally.at, tally.behind), strict=True):
        for place, count in counts.items():
            frame, weight = frame_of(place.stack[-1]), count * parts.get(place, 1.0)
            lines[frame] += weight
            tally.paths[frame][place.stack[-2::-1]] += weight
            if lines is tally.at and place.innermost not in (None, TORCH):
                tally.outside[frame] += weight


def _part(steps: Sequence[Step], of: Sequence[Step]) -> float:
    """Which part of the steps' time these take; above zero."""
    whole_ns = sum(step.length_ns for step in of)
    return max(sum(step.length_ns for step in steps), 1) / max(whole_ns, 1)


def common_of(together: SampleCounts, each: Sequence[SampleCounts]) -> SampleCounts:
    """Counts of all ranks ``together``, of each rank no more at a line than the (lower) median rank has there, but for the
    counting error: what one rank does more is not common."""
    at: dict[Frame, float] = {}
    outside: dict[Frame, float] = {}
    for frame, kept in _kept(each).items():
        at[frame] = sum(part * counts.at.get(frame, 0.0) for part, counts in zip(kept, each, strict=True))
        outside[frame] = sum(
            part * counts.outside.get(frame, 0.0) for part, counts in zip(kept, each, strict=True)
        )
    return replace(together, at=at, outside=outside)


def same_lines(each: Sequence[SampleCounts]) -> float:
    """Part of what the ranks have alike that lies at lines which all have: of each rank no more counts than the (lower) median
    rank has."""
    wholes = [sum(counts.at.values()) for counts in each]
    middle = sorted(wholes)[(len(each) - 1) // 2]
    kept = _kept(each)
    same = [
        sum(parts[rank] * counts.at.get(frame, 0.0) for frame, parts in kept.items())
        for rank, counts in enumerate(each)
    ]
    alike = [min(whole, middle) for whole in wholes]
    return min(1.0, sum(map(min, same, alike)) / max(sum(alike), 1e-9))


def _kept(each: Sequence[SampleCounts]) -> dict[Frame, list[float]]:
    """Part of each rank's samples at a line that is common to the ranks."""
    kept: dict[Frame, list[float]] = {}
    for frame in dict.fromkeys(frame for counts in each for frame in counts.at):
        own = [counts.at.get(frame, 0.0) for counts in each]
        middle = sorted(own)[(len(each) - 1) // 2]
        most = middle + _COUNTING_SIGMAS * sqrt(middle) + 1.0
        kept[frame] = [min(1.0, most / count) if count else 0.0 for count in own]
    return kept


def beyond(mine: SampleCounts, theirs: SampleCounts, fewest: int) -> dict[Frame, float]:
    """Samples at each line beyond those of other ranks in as much time, where they stand out of the counting error, and are
    ``fewest`` at least; where there is none, at the line that is most likely what these ranks do more; else at the lines that
    follow."""
    scale = scale_of(mine, theirs)
    return (
        _net(mine.at, theirs.at, scale, fewest)
        or most_likely(mine.at, theirs.at, scale)
        or _net(mine.behind, theirs.behind, scale, fewest)
    )


def _net(
    mine: Mapping[Frame, float], theirs: Mapping[Frame, float], scale: float, fewest: int
) -> dict[Frame, float]:
    net: dict[Frame, float] = {}
    for frame, count in mine.items():
        other = theirs.get(frame, 0.0)
        if count - scale * other >= max(fewest, _COUNTING_SIGMAS * sqrt(count + scale**2 * other)):
            net[frame] = count - scale * other
    return net


def callers_of(frame: Frame, mine: SampleCounts, theirs: SampleCounts) -> Path:
    """The way to a line that has most samples beyond those of other ranks, so far as it tells it from other ways."""
    scale = scale_of(mine, theirs)
    other = theirs.paths.get(frame, {})
    net = {path: count - scale * other.get(path, 0.0) for path, count in mine.paths.get(frame, {}).items()}
    return distinct(max(net, key=lambda path: net[path]), [*net, *other]) if net else ()


def scale_of(mine: SampleCounts, theirs: SampleCounts) -> float:
    """By which other ranks' samples are multiplied to be those of as much time; 0 without any."""
    return mine.seconds / theirs.seconds if theirs.seconds else 0.0


def _samples_in(
    by_step: Sequence[tuple[Step, list[Sample]]], components: Sequence[Component]
) -> Iterator[Sample]:
    """The samples taken while the thread did this kind of work."""
    kinds = kinds_of(components)
    outside = Component.HOST in components
    forward = Component.FORWARD in components
    for step, samples in by_step:
        events = [event for event in step.events if event.kind in _INSIDE_EVENTS]
        for sample in samples:
            time_ns = moment_of(sample) - step.start_ns
            inside = [
                event.kind
                for event in events
                if event.start_ns
                <= time_ns
                < event.end_ns + (_AFTER_COLLECTION_NS if event.kind == EventKind.COLLECTION else 0)
            ]
            if inside:
                matches = any(kind in kinds for kind in inside)
            else:
                matches = forward if _in_forward(step, time_ns) else outside
            if matches:
                yield sample


def _in_gap(
    log: RankLog, by_step: Sequence[tuple[Step, list[Sample]]], gap: Gap | None
) -> Sequence[tuple[Step, list[Sample]]]:
    """The samples that were taken in gaps of this kind; all, where none is given."""
    if gap is None:
        return by_step
    gaps, origin_ns = log.activities.gaps, log.activities.origin_ns
    if gap not in gaps.kinds:
        return []
    wanted = gaps.kinds.index(gap)
    kept = []
    for step, samples in by_step:
        kinds = gaps.kind_at(np.array([moment_of(sample) - origin_ns for sample in samples]))
        kept.append((step, [sample for sample, kind in zip(samples, kinds, strict=True) if kind == wanted]))
    return kept


def _in_forward(step: Step, time_ns: int) -> bool:
    """Whether a forward ran ``time_ns`` after the step's start."""
    return any(
        event.kind == EventKind.FORWARD and event.start_ns <= time_ns < event.end_ns for event in step.events
    )
