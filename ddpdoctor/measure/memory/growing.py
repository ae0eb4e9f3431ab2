"""Memory that grows and does not come back, told from memory that comes and goes, fills up once, or settles.

What leaks, leaks with each batch or step: growth is measured by the steps that the job had done, since a machine that is shared
makes a step take five times as long in one minute as in the next, and growth per second changes with it.

The series is cut into windows, of which each counts by its least value: what an evaluation, a checkpoint or an epoch takes and gives
back is not in it. These floors must rise nearly every time, give nothing back, and rise at the end as they did before: a cache that
fills, a history of bounded length, and an allocator that settles slow down.

A job takes memory while it warms up, while our profiler is open, and in its first pass over the data, where data sets fill caches.
A cache of shuffled data goes on filling: of a data set in ``S`` parts, of which each process reads another one in each pass, pass
``n`` adds ``(1 - 1/S)^n`` of what the first one did. A leak adds as much in each.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from ddpdoctor.measure.facts import RANGE_LEVEL
from ddpdoctor.measure.numerics import Array, trend
from ddpdoctor.measure.steplog import AROUND_WINDOW, OPENED, PROFILED, WARM_UP_STEPS, RankLog
from ddpdoctor.rundir import EventKind


class Tuning(msgspec.Struct, frozen=True):
    """From when on growth is told."""

    fewest_windows: int = 8
    """Eight floors, each above the one before, come about by chance once in forty thousand series."""
    most_windows: int = 24
    """More would make each too short to hold an evaluation."""
    readings: int = 2
    """Of a window, at least: the lower of two is no peak."""
    sureness: float = 3.0
    """Of the rise, in standard deviations: by chance once in a thousand."""
    rising: float = 0.7
    """Share of the floors that lie above the one before: what grows in a few large steps, as at each checkpoint, is not told."""
    above: float = 0.1
    """By this part of what a floor rises by on average: else noise between large steps counts as rising, too."""
    given_back: float = 0.25
    """Of what it grew by, the most that it may fall again: what is given back at the end of each pass does not run out."""
    steady: float = 0.6
    """Slope of the last windows over that of the first ones: a leak's is 1. What settles like a logarithm, as fragments do, has 0.4
    from a fifth of the recording on, what settles exponentially less."""
    steady_cache: float = 0.8
    """The same where a cache of the data set that fills must be told apart."""
    in_step: float = 0.9
    """Length of the mean of phases on a circle, above which readings are all of about one moment: within a seventh of a step."""
    turns: float = 2.0
    """Readings that drift through a whole step see what it takes and gives back, which is no growth; the second turn is for what the
    windows blur."""
    part: float = 0.4
    """Share of the windows that are its first, or last, ones."""
    standing: float = 0.001
    """Of all steps: between two floors that lie nearer together the job stood, and they say nothing of its slope."""
    least_bytes: int = 32 << 20
    """Arenas of malloc, thread stacks and the recording's own memory grow by so much in healthy jobs."""
    least_share: float = 0.02
    """Of what is held: allocators of large processes settle by as much."""


TUNING = Tuning()


class Rise(msgspec.Struct, frozen=True):
    """How a series grows, bytes per step."""

    slope: float
    low: float
    high: float
    grown_bytes: float
    """Over the whole series, at this slope."""
    held_bytes: float
    """At the end."""


def aliased(phases: Array) -> bool:
    """Whether readings drift through a step or two: taken at nearly the same moment of neighbouring steps, a little later each time,
    they show one step in slow motion, and half of one looks like growth. ``phases`` are their places in their steps, 0 to 1, in the
    order in which they were taken."""
    if not enough(len(phases)):
        return False
    turned = np.exp(2j * np.pi * phases)
    count = min(TUNING.most_windows, len(phases) // TUNING.readings)
    within = [abs(part.mean()) for part in np.array_split(turned, count)]
    drift = np.cumsum((np.diff(phases) + 0.5) % 1.0 - 0.5)
    return bool(
        np.median(within) > TUNING.in_step
        and abs(turned.mean()) < TUNING.in_step
        and np.ptp(drift) < TUNING.turns
    )


def enough(readings: int) -> bool:
    """Whether so many readings tell of growth at all."""
    return readings >= TUNING.fewest_windows * TUNING.readings


def rise_of(progress: Array, held_bytes: Array, *, cache: bool = False) -> Rise | None:
    """None where the series does not grow all along. ``progress``: steps done at each reading, rising. ``cache``: what grows may hold
    a cache of the data set."""
    if not enough(len(progress)):
        return None
    steps, floors = _floors(progress, progress, held_bytes)
    if len(floors) < TUNING.fewest_windows:
        return None
    steady = TUNING.steady_cache if cache else TUNING.steady
    # Where the job became slow, what stopped growing long ago has made few steps since.
    clock = np.arange(len(progress), dtype=float)
    all_along = trend(steps, floors, RANGE_LEVEL)
    grown = float(floors[-1] - floors[0])
    mean_slope = grown / float(steps[-1] - steps[0])
    slopes = np.diff(floors) / np.diff(steps)
    fallen = float((np.maximum.accumulate(floors) - floors).max())
    if (
        grown < max(TUNING.least_bytes, TUNING.least_share * float(floors[0]))
        or all_along.low <= 0
        or all_along.sureness < TUNING.sureness
        or (slopes > TUNING.above * mean_slope).mean() < TUNING.rising
        or fallen > TUNING.given_back * grown
        or floors[-1] <= floors[-3]
        or not _keeps_rising(steps, floors, steady)
        or not _keeps_rising(*_floors(clock, progress, held_bytes), steady)
    ):
        return None
    whole = all_along.slope * float(progress[-1] - progress[0])
    return Rise(all_along.slope, all_along.low, all_along.high, whole, float(floors[-1]))


def _floors(cut: Array, progress: Array, held_bytes: Array) -> tuple[Array, Array]:
    """(steps done, value) of the least reading of each window. A window is as long, by ``cut``, as if all were alike or, where readings
    are rare by it, has enough of them."""
    width = (cut[-1] - cut[0]) / TUNING.most_windows
    least, begin = [], 0
    while len(cut) - begin >= TUNING.readings:
        end = max(begin + TUNING.readings, int(np.searchsorted(cut, cut[begin] + width)))
        least.append(begin + int(np.argmin(held_bytes[begin:end])))
        begin = end
    steps, floors = progress[least], held_bytes[least]
    on = np.append(True, np.diff(steps) > TUNING.standing * (progress[-1] - progress[0]))
    return steps[on], floors[on]


def _keeps_rising(steps: Array, floors: Array, steady: float) -> bool:
    """Whether the last floors rise as the first ones do; True where the job made too few steps in one of these parts to say."""
    some = max(3, int(TUNING.part * len(floors)))
    if len(floors) < some + 1:
        return True
    first, last = (
        trend(steps[part], floors[part], RANGE_LEVEL).slope for part in (slice(some), slice(-some, None))
    )
    return last > 0 and last >= steady * first


_SETTLING_SHARE = 0.2
"""Of a recording, at its beginning: allocators, caches and thread pools of short jobs settle in it."""
_AFTER_WINDOW_NS = 2_000_000_000
"""After the profiler window is closed and saved: its memory is given back by then."""
_SECOND_NS = 1_000_000_000
"""A second: memory is read about so often."""
_SLOWED = 0.7
"""A cache whose last windows add less than this, of what the first ones did, is told from a leak, which adds as much."""
_PASSES = 0.95
"""Of a pass over the data: batches that are dropped, and steps that were not recorded, are missing in it."""


class MemoryKind(StrEnum):
    """Where memory is held."""

    PROCESS = "process"
    WORKERS = "workers"
    DEVICE = "device"


class Observation(msgspec.Struct, frozen=True):
    """Times are epoch ns, as the steps' are."""

    begin_ns: int
    end_ns: int
    step_ns: float
    """Mean length of the steps in between."""
    data_in: MemoryKind | None
    """Where the data set lies that feeds the training, and a cache of it; None where no DataLoader does."""
    cache_may_fill: bool
    """Whether the passes over the data were too few to tell such a cache, which slows down, from a leak."""
    workers_end: bool
    """Whether the loader's workers end with each pass, and give back what they hold."""
    workers_ended: bool
    """Whether they did, at least once."""
    steps_left: float | None
    """For how many steps more a cache grows at most as fast as it does, or workers live that end with the pass; None where the length
    of a pass is unknown."""

    @property
    def hours(self) -> float:
        """How long that is."""
        return (self.end_ns - self.begin_ns) / (3600 * _SECOND_NS)


def observation_of(log: RankLog) -> Observation | None:
    """None where the rank was recorded for too short a time."""
    steps = log.steps[WARM_UP_STEPS:]
    if len(steps) < 2:
        return None
    first, end = log.steps[0].start_ns, steps[-1].end_ns
    settled = first + int(_SETTLING_SHARE * (end - first))
    begin = max(steps[0].start_ns, settled, _window_end_ns(log) + _AFTER_WINDOW_NS)
    passes = _Epochs.of(log)
    after = None if passes is None else passes.end_ns(first, end)
    if after is not None and enough((end - max(after, begin)) // _SECOND_NS):
        begin = max(after, begin)
    if not enough((end - begin) // _SECOND_NS):
        return None
    rows = [step for step in steps if step.start_ns >= begin]
    if len(rows) < 2:
        return None
    return Observation(
        begin,
        end,
        step_ns=(rows[-1].start_ns - rows[0].start_ns) / max(rows[-1].number - rows[0].number, 1),
        data_in=None if passes is None else MemoryKind.WORKERS if passes.workers else MemoryKind.PROCESS,
        cache_may_fill=passes is not None and passes.may_fill((begin - first) / (end - first)),
        workers_end=passes is not None and passes.workers_end,
        workers_ended=passes is not None and passes.workers_end and after is not None,
        steps_left=None if passes is None else passes.steps_left,
    )


def _window_end_ns(log: RankLog) -> int:
    """When our first profiler window was closed and saved; 0 where none was open."""
    end, opened = 0, 0
    for step in log.steps:
        if not step.marks:
            continue
        opened += OPENED in step.marks
        if opened > 1:
            break
        if PROFILED in step.marks or any(mark in AROUND_WINDOW for mark in step.marks):
            end = step.end_ns
    return end


class _Epochs(msgspec.Struct, frozen=True):
    """Over the data of the loader that feeds the training."""

    recorded: float
    """How many the recording holds; 0 where that is unknown."""
    second_ns: int | None
    """When a pass after the first was seen to begin, where one was."""
    parts: int
    """Of the data set: as many as processes that read each another one in each pass."""
    workers: int
    workers_end: bool
    """Whether each pass has workers of its own."""
    steps_to_end: float | None
    """Of the last one, to its end; None where the length of a pass is unknown."""
    steps: float | None
    """Of a pass, likewise."""

    @classmethod
    def of(cls, log: RankLog) -> _Epochs | None:
        """None where no DataLoader feeds the training."""
        settings = log.main_loader_settings
        if settings is None:
            return None
        main = settings["id"]
        begins = [
            step
            for step in log.steps
            for event in step.events
            if event.kind == EventKind.ITERATION and event.loader == main
        ]
        given = [sum(e.gives_batch and e.loader == main for e in step.events) for step in log.steps]
        each = float(np.median([count for count in given if count] or [0]))
        whole = settings.get("batches_per_epoch")
        last = log.steps[-1].number
        steps = last - log.steps[0].number + 1
        pass_steps = whole / each if isinstance(whole, int) and whole > 0 and each > 0 else None
        counted = steps / pass_steps if pass_steps else 0.0
        # A loop may leave a pass before its end; the step in which the last one began may not have been read.
        since = last - begins[-1].number + 1 if begins else steps
        workers = int(settings.get("num_workers") or 0)
        return cls(
            recorded=max(counted, float(len(begins))) if counted else float(len(begins)),
            second_ns=begins[1].start_ns if len(begins) > 1 else None,
            parts=_parts(log, settings, workers),
            workers=workers,
            # False is torch's default; a loader of somebody's own may say nothing.
            workers_end=workers > 0 and settings.get("persistent_workers") is False,
            steps_to_end=None if pass_steps is None else pass_steps - since % pass_steps,
            steps=pass_steps,
        )

    def end_ns(self, first_ns: int, end_ns: int) -> int | None:
        """When the first pass was over; None where it was not, or nothing tells."""
        ends = [] if self.second_ns is None else [self.second_ns]
        if self.recorded > 1:
            ends.append(first_ns + int((end_ns - first_ns) / self.recorded))
        return min(ends, default=None)

    @property
    def steps_left(self) -> float | None:
        """As many as a process's cache grows for, at this pace, until it holds the whole data set: the rest of this pass and, as
        pass ``n`` adds ``(1 - 1/S)^n``, ``S - 1`` passes more. Of workers that end it is the rest of this pass."""
        if self.steps is None or self.steps_to_end is None:
            return None
        if self.workers_end:
            return self.steps_to_end
        if self.parts == 1 and self.recorded > 1:
            return None
        return self.steps_to_end + self.steps * (self.parts - 1)

    def may_fill(self, before: float) -> bool:
        """Whether a cache may have filled, after this share of the recording, without slowing down enough to be told."""
        if self.recorded * before < _PASSES:
            return True
        passes = self.recorded * (1 - before)
        # Between the middles of the first windows and of the last ones.
        return bool((1 - 1 / self.parts) ** ((1 - TUNING.part) * passes) >= _SLOWED)


def _parts(log: RankLog, settings: dict[str, Any], workers: int) -> int:
    if settings.get("shuffle") is False:
        return 1
    shared = "Distributed" in str(settings.get("sampler") or "")
    ranks = int(log.record.info.get("world_size") or 1) if shared else 1
    return max(ranks, 1) * max(workers, 1)
