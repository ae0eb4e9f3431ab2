"""What is usual, and how much it scatters, by measures that outliers do not move."""

from __future__ import annotations

import numpy as np

from .arrays import Array

_NORMAL_PER_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation: 1 / 0.6745."""
_NORMAL_MEDIAN_ERROR = 1.2533
"""Standard error of the median over that of the mean, of a normal distribution: the root of pi / 2."""
_UNDISTURBED = 0.25
"""Quantile that stands for an undisturbed cycle: disturbances strike in half of them on a busy machine, and in more where ranks
are late in turn."""


def scatter_of(deviations: Array) -> Array:
    """Standard deviation of a normal distribution with this median absolute deviation: 1.4826 times the median, over the
    first axis, of the ``deviations`` from the middle."""
    scatter: Array = _NORMAL_PER_MAD * np.median(np.abs(deviations), axis=0)
    return scatter


def median_error(scatter: Array, count: int) -> Array:
    """Standard error of the median of ``count`` values that scatter by ``scatter``."""
    error: Array = _NORMAL_MEDIAN_ERROR * scatter / np.sqrt(max(count, 1))
    return error


def undisturbed(values: Array, *, its_own: bool = False) -> Array:
    """[R] of [cycles, R]: each rank's undisturbed cycle, its lower quartile; with ``its_own`` a cycle that it had, so that of few
    cycles one long one is no part of it."""
    quartile: Array = np.quantile(values, _UNDISTURBED, axis=0, method="lower" if its_own else "linear")
    return quartile
