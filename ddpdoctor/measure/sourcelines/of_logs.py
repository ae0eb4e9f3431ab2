"""The user's source lines behind the measurements of a step log: from the calls that were recorded, and from
stack samples."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.facts import Where
from ddpdoctor.measure.steplog import RankLog, Sample, Step, samples_by_step
from ddpdoctor.rundir import EventKind

from .ranking import Frame, ranked

_EVENTS = {
    "data": (EventKind.DATA,),
    "epoch_start": (EventKind.ITERATION, EventKind.DATA),
    "backward": (EventKind.BACKWARD,),
    "optimizer": (EventKind.OPTIMIZER,),
    "collection": (EventKind.COLLECTION,),
    "checkpoint": (EventKind.SAVE,),
}
"""Component → kinds of events whose call line is its line where no sample says more."""
_MOST = 3
_FEWEST_SAMPLES = 3
_AFTER_GC_NS = 2_000_000
"""The thread that takes samples cannot run during a collection. It does as soon as that is over, and still finds the
line that collected."""
_ENOUGH_SAMPLES = 8
"""Samples of a line from which its time is stated: the counting error is then a third of it."""
_TORCH = ("/site-packages/torch/", "/dist-packages/torch/")
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


class LogLines:
    """Implements ``costs.Lines`` for step logs.

    ``python_parts``, by position and line, says which part of the samples of host work is Python and not an operator,
    see :func:`ddpdoctor.measure.graph.python_parts`.
    """

    def __init__(
        self, logs: Sequence[RankLog], python_parts: Sequence[Mapping[int, float]] | None = None
    ) -> None:
        self.logs = logs
        self._parts = {log.rank: of for log, of in zip(logs, python_parts or [{}] * len(logs), strict=True)}

    def syncs(self, kinds: Sequence[str]) -> list[Where]:
        """Lines that call synchronisations of these kinds."""
        found: Counter[Frame] = Counter()
        for log in self.logs:
            for point in log.sync_points:
                where = log.where.get(point.where)
                if point.kind in kinds and where is not None:
                    found[where.file, where.line, where.function] += 1
        return ranked(found)

    def operation(self, components: Sequence[str], positions: Sequence[int] | None) -> str | None:
        """A step log knows no kernels."""
        return None

    def work(
        self, components: Sequence[str], positions: Sequence[int] | None, steps: NDArray[np.int64]
    ) -> list[Where]:
        """Lines of this kind of work: sampled ones where there are enough samples, else the recorded
        call's."""
        wanted = {int(s) for s in steps}
        chosen = [self.logs[p] for p in positions] if positions is not None else list(self.logs)
        sampled = self._sampled(chosen, components, wanted, against=self._others(positions))
        called = self._called(chosen, components, wanted)
        if not sampled:
            return called[:_MOST]
        known = {(where.file, where.line) for where in sampled}
        return (sampled + [where for where in called if (where.file, where.line) not in known])[:_MOST]

    def _others(self, positions: Sequence[int] | None) -> list[RankLog]:
        return [] if positions is None else [log for p, log in enumerate(self.logs) if p not in positions]

    def _called(self, logs: Sequence[RankLog], components: Sequence[str], wanted: set[int]) -> list[Where]:
        kinds = {kind for name in components for kind in _EVENTS.get(name, ())}
        found: Counter[Frame] = Counter()
        for log in logs:
            for step in log.steps:
                if step.number not in wanted:
                    continue
                for event in step.events:
                    where = log.where.get(event.where)
                    if event.kind in kinds and where is not None:
                        found[where.file, where.line, where.function] += max(event.duration_ns, 1)
        return ranked(found)

    def _sampled(
        self, logs: Sequence[RankLog], components: Sequence[str], wanted: set[int], against: Sequence[RankLog]
    ) -> list[Where]:
        """Most sampled lines, in samples per second of steps, less what the other ranks show at the same
        line."""
        mine = self._counts(logs, components, wanted)
        if "host" in components and not against:
            mine.at, mine.outside = self._common(logs, components, wanted)
        if mine.samples < _FEWEST_SAMPLES:
            return []
        theirs = self._counts(against, components, wanted)
        scale = mine.seconds / theirs.seconds if theirs.seconds else 0.0
        net: dict[Frame, float] = {}
        for key, count in mine.at.items():
            other = theirs.at.get(key, 0.0)
            # Counts scatter by their square root: a line stands out by twice that, and by a few samples at least.
            if count - scale * other >= max(_FEWEST_SAMPLES, 2.0 * sqrt(count + scale**2 * other)):
                net[key] = count - scale * other
        return [
            msgspec.structs.replace(where, python_ms=_python_ms(mine, theirs, scale, where))
            for where in ranked(net)
        ]

    def _common(
        self, logs: Sequence[RankLog], components: Sequence[str], wanted: set[int]
    ) -> tuple[defaultdict[Frame, float], defaultdict[Frame, float]]:
        """``at`` and ``outside`` of all ranks, of each no more at a line than the (lower) median rank has there, but for
        the counting error: what one rank does more is not common."""
        each = [self._counts([log], components, wanted) for log in logs]
        at: defaultdict[Frame, float] = defaultdict(float)
        outside: defaultdict[Frame, float] = defaultdict(float)
        for key in dict.fromkeys(key for counts in each for key in counts.at):
            middle = sorted(counts.at[key] for counts in each)[(len(each) - 1) // 2]
            most = middle + 2.0 * sqrt(middle) + 1.0
            for counts in each:
                kept = min(1.0, most / counts.at[key]) if counts.at[key] else 0.0
                at[key] += kept * counts.at[key]
                outside[key] += kept * counts.outside[key]
        return at, outside

    def _counts(self, logs: Sequence[RankLog], components: Sequence[str], wanted: set[int]) -> _Counts:
        counts = _Counts(defaultdict(float), defaultdict(float))
        for log in logs:
            steps = [step for step in log.steps if step.number in wanted]
            counts.steps += len(steps)
            counts.seconds += sum(step.length_ns for step in steps) / 1e9
            by_step = samples_by_step(log, steps)
            counts.taken += sum(len(samples) for _, samples in by_step)
            parts = self._parts[log.rank] if "host" in components else {}
            for user, innermost in _samples_in(by_step, components):
                where = log.sample_where.get(user)
                if where is None:
                    continue
                key, part = (where.file, where.line, where.function), parts.get(user, 1.0)
                counts.at[key] += part
                counts.samples += 1
                place = log.sample_where.get(innermost)
                if place is not None and not any(folder in place.file for folder in _TORCH):
                    counts.outside[key] += part
        return counts


@dataclass
class _Counts:
    """Samples of some ranks in some steps; a sample that may be of an operator counts for less than one."""

    at: defaultdict[Frame, float]
    """In the components' time, by line."""
    outside: defaultdict[Frame, float]
    """Those of them whose innermost frame is not torch's."""
    samples: int = 0
    """In the components' time, on all lines."""
    taken: int = 0
    """Whatever the thread did."""
    seconds: float = 0.0
    steps: int = 0
    """Steps times ranks looked at."""


def _python_ms(mine: _Counts, theirs: _Counts, scale: float, where: Where) -> float | None:
    """Milliseconds per step at a line outside torch, beyond those of the other ranks; None with too few samples."""
    key = where.file, where.line, where.function
    count = mine.outside.get(key, 0.0) - scale * theirs.outside.get(key, 0.0)
    if count < _ENOUGH_SAMPLES or not mine.steps:
        return None
    return 1e3 * mine.seconds / mine.steps * count / mine.taken


def _samples_in(
    by_step: Sequence[tuple[Step, list[Sample]]], components: Sequence[str]
) -> Iterator[tuple[int, int]]:
    """Ids of the user's line and of the innermost one, of the samples taken while the thread did this kind of work."""
    kinds = {kind for name in components for kind in _EVENTS.get(name, ())}
    outside = "host" in components
    forward = "forward" in components
    for step, samples in by_step:
        events = [e for e in step.events if e.kind in _INSIDE_EVENTS]
        for moment_ns, user, innermost in samples:
            t = moment_ns - step.start_ns
            inside = [
                e.kind
                for e in events
                if e.start_ns <= t < e.end_ns + (_AFTER_GC_NS if e.kind == EventKind.COLLECTION else 0)
            ]
            if inside:
                matches = any(kind in kinds for kind in inside)
            else:
                matches = forward if _in_forward(step, t) else outside
            if matches:
                yield user, innermost


def _in_forward(step: Step, t: int) -> bool:
    """Whether a forward ran ``t`` ns after the step's start."""
    return any(
        event.kind == EventKind.FORWARD and event.start_ns <= t < event.end_ns for event in step.events
    )
