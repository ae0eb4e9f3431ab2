"""Medians: along an axis of values of which some are unknown, and of neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from .arrays import Array, Ints


def nan_median(values: NDArray[Any], axis: int, keepdims: bool = False) -> Array:
    """The median of those values that are not NaN; NaN where all are.

    As ``numpy.nanmedian``, which takes half a millisecond for arrays as small as ours, ten times as long as this.
    """
    ordered = np.sort(values, axis=axis)  # NaN comes last
    known = np.count_nonzero(~np.isnan(values), axis=axis, keepdims=True)
    low, high = np.maximum(known - 1, 0) // 2, np.minimum(known // 2, max(values.shape[axis] - 1, 0))
    pair = np.take_along_axis(ordered, np.concatenate([low, high], axis=axis), axis=axis)
    middle: Array = pair.mean(axis=axis, keepdims=keepdims)
    return middle


def running_median(values: Ints, neighbours: int) -> Ints:
    """[N] → [N]: the median of each value and its ``neighbours`` - 1 nearest; beyond either end the outermost value goes on."""
    half = min(neighbours // 2, len(values) - 1)
    padded = np.pad(values, half, mode="edge")
    # Of integers as large as a time in ns a mean of two would lose the last digits.
    windows = sliding_window_view(padded, 2 * half + 1)
    middle: Ints = np.partition(windows, half, axis=-1)[:, half]
    return middle
