"""Whether a series rises, how fast, and how sure that is, by ranks of its values: single outliers count little."""

from __future__ import annotations

import math
from statistics import NormalDist

import msgspec
import numpy as np

from .arrays import Array


class Trend(msgspec.Struct, frozen=True):
    """A line through a series."""

    slope: float
    """Median of the slopes of all pairs (Theil 1950, Sen 1968), per unit of time."""
    low: float
    high: float
    """Range of the slope at the level that was asked for (Sen 1968)."""
    sureness: float
    """Kendall's S over its standard deviation where there is no trend: above 3 by chance once in a thousand."""


def trend(times: Array, values: Array, level: float) -> Trend:
    """Of ``values`` [N] at rising ``times`` [N], N at least 3; takes N² / 2 numbers."""
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
        sureness=float(np.sign(rise).sum()) / deviation,
    )
