"""Robust statistics (medians, scatter, the error of a mean, trends, change points, Shapley values), the array types of the analysis, and
durations as text.

Neighbouring steps are correlated (a queue that drains, a machine that is busy for a second), so n of them contain less information
than n independent values. The variance of their mean is estimated from the means of overlapping batches of neighbours (Meketon
and Schmeiser, "Overlapping batch means: something for nothing?", WSC 1984), for batches of one, n^(1/3) and n^(1/2) values; the
largest estimate is used. It is deterministic and takes O(n) time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import combinations
from math import factorial
from statistics import NormalDist
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


def nan_median(values: NDArray[Any], axis: int, keepdims: bool = False) -> Array:
    """The median of the values that are not NaN; NaN if all are.

    For small arrays, ten times as fast as ``numpy.nanmedian``, which takes half a millisecond.
    """
    ordered = np.sort(values, axis=axis)  # NaN comes last
    known = np.count_nonzero(~np.isnan(values), axis=axis, keepdims=True)
    low, high = np.maximum(known - 1, 0) // 2, np.minimum(known // 2, max(values.shape[axis] - 1, 0))
    pair = np.take_along_axis(ordered, np.concatenate([low, high], axis=axis), axis=axis)
    middle: Array = pair.mean(axis=axis, keepdims=keepdims)
    return middle


def median(values: Array) -> float:
    """The median of ``values`` [N], none of them NaN; NaN without values.

    For a few hundred values, ten times as fast as ``numpy.median``, which takes 0.1 ms.
    """
    if not len(values):
        return math.nan
    ordered, half = np.sort(values), len(values) // 2
    return float(ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2)


def running(values: Ints, neighbours: int) -> Ints:
    """[N, M] each value with its ``neighbours`` - 1 nearest; beyond either end the outermost value is repeated."""
    half = min(neighbours // 2, len(values) - 1)
    return sliding_window_view(np.pad(values, half, mode="edge"), 2 * half + 1)


def running_median(values: Ints, neighbours: int) -> Ints:
    """[N] → [N]: the median of each value and its ``neighbours`` - 1 nearest."""
    windows = running(values, neighbours)
    # Not numpy.median: in float64, epoch ns lose their last digits.
    half = windows.shape[1] // 2
    middle: Ints = np.partition(windows, half, axis=-1)[:, half]
    return middle


_NORMAL_PER_MAD = 1.4826
"""Ratio of standard deviation to median absolute deviation of a normal distribution: 1 / 0.6745."""
_NORMAL_MEDIAN_ERROR = 1.2533
"""Ratio of the standard errors of median and mean of a normal distribution: sqrt(pi / 2)."""
_UNDISTURBED = 0.25
"""Quantile that represents an undisturbed cycle: on a busy machine half of the cycles are disturbed, and more if the late rank rotates."""


def scatter_of(deviations: Array) -> Array:
    """Robust standard deviation: 1.4826 times the median absolute deviation, over the first axis of ``deviations`` from the median."""
    distance = np.abs(deviations)
    middle: Any = median(distance) if distance.ndim == 1 else np.median(distance, axis=0)
    scatter: Array = np.asarray(_NORMAL_PER_MAD * middle)
    return scatter


def median_error(scatter: Array, count: int) -> Array:
    """Standard error of the median of ``count`` values with the standard deviation ``scatter``."""
    error: Array = _NORMAL_MEDIAN_ERROR * scatter / np.sqrt(max(count, 1))
    return error


def undisturbed(values: Array, *, its_own: bool = False) -> Array:
    """[R] of [cycles, R]: each rank's lower quartile, which represents an undisturbed cycle. With ``its_own`` it is one of the values,
    not interpolated, so that a single long one of few cycles has no effect."""
    quartile: Array = np.quantile(values, _UNDISTURBED, axis=0, method="lower" if its_own else "linear")
    return quartile


FEWEST = 3
"""Minimum number of values for an estimate of the scatter."""
_FREEDOM = 1.5
"""Degrees of freedom per batch: overlapping batches have a variance of two thirds (Meketon and Schmeiser)."""


def mean_error(values: Array, level: float) -> float:
    """Standard error of the mean of ``values`` [N], in order of time; NaN for fewer than three values.

    Widened for the uncertain scatter of few values, so that an interval of ``normal(level)`` times the result contains the mean with
    probability ``level``.
    """
    count = len(values)
    if count < FEWEST:
        return float("nan")
    errors = []
    sums = np.concatenate(([0.0], np.cumsum(values - values.mean())))
    for length in {1, round(count ** (1 / 3)), round(count**0.5)}:
        if length <= count // FEWEST:
            means = (sums[length:] - sums[:-length]) / length
            variance = length * float((means**2).sum()) / ((count - length) * (count - length + 1))
            freedom = count - 1.0 if length == 1 else _FREEDOM * (count / length - 1.0)
            errors.append(float(np.sqrt(variance)) * _student(level, freedom) / normal(level))
    return max(errors)


def normal(level: float) -> float:
    """Standard deviations to either side of the mean that contain ``level`` of a normal distribution."""
    return NormalDist().inv_cdf((1 + level) / 2)


def _student(level: float, freedom: float) -> float:
    """The same for Student's distribution, by its expansion around the normal one (Abramowitz and Stegun, 26.7.5); the error is 1 % for
    two degrees of freedom."""
    z, f = normal(level), freedom
    return (
        z
        + (z**3 + z) / (4 * f)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * f**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * f**3)
    )


class Trend(msgspec.Struct, frozen=True):
    """A line through a series."""

    slope: float
    """Median of the slopes of all pairs (Theil 1950, Sen 1968), per unit of time."""
    low: float
    high: float
    """Confidence interval of the slope at the given level, with ``low`` (Sen 1968)."""
    z_score: float
    """Kendall's S over its standard deviation without a trend: exceeds 3 by chance once in a thousand."""


def trend(times: Array, values: Array, level: float) -> Trend:
    """The trend of ``values`` [N] at rising ``times`` [N], N at least 3; needs memory for N² / 2 numbers."""
    earlier, later = np.triu_indices(len(values), 1)
    rise = values[later] - values[earlier]
    slopes = np.sort(rise / (times[later] - times[earlier]))
    n = len(values)
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    around = NormalDist().inv_cdf((1 + level) / 2) * deviation
    low = max(0, int((len(slopes) - around) / 2))
    high = min(len(slopes) - 1, math.ceil((len(slopes) + around) / 2))
    return Trend(
        slope=float(np.median(slopes)),
        low=float(slopes[low]),
        high=float(slopes[high]),
        z_score=float(np.sign(rise).sum()) / deviation,
    )


def best_split(values: Array, fewest: int) -> tuple[int, float]:
    """``(place, difference)``: the cut of ``values`` [N] into ``values[:place]`` and ``values[place:]`` that reduces the sum of squares
    most, and this reduction: n m / N times the squared difference of the means of the two parts, of n and m values (binary segmentation;
    Scott and Knott, Biometrics 30, 1974). Each part has at least ``fewest`` values; N is at least 2 x ``fewest``."""
    count = len(values)
    before = np.arange(fewest, count - fewest + 1)
    sums = np.cumsum(values)
    means, rest = sums[before - 1] / before, (sums[-1] - sums[before - 1]) / (count - before)
    weights = before * (count - before) / count * (means - rest) ** 2
    best = int(weights.argmax())
    return int(before[best]), float(weights[best])


_UNITS_NS = {"h": 3.6e12, "min": 6e10}
"""Units longer than a second, the longest first."""
_FROM = 1.5
"""Multiple of a unit from which it is used: "80 min" rather than "1.3 h"."""


def format_duration(ns: float) -> str:
    """A duration for a sentence: "1.5 s", "58 min", "3.2 h"."""
    unit, size_ns = next(((u, s) for u, s in _UNITS_NS.items() if ns >= _FROM * s), ("s", 1e9))
    return f"{float(f'{ns / size_ns:.2g}'):g} {unit}"


_Cause = TypeVar("_Cause", bound=str)


class Value(msgspec.Struct, frozen=True):
    """Cost of one cause, ns per step."""

    first_ns: float
    """Saving if only this cause is removed."""
    part_ns: float
    """Its share of the common cost of all causes (Shapley value)."""
    last_ns: float
    """Saving if this cause is removed after all others."""


def fair_shares(
    removed: Mapping[_Cause, list[Array]], gain_ns: Callable[[list[Array]], float]
) -> dict[_Cause, Value]:
    """The share of each cause in the common cost of causes that hide each other. Evaluates all 2^n subsets, so n must be small.

    ``removed`` is the work of each cause, per group of the graph; ``gain_ns`` returns the saving per step without the given work.

    Example: rank 0 is 3 ms late because of data, rank 3 is 5 ms late because of its own Python work. Without the work a step is
    2 ms shorter, without the data as long as before, without both 5 ms shorter. So the causes cost 5 ms together, but 2 ms and
    0 ms alone. A cause's share is its saving, averaged over all orders in which the causes can be removed (Shapley, "A value for
    n-person games", 1953; for a cost set by the largest one, Littlechild and Owen, "A simple expression for the Shapley value in a
    special case", 1973). Shares add up to the common saving; the share of a cause that no other hides is its saving alone. Here: 1.5 ms
    for the data, 3.5 ms for the work.
    """
    causes = list(removed)
    gains_ns = {frozenset[_Cause](): 0.0}
    for size in range(1, len(causes) + 1):
        for chosen in combinations(causes, size):
            work = [sum(parts) for parts in zip(*(removed[cause] for cause in chosen), strict=True)]
            gains_ns[frozenset(chosen)] = max(0.0, gain_ns(work))
    everything = frozenset(causes)
    return {
        cause: Value(
            first_ns=gains_ns[frozenset((cause,))],
            part_ns=_part_ns(cause, gains_ns),
            last_ns=gains_ns[everything] - gains_ns[everything - {cause}],
        )
        for cause in causes
    }


def _part_ns(cause: _Cause, gains_ns: Mapping[frozenset[_Cause], float]) -> float:
    """The mean, over all orders of the causes, of the gain that this cause adds to that of the causes before it."""
    count = max(len(chosen) for chosen in gains_ns)
    return sum(
        factorial(len(chosen))
        * factorial(count - len(chosen) - 1)
        / factorial(count)
        * (gains_ns[chosen | {cause}] - gain_ns)
        for chosen, gain_ns in gains_ns.items()
        if cause not in chosen
    )
