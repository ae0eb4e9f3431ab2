"""Memory that grows and does not come back, told from memory that comes and goes, fills up once, or settles.

What leaks, leaks with each batch or step: growth is measured by the steps that the job had done, since a machine that is shared
makes a step take five times as long in one minute as in the next, and growth per second changes with it.

The series is cut into windows, of which each counts by its least value: what an evaluation, a checkpoint or an epoch takes and gives
back is not in it. These floors must rise nearly every time, give nothing back, and rise at the end as they did before: a cache that
fills, a history of bounded length, and an allocator that settles slow down.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ddpdoctor.measure.facts import RANGE_LEVEL
from ddpdoctor.measure.numerics import Array, trend


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
        or not _goes_on(steps, floors, steady)
        or not _goes_on(*_floors(clock, progress, held_bytes), steady)
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


def _goes_on(steps: Array, floors: Array, steady: float) -> bool:
    """Whether the last floors rise as the first ones do; True where the job made too few steps in one of these parts to say."""
    some = max(3, int(TUNING.part * len(floors)))
    if len(floors) < some + 1:
        return True
    first, last = (
        trend(steps[part], floors[part], RANGE_LEVEL).slope for part in (slice(some), slice(-some, None))
    )
    return last > 0 and last >= steady * first
