"""How well a mean is known of values that come one after the other.

Neighbouring steps resemble each other (a queue that drains, a machine that is busy for a second), so n of them say less
than n draws would. The variance of their mean is estimated from the means of overlapping batches of neighbours (Meketon and
Schmeiser, "Overlapping batch means: something for nothing?", WSC 1984), for batches of one, n^(1/3) and n^(1/2) values, of
which the greatest counts. Nothing is drawn at random, and the work is O(n).
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from .arrays import Array

FEWEST = 3
"""Values from which a scatter is told: of two, one difference is all that is known."""
_FREEDOM = 1.5
"""Degrees of freedom per batch: overlapping batches have a variance of two thirds (Meketon and Schmeiser)."""


def mean_error(values: Array, level: float) -> float:
    """Standard deviation of the error of the mean of ``values`` [N], in their order; NaN below three of them.

    Of few values the scatter itself is not well known. The result is widened for that, so that this many normal standard
    deviations hold the mean with probability ``level``.
    """
    count = len(values)
    if count < FEWEST:
        return float("nan")
    lengths = {1, round(count ** (1 / 3)), round(count**0.5)}
    return max(_of_batches(values, length, level) for length in lengths if length <= count // FEWEST)


def _of_batches(values: Array, length: int, level: float) -> float:
    count = len(values)
    sums = np.concatenate(([0.0], np.cumsum(values - values.mean())))
    means = (sums[length:] - sums[:-length]) / length
    variance = length * float((means**2).sum()) / ((count - length) * (count - length + 1))
    freedom = count - 1.0 if length == 1 else _FREEDOM * (count / length - 1.0)
    return float(np.sqrt(variance)) * _student(level, freedom) / normal(level)


def normal(level: float) -> float:
    """Standard deviations to either side of a normal distribution's middle that hold ``level`` of it."""
    return NormalDist().inv_cdf((1 + level) / 2)


def _student(level: float, freedom: float) -> float:
    """The same of Student's distribution, by its expansion around the normal one (Abramowitz and Stegun, 26.7.5); 1 % off
    with two degrees of freedom."""
    z, f = normal(level), freedom
    return (
        z
        + (z**3 + z) / (4 * f)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * f**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * f**3)
    )
