"""Interval algebra on numpy columns.

An interval set is a pair of float64 or int64 arrays ``(start, end)``, ends exclusive, in one unit (ns
throughout this package). A *union* is sorted and its intervals are disjoint.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .stats import Array, Ints, Mask

Times = NDArray[Any]
Intervals = tuple[Times, Times]

EMPTY: Intervals = (np.empty(0, np.int64), np.empty(0, np.int64))
"""Integers, so that a union with times of either type keeps their type."""


def union(start: ArrayLike, end: ArrayLike) -> Intervals:
    """Sorted, disjoint intervals that cover the same points; empty and reversed intervals are dropped."""
    starts, ends = np.asarray(start), np.asarray(end)
    keep = ends > starts
    if not keep.any():
        return EMPTY
    if not keep.all():
        starts, ends = starts[keep], ends[keep]
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    # A new interval begins after each end that the next start exceeds.
    last = np.flatnonzero(starts[1:] > reach[:-1])
    return starts[np.concatenate(([0], last + 1))], reach[np.concatenate((last, [-1]))]


def union_of(*sets: Intervals) -> Intervals:
    """Union of all sets, which may overlap."""
    return union(np.concatenate([start for start, _ in sets]), np.concatenate([end for _, end in sets]))


def total(intervals: Intervals) -> float:
    """Length of a union."""
    return float((intervals[1] - intervals[0]).sum())


def covered(intervals: Intervals, start: ArrayLike, end: ArrayLike) -> Array:
    """Length of the union inside each window ``[start, end)``; 0 for reversed windows, NaN stays NaN."""
    left, right = np.asarray(start, np.float64), np.asarray(end, np.float64)
    # [N + 1] length of the union before each of its intervals, and of the whole.
    starts, ends = intervals
    lengths = np.zeros(len(starts) + 1, np.result_type(starts, ends))
    np.cumsum(ends - starts, out=lengths[1:])
    inside = _before(intervals, lengths, right) - _before(intervals, lengths, left)
    unknown = np.isnan(left) | np.isnan(right)
    return np.where(unknown, np.nan, np.maximum(inside, 0))


def _before(intervals: Intervals, lengths: Times, times: Times) -> Array:
    """Length of the union to the left of each time, in the shape of ``times``."""
    starts, ends = intervals
    if not len(starts):
        return np.zeros(times.shape, np.float64)
    following = np.searchsorted(starts, times, side="right")
    still_to_come = np.maximum(ends[following - 1] - times, 0) * (following > 0)
    length: Array = (lengths[following] - still_to_come).astype(np.float64)
    return length


def place_in(intervals: Intervals, times: Times) -> Ints:
    """Index of the interval that contains each of the times, -1 for none. Intervals are in order of their starts; if they overlap, only
    the one that starts last counts."""
    starts, ends = intervals
    if not len(starts):
        return np.full(len(times), -1, np.int64)
    before = np.searchsorted(starts, times, side="right") - 1
    return np.where((before >= 0) & (times < ends[before]), before, -1)


def holds(intervals: Intervals, times: Times) -> Mask:
    """Mask of the times in the union."""
    inside: Mask = place_in(intervals, times) >= 0
    return inside


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Union of the points in both unions."""
    if not len(a[0]) or not len(b[0]):
        return EMPTY
    edges = np.concatenate((a[0], a[1], b[0], b[1]))
    change = np.concatenate(
        (np.ones(len(a[0])), -np.ones(len(a[0])), np.ones(len(b[0])), -np.ones(len(b[0])))
    )
    order = np.lexsort((change, edges))
    edges, depth = edges[order], np.cumsum(change[order])
    inside = depth[:-1] >= 2
    return union(edges[:-1][inside], edges[1:][inside])


def complement(intervals: Intervals, start: float, end: float) -> Intervals:
    """Union of the points of ``[start, end)`` outside the union: the gaps."""
    inner = clip(intervals, start, end)
    return union(np.concatenate(([start], inner[1])), np.concatenate((inner[0], [end])))


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Union of the points of ``a`` outside ``b``."""
    if not len(a[0]) or not len(b[0]):
        return a
    low, high = min(a[0][0], b[0][0]), max(a[1][-1], b[1][-1])
    return intersect(a, complement(b, low, high))


def clip(intervals: Intervals, start: float, end: float) -> Intervals:
    """The part of the union inside ``[start, end)``."""
    return union(np.clip(intervals[0], start, end), np.clip(intervals[1], start, end))
