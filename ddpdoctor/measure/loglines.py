"""The user's source lines behind the measurements of a step log: from the calls that were recorded, and from
stack samples."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from .facts import Where
from .points import Point, rank_points
from .steplog import RankLog, Step

_EVENTS = {
    "data": ("data",),
    "epoch_start": ("iter", "data"),
    "backward": ("bwd",),
    "optimizer": ("opt",),
    "collection": ("gc",),
    "checkpoint": ("save",),
}
"""Component → kinds of events whose call line is its line where no sample says more."""
_MOST = 3
_FEWEST_SAMPLES = 3
_AFTER_GC_NS = 2_000_000
"""The thread that takes samples cannot run during a collection. It does as soon as that is over, and still finds the
line that collected."""
_INSIDE_EVENTS = ("data", "iter", "bwd", "opt", "gc", "save", "coll", "bar", "wait", "load")


class LogLines:
    """Implements ``costs.Lines`` for step logs."""

    def __init__(self, logs: Sequence[RankLog]) -> None:
        self.logs = logs
        self._points: list[list[Point]] = [rank_points(log) for log in logs]

    def syncs(self, kinds: Sequence[str]) -> list[Where]:
        """Lines that call synchronisations of these kinds."""
        found: Counter[tuple[str, int, str]] = Counter()
        for log, points in zip(self.logs, self._points, strict=True):
            for point in points:
                where = log.where.get(point.where)
                if point.kind in kinds and where is not None:
                    found[where.file, where.line, where.function] += 1
        return _ranked(found)

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
        found: Counter[tuple[str, int, str]] = Counter()
        for log in logs:
            for step in log.steps:
                if step.number not in wanted:
                    continue
                for event in step.events:
                    where = log.where.get(event.w)
                    if event.k in kinds and where is not None:
                        found[where.file, where.line, where.function] += max(event.d, 1)
        return _ranked(found)

    def _sampled(
        self, logs: Sequence[RankLog], components: Sequence[str], wanted: set[int], against: Sequence[RankLog]
    ) -> list[Where]:
        """Most sampled lines, in samples per second of steps, less what the other ranks show at the same
        line."""
        mine, samples, seconds = _rates(logs, components, wanted)
        if samples < _FEWEST_SAMPLES:
            return []
        theirs, _, their_seconds = _rates(against, components, wanted)
        scale = seconds / their_seconds if their_seconds else 0.0
        net: dict[tuple[str, int, str], float] = {}
        for key, count in mine.items():
            other = theirs.get(key, 0)
            # Counts scatter by their square root: a line stands out by twice that, and by a few samples at least.
            if count - scale * other >= max(_FEWEST_SAMPLES, 2.0 * sqrt(count + scale**2 * other)):
                net[key] = count - scale * other
        return _ranked(Counter(net))  # type: ignore[arg-type]


def _rates(
    logs: Sequence[RankLog], components: Sequence[str], wanted: set[int]
) -> tuple[Counter[tuple[str, int, str]], int, float]:
    """Samples per line in the components' time, their number, and the seconds of steps looked at."""
    found: Counter[tuple[str, int, str]] = Counter()
    samples, seconds = 0, 0.0
    for log in logs:
        steps = [step for step in log.steps if step.number in wanted]
        seconds += sum(step.end - step.start for step in steps) / 1e9
        for user in _samples_in(log, steps, components):
            where = log.sample_where.get(user)
            if where is not None:
                found[where.file, where.line, where.function] += 1
                samples += 1
    return found, samples, seconds


def _samples_in(log: RankLog, steps: Sequence[Step], components: Sequence[str]) -> Iterator[int]:
    """User-line ids of the samples taken while the thread did this kind of work."""
    starts = [step.start for step in steps]
    by_step: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for sample in log.samples:
        index = bisect_right(starts, sample[0]) - 1
        if index >= 0 and sample[0] < steps[index].end:
            by_step[index].append(sample)
    kinds = {kind for name in components for kind in _EVENTS.get(name, ())}
    outside = "host" in components
    forward = "forward" in components
    for index, samples in by_step.items():
        events = [e for e in steps[index].events if e.k in _INSIDE_EVENTS]
        for t, user, _ in samples:
            inside = [e.k for e in events if e.s <= t < e.stop + (_AFTER_GC_NS if e.k == "gc" else 0)]
            if inside:
                matches = any(kind in kinds for kind in inside)
            else:
                matches = forward if _in_forward(steps[index], t) else outside
            if matches:
                yield user


def _in_forward(step: Step, t: int) -> bool:
    return any(event.k == "fwd" and event.s <= t < event.stop for event in step.events)


def _ranked(found: Counter[tuple[str, int, str]]) -> list[Where]:
    total = sum(found.values())
    return [
        Where(file, line, function, share=count / total if total else None)
        for (file, line, function), count in found.most_common(_MOST)
    ]
