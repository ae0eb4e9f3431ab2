"""One clock for traces of several hosts.

All members of a collective leave it together: an allreduce is over for everybody when the last piece has
arrived. So the ends of the same collectives on two ranks differ by the offset between their clocks plus some
tens of microseconds of scatter, whoever was late. Between hosts the offset and its drift are fitted to these
differences robustly; within a host the clock is shared. NTP leaves milliseconds between hosts, CUPTI's own
conversion hundreds of microseconds.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_BIN_NS = 200_000
_REACH = 48
"""How many positions apart two events may stand in their files and still be the same collective: windows do
not begin together."""
_MOST_PAIRED = 1500
_NEAR_NS = 50_000_000
"""Offsets that a synchronised clock can have; a far one is believed only with clearly more votes."""
_DRIFT_SPAN_NS = 20_000_000
"""A drift is fitted only to events spread over more than this."""
_MOST_DRIFT = 1e-3


@dataclass(frozen=True)
class ClockFit:
    """``common = local - (offset_ns + drift * (local - origin_ns))``."""

    offset_ns: float
    drift: float
    origin_ns: float
    error_ns: float
    """Robust scatter of the differences that are left: the error bound of a single collective's alignment."""
    pairs: int

    def correction(self, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """ns to add to local times."""
        local = np.asarray(times, np.float64) - self.origin_ns
        result: NDArray[np.int64] = -np.round(self.offset_ns + self.drift * local).astype(np.int64)
        return result


def vote_offset(
    reference: NDArray[np.int64],
    reference_labels: Sequence[Hashable],
    other: NDArray[np.int64],
    labels: Sequence[Hashable],
) -> float | None:
    """Offset of ``other`` against ``reference`` (ns) on which most pairs of alike events agree; None without
    any pair.

    Events stand in order of time with labels that must be equal for a pair. Where steps repeat evenly,
    offsets one step apart get almost as many votes: the one nearest to zero wins unless another has clearly
    more.
    """
    differences = []
    width = min(len(reference), _MOST_PAIRED)
    for i in range(width):
        low, high = max(0, i - _REACH), min(len(other), i + _REACH + 1)
        differences += [
            int(other[j]) - int(reference[i]) for j in range(low, high) if labels[j] == reference_labels[i]
        ]
    if not differences:
        return None
    values = np.sort(np.array(differences, np.float64))
    votes = np.searchsorted(values, values + _BIN_NS, side="right") - np.arange(len(values))
    best = votes.max()
    good = np.flatnonzero(votes >= max(1.0, 0.9 * best))
    near = good[np.abs(values[good]) < _NEAR_NS]
    chosen = int(near[np.abs(values[near]).argmin()]) if len(near) else int(votes.argmax())
    chosen = _peak(values, votes, chosen)
    inside = values[chosen : chosen + int(votes[chosen])]
    return float(np.median(inside))


def _peak(values: NDArray[np.float64], votes: NDArray[np.int64], start: int) -> int:
    """The fullest bin that begins within one bin of the chosen one."""
    around = np.flatnonzero(np.abs(values - values[start]) <= _BIN_NS)
    return int(around[votes[around].argmax()])


def fit_clock(reference: NDArray[np.int64], other: NDArray[np.int64]) -> ClockFit:
    """Offset and drift of ``other`` against ``reference`` from paired ends (ns), by repeated trimming of
    outliers."""
    origin = float(np.median(other)) if len(other) else 0.0
    difference = np.asarray(other, np.float64) - np.asarray(reference, np.float64)
    local = np.asarray(other, np.float64) - origin
    keep = np.ones(len(difference), bool)
    offset, drift = float(np.median(difference)) if len(difference) else 0.0, 0.0
    for _ in range(4):
        if keep.sum() >= 8 and np.ptp(local[keep]) > _DRIFT_SPAN_NS:
            drift = _theil_sen(local[keep], difference[keep])
            if abs(drift) > _MOST_DRIFT:
                drift = 0.0
        offset = float(np.median(difference[keep] - drift * local[keep]))
        left = np.abs(difference - offset - drift * local)
        scatter = 1.4826 * float(np.median(left[keep]))
        trimmed = left <= max(4 * scatter, 2_000.0)
        if (trimmed == keep).all() or trimmed.sum() < 3:
            break
        keep = trimmed
    left = np.abs(difference - offset - drift * local)
    error = 1.4826 * float(np.median(left)) if len(left) else 0.0
    return ClockFit(offset, drift, origin, error, len(difference))


def _theil_sen(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Median of the slopes between events half the window apart: outliers on either side do not move it."""
    order = np.argsort(x)
    x, y = x[order], y[order]
    half = len(x) // 2
    run = x[half:] - x[: len(x) - half]
    usable = run > 0
    return float(np.median((y[half:] - y[: len(y) - half])[usable] / run[usable])) if usable.any() else 0.0
