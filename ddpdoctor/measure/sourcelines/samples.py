"""Counting stack samples: at which of the user's lines the training thread was while it did some kind of work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from ddpdoctor.measure.steplog import RankLog, Sample, Step, samples_by_step
from ddpdoctor.measure.taxonomy import Component
from ddpdoctor.rundir import EventKind

from .callers import Path, distinct
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
_TORCH = ("/site-packages/torch/", "/dist-packages/torch/")
"""What the path of a file of torch's contains."""
_COUNTING_SIGMAS = 2.0
"""Counts scatter by their square root: a line stands out by twice that."""


@dataclass(frozen=True)
class SampleCounts:
    """Samples of some ranks in some steps; a sample that may be of an operator counts for less than one."""

    at: Mapping[Frame, float]
    """In the components' time, by line."""
    outside: Mapping[Frame, float]
    """Those of them whose innermost frame is not torch's."""
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
) -> SampleCounts:
    """Count the samples of the ``wanted`` steps. ``python_parts``: by rank and line, how much a sample counts for."""
    at: defaultdict[Frame, float] = defaultdict(float)
    outside: defaultdict[Frame, float] = defaultdict(float)
    paths: defaultdict[Frame, defaultdict[Path, float]] = defaultdict(lambda: defaultdict(float))
    samples, taken, seconds, step_count = 0, 0, 0.0, 0
    for log in logs:
        steps = [step for step in log.steps if step.number in wanted]
        step_count += len(steps)
        seconds += sum(step.length_ns for step in steps) / 1e9
        by_step = samples_by_step(log, steps)
        taken += sum(len(of_step) for _, of_step in by_step)
        parts = python_parts[log.rank] if Component.HOST in components else {}
        for user, innermost in _samples_in(by_step, components):
            where = log.sample_where.get(user)
            if where is None:
                continue
            frame, part = frame_of(where), parts.get(user, 1.0)
            at[frame] += part
            paths[frame][where.callers] += part
            samples += 1
            place = log.sample_where.get(innermost)
            if place is not None and not any(folder in place.file for folder in _TORCH):
                outside[frame] += part
    return SampleCounts(at, outside, paths, samples, taken, seconds, step_count)


def common_of(together: SampleCounts, each: Sequence[SampleCounts]) -> SampleCounts:
    """Counts of all ranks ``together``, of each rank no more at a line than the (lower) median rank has there, but for the
    counting error: what one rank does more is not common."""
    at: dict[Frame, float] = {}
    outside: dict[Frame, float] = {}
    for frame in dict.fromkeys(frame for counts in each for frame in counts.at):
        middle = sorted(counts.at.get(frame, 0.0) for counts in each)[(len(each) - 1) // 2]
        most = middle + _COUNTING_SIGMAS * sqrt(middle) + 1.0
        at[frame] = outside[frame] = 0.0
        for counts in each:
            own = counts.at.get(frame, 0.0)
            kept = min(1.0, most / own) if own else 0.0
            at[frame] += kept * own
            outside[frame] += kept * counts.outside.get(frame, 0.0)
    return replace(together, at=at, outside=outside)


def beyond(mine: SampleCounts, theirs: SampleCounts, fewest: int) -> dict[Frame, float]:
    """Samples at each line beyond those of other ranks in as much time, where they stand out of the counting error, and are
    ``fewest`` at least."""
    scale = scale_of(mine, theirs)
    net: dict[Frame, float] = {}
    for frame, count in mine.at.items():
        other = theirs.at.get(frame, 0.0)
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
) -> Iterator[tuple[int, int]]:
    """Ids of the user's line and of the innermost one, of the samples taken while the thread did this kind of work."""
    kinds = kinds_of(components)
    outside, forward = Component.HOST in components, Component.FORWARD in components
    for step, samples in by_step:
        events = [event for event in step.events if event.kind in _INSIDE_EVENTS]
        for moment_ns, user, innermost in samples:
            time_ns = moment_ns - step.start_ns
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
                yield user, innermost


def _in_forward(step: Step, time_ns: int) -> bool:
    """Whether a forward ran ``time_ns`` after the step's start."""
    return any(
        event.kind == EventKind.FORWARD and event.start_ns <= time_ns < event.end_ns for event in step.events
    )
