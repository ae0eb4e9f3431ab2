"""Find the change point of a series."""

from __future__ import annotations

import numpy as np

from .stats import Array


def best_split(values: Array, fewest: int) -> tuple[int, float]:
    """``(place, difference)``: the cut of ``values`` [N], N at least 2 x ``fewest``, whose parts ``values[:place]`` and
    ``values[place:]`` differ most, each of at least ``fewest`` values; and that difference: n m / N times the squared difference of their
    means, the reduction of the sum of squares by the cut (binary segmentation; Scott and Knott, Biometrics 30, 1974)."""
    count = len(values)
    before = np.arange(fewest, count - fewest + 1)
    sums = np.cumsum(values)
    means, rest = sums[before - 1] / before, (sums[-1] - sums[before - 1]) / (count - before)
    weights = before * (count - before) / count * (means - rest) ** 2
    best = int(weights.argmax())
    return int(before[best]), float(weights[best])
