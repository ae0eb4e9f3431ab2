"""Detect memory leaks: unlimited growth, as opposed to memory that is freed again, fills up once, or settles.

Growth is measured per step, not per second. A leak grows with each batch or step, and on a shared machine the length of a step may
change by a factor of five within minutes.

The series is cut into windows, and each is represented by its minimum (*floor*), which excludes memory that an evaluation, a checkpoint
or an epoch allocates and frees. These floors must rise nearly every time, must not decrease again, and must rise as fast at the end as at
the beginning. The growth of a cache that fills, a history of bounded length, or an allocator that settles slows down.

A job allocates memory while it warms up, while ddpdoctor's profiler is open, and in its first epoch, in which datasets fill caches. These
times are excluded. A cache of shuffled data fills for longer: with a dataset in ``S`` parts, of which each process reads another one in
each epoch, epoch ``n`` adds ``(1 - 1/S)^n`` of the first epoch's amount. A leak adds the same amount in each epoch.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
import numpy as np

from ddpdoctor.measure.facts import RANGE_LEVEL
from ddpdoctor.measure.numerics import Array, trend
from ddpdoctor.measure.steplog import AROUND_WINDOW, OPENED, PROFILED, WARM_UP_STEPS, RankLog
from ddpdoctor.rundir.stepevents import EventKind


class Tuning(msgspec.Struct, frozen=True):
    """Thresholds of a leak."""

    fewest_windows: int = 8
    """Minimum number of windows: eight floors, each above the one before, occur by chance in one of 40,000 series."""
    most_windows: int = 24
    """Maximum number of windows: with more, each would be shorter than an evaluation."""
    readings: int = 2
    """Minimum number of readings per window: the lower of two is not a peak."""
    z_score: float = 3.0
    """Significance of the rise, in standard deviations: by chance once in a thousand."""
    rising: float = 0.7
    """Minimum share of floors above the previous one: growth in a few large steps, as at each checkpoint, is not reported."""
    above: float = 0.1
    """Part of the mean rise from which a floor counts as above the previous one; less is noise between large steps."""
    freed_part: float = 0.25
    """Maximum part of the growth that is freed again: memory freed at the end of each epoch is not a leak."""
    steady: float = 0.6
    """Minimum slope of the last windows relative to the first ones: 1 for a leak. Logarithmic settling, as of fragmentation, has 0.4 from a
    fifth of the recording on, exponential settling less."""
    steady_cache: float = 0.8
    """The same if the growth may be a dataset cache."""
    in_step: float = 0.9
    """Mean resultant length of the phases above which all readings have nearly the same phase: within a seventh of a step."""
    turns: float = 2.0
    """Steps through which the phase must drift, so that the readings cover all phases of a step; one would be enough, but windows blur
    the drift."""
    part: float = 0.4
    """Share of the windows that are the first, and the last, ones."""
    least_progress: float = 0.001
    """Minimum distance of two floors as a part of all steps: the job made no progress between closer ones, and they give no slope."""
    least_bytes: int = 32 << 20
    """Minimum growth: malloc arenas, thread stacks and the recording itself grow by as much in healthy jobs."""
    least_share: float = 0.02
    """Minimum growth as a part of the memory in use: allocators of large processes settle by as much."""


TUNING = Tuning()


class Rise(msgspec.Struct, frozen=True):
    """Growth of a series, bytes per step."""

    slope: float
    low: float
    high: float
    grown_bytes: float
    """Growth over the whole series, at this slope."""
    held_bytes: float
    """At the end."""


def is_aliased(phases: Array) -> bool:
    """Whether the readings are aliased: their phase is nearly the same in neighbouring steps and drifts slowly, so that the memory use
    within one step looks like growth. ``phases`` [N]: positions in their steps, 0 to 1, in order of time."""
    if not has_enough_readings(len(phases)):
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


def has_enough_readings(readings: int) -> bool:
    """Whether there are enough readings to detect growth."""
    return readings >= TUNING.fewest_windows * TUNING.readings


def rise_of(progress: Array, held_bytes: Array, *, cache: bool = False) -> Rise | None:
    """The growth of a series; None if it does not grow throughout. ``progress`` [N]: steps done at each reading, ascending. ``cache``:
    whether the growth may be a dataset cache."""
    if not has_enough_readings(len(progress)):
        return None
    steps, floors = _floors(progress, progress, held_bytes)
    if len(floors) < TUNING.fewest_windows:
        return None
    steady = TUNING.steady_cache if cache else TUNING.steady
    # Also test windows of equal time: in a job that became slow, few steps follow after growth that stopped long ago.
    clock = np.arange(len(progress), dtype=float)
    whole_trend = trend(steps, floors, RANGE_LEVEL)
    grown = float(floors[-1] - floors[0])
    mean_slope = grown / float(steps[-1] - steps[0])
    slopes = np.diff(floors) / np.diff(steps)
    freed_bytes = float((np.maximum.accumulate(floors) - floors).max())
    if (
        grown < max(TUNING.least_bytes, TUNING.least_share * float(floors[0]))
        or whole_trend.low <= 0
        or whole_trend.z_score < TUNING.z_score
        or (slopes > TUNING.above * mean_slope).mean() < TUNING.rising
        or freed_bytes > TUNING.freed_part * grown
        or floors[-1] <= floors[-3]
        or not _keeps_rising(steps, floors, steady)
        or not _keeps_rising(*_floors(clock, progress, held_bytes), steady)
    ):
        return None
    whole = whole_trend.slope * float(progress[-1] - progress[0])
    return Rise(whole_trend.slope, whole_trend.low, whole_trend.high, whole, float(floors[-1]))


def _floors(cut: Array, progress: Array, held_bytes: Array) -> tuple[Array, Array]:
    """(steps done, value) of the minimum of each window. Windows have equal length in ``cut``, or are longer if they would have too few
    readings."""
    width = (cut[-1] - cut[0]) / TUNING.most_windows
    least, begin = [], 0
    while len(cut) - begin >= TUNING.readings:
        end = max(begin + TUNING.readings, int(np.searchsorted(cut, cut[begin] + width)))
        least.append(begin + int(np.argmin(held_bytes[begin:end])))
        begin = end
    steps, floors = progress[least], held_bytes[least]
    on = np.append(True, np.diff(steps) > TUNING.least_progress * (progress[-1] - progress[0]))
    return steps[on], floors[on]


def _keeps_rising(steps: Array, floors: Array, steady: float) -> bool:
    """Whether the last floors rise nearly as fast as the first ones; True if there are too few floors to compare."""
    some = max(3, int(TUNING.part * len(floors)))
    if len(floors) < some + 1:
        return True
    first, last = (
        trend(steps[part], floors[part], RANGE_LEVEL).slope for part in (slice(some), slice(-some, None))
    )
    return last > 0 and last >= steady * first


_SETTLING_SHARE = 0.2
"""Part of a recording, at its beginning, in which allocators, caches and thread pools of short jobs settle."""
_AFTER_WINDOW_NS = 2_000_000_000
"""Time after saving the profiler window until its memory is freed."""
_SECOND_NS = 1_000_000_000
"""A second, the approximate interval of memory readings."""
_SLOWED = 0.7
"""Growth of a cache in the last windows, relative to the first ones, below which it is distinguishable from a leak, whose growth stays the
same."""
_PASSES = 0.95
"""Part of an epoch that counts as a whole one: dropped batches and unrecorded steps are missing."""


class MemoryKind(StrEnum):
    """Owner of memory: the rank's process, its dataloader workers, or tensors on its device."""

    PROCESS = "process"
    WORKERS = "workers"
    DEVICE = "device"


class Observation(msgspec.Struct, frozen=True):
    """The observation period for leaks of a rank. Times are epoch ns, like those of steps."""

    begin_ns: int
    end_ns: int
    step_ns: float
    """Mean length of the steps in between."""
    data_in: MemoryKind | None
    """Owner of the training dataset, and of a cache of it; None without a DataLoader."""
    cache_may_fill: bool
    """Whether there were too few epochs to distinguish such a cache, whose growth slows down, from a leak."""
    workers_end: bool
    """Whether the loader's workers end with each epoch, which frees their memory."""
    workers_ended: bool
    """Whether they ended at least once."""
    steps_left: float | None
    """Steps until a cache is full at the present pace, or until the workers end with their epoch; None if the length of an epoch
    is unknown."""

    @property
    def hours(self) -> float:
        """Length of the observation period, hours."""
        return (self.end_ns - self.begin_ns) / (3600 * _SECOND_NS)


def observation_of(log: RankLog) -> Observation | None:
    """The observation period of a rank; None if the recording is too short."""
    steps = log.steps[WARM_UP_STEPS:]
    if len(steps) < 2:
        return None
    first, end = log.steps[0].start_ns, steps[-1].end_ns
    settled = first + int(_SETTLING_SHARE * (end - first))
    begin = max(steps[0].start_ns, settled, _window_end_ns(log) + _AFTER_WINDOW_NS)
    passes = _Epochs.of(log)
    after = None if passes is None else passes.end_ns(first, end)
    if after is not None and has_enough_readings((end - max(after, begin)) // _SECOND_NS):
        begin = max(after, begin)
    if not has_enough_readings((end - begin) // _SECOND_NS):
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
    """End of the step in which ddpdoctor's first profiler window was saved, epoch ns; 0 without a window."""
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
    """Epochs of the training loader."""

    recorded: float
    """Number of epochs in the recording; 0 if unknown."""
    second_ns: int | None
    """Recorded start of the second epoch, Unix time in ns; None if there is none."""
    parts: int
    """Parts of the dataset: number of processes that read different parts in each epoch."""
    workers: int
    workers_end: bool
    """Whether each epoch starts new workers."""
    steps_to_end: float | None
    """Steps to the end of the last epoch; None if the length of an epoch is unknown."""
    steps: float | None
    """Steps of an epoch; None if unknown."""

    @classmethod
    def of(cls, log: RankLog) -> _Epochs | None:
        """Epochs of a log; None without a training DataLoader."""
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
        # A loop may end an epoch early; the step in which the last one began may not have been read.
        since = last - begins[-1].number + 1 if begins else steps
        workers = int(settings.get("num_workers") or 0)
        shared = "Distributed" in str(settings.get("sampler") or "")
        ranks = int(log.record.info.get("world_size") or 1) if shared else 1
        parts = 1 if settings.get("shuffle") is False else max(ranks, 1) * max(workers, 1)
        return cls(
            recorded=max(counted, float(len(begins))),
            second_ns=begins[1].start_ns if len(begins) > 1 else None,
            parts=parts,
            workers=workers,
            # False is torch's default; loaders of other libraries may not have the setting.
            workers_end=workers > 0 and settings.get("persistent_workers") is False,
            steps_to_end=None if pass_steps is None else pass_steps - since % pass_steps,
            steps=pass_steps,
        )

    def end_ns(self, first_ns: int, end_ns: int) -> int | None:
        """End of the first epoch, Unix time in ns; None if it did not end, or is unknown."""
        ends = [] if self.second_ns is None else [self.second_ns]
        if self.recorded > 1:
            ends.append(first_ns + int((end_ns - first_ns) / self.recorded))
        return min(ends, default=None)

    @property
    def steps_left(self) -> float | None:
        """Steps, at the present pace, until a process's cache contains the whole dataset: the rest of this epoch and ``S - 1`` more epochs,
        because epoch ``n`` adds ``(1 - 1/S)^n``. If workers end with the epoch: the rest of this epoch. None if unknown."""
        if self.steps is None or self.steps_to_end is None:
            return None
        if self.workers_end:
            return self.steps_to_end
        if self.parts == 1 and self.recorded > 1:
            return None
        return self.steps_to_end + self.steps * (self.parts - 1)

    def may_fill(self, before: float) -> bool:
        """Whether a cache may fill after this share of the recording without slowing down enough to be distinguishable from a leak."""
        if self.recorded * before < _PASSES:
            return True
        passes = self.recorded * (1 - before)
        # Between the middles of the first windows and of the last ones.
        return bool((1 - 1 / self.parts) ** ((1 - TUNING.part) * passes) >= _SLOWED)
