"""One clock for traces of several hosts.

All members of a collective leave it together: an allreduce is over for everybody when the last piece has
arrived. So the ends of the same collectives on two ranks differ by the offset between their clocks plus some
tens of microseconds of scatter, whoever was late. Between hosts the offset and its drift are fitted to these
differences robustly; within a host the clock is shared. NTP leaves milliseconds between hosts, CUPTI's own
conversion hundreds of microseconds.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddpdoctor.measure.numerics import scatter_of


class Tuning(msgspec.Struct, frozen=True):
    """How offsets are voted on, and a drift is fitted."""

    bin_ns: int = 200_000
    """Offsets as near as this agree: above the 90 microseconds by which ends scatter within a host."""
    reach: int = 1200
    """Events of the other clock, around its middle, with which they are compared: windows do not begin together."""
    most_paired: int = 200
    """Events of the reference, around its middle, that vote: enough for any vote, and bounds the time that it takes."""
    peaks: int = 12
    """Offsets to try: those a step apart have almost as many votes."""
    near_ns: int = 50_000_000
    """Offsets that a synchronised clock can have; others are tried later."""
    nearly: float = 0.5
    """Of the most votes: fewer are an accident. Spread ends take many from the right one."""
    drift_span_ns: int = 20_000_000
    """A drift is fitted only to events spread over more than this."""
    drift_events: int = 8
    """And to no fewer: the slope of fewer follows their scatter."""
    most_drift: float = 1e-3
    """Of the time: crystals drift by 1e-4 at most, NTP slews by 5e-4."""
    trims: int = 4
    """Rounds of trimming; it has settled by then."""
    outlier: float = 4.0
    """Standard deviations beyond which a difference is trimmed."""
    least_scatter_ns: float = 2_000.0
    """What is within this of the fit is not trimmed: times are rounded to the microsecond."""
    fewest_left: int = 3
    """A trimming that leaves fewer is not done."""


TUNING = Tuning()


class ClockFit(msgspec.Struct, frozen=True):
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


def vote_offsets(
    reference: NDArray[np.int64], reference_labels: ArrayLike, other: NDArray[np.int64], labels: ArrayLike
) -> list[float]:
    """Offsets of ``other`` against ``reference`` (ns) on which many pairs of alike events agree, those that clocks can have
    first, the nearest to zero before others; [] without any pair.

    Events stand in order of time with labels that must be equal for a pair. Where steps repeat evenly, offsets one step
    apart get almost as many votes: none of them is chosen here.
    """
    ours, theirs = _middle(len(reference), TUNING.most_paired), _middle(len(other), TUNING.reach)
    alike = np.asarray(reference_labels)[ours][:, None] == np.asarray(labels)[theirs]
    values = np.sort((other[theirs] - reference[ours][:, None])[alike]).astype(np.float64)
    votes = np.searchsorted(values, values + TUNING.bin_ns, side="right") - np.arange(len(values))
    found: list[float] = []
    left = votes.copy()
    while len(found) < TUNING.peaks and left.size and left.max() >= max(1.0, TUNING.nearly * votes.max()):
        peak = int(left.argmax())
        found.append(float(np.median(values[peak : peak + int(votes[peak])])))
        left[np.abs(values - values[peak]) <= 2 * TUNING.bin_ns] = 0
    return sorted(found, key=lambda offset: (abs(offset) >= TUNING.near_ns, abs(offset)))


def _middle(count: int, most: int) -> slice:
    begin = max(0, (count - most) // 2)
    return slice(begin, begin + most)


def fit_clock(reference: NDArray[np.int64], other: NDArray[np.int64]) -> ClockFit:
    """Offset and drift of ``other`` against ``reference`` from paired ends (ns), by repeated trimming of
    outliers."""
    origin = float(np.median(other)) if len(other) else 0.0
    difference = np.asarray(other, np.float64) - np.asarray(reference, np.float64)
    local = np.asarray(other, np.float64) - origin
    keep = np.ones(len(difference), bool)
    offset, drift = float(np.median(difference)) if len(difference) else 0.0, 0.0
    for _ in range(TUNING.trims):
        drift = _drift(local[keep], difference[keep], drift)
        offset = float(np.median(difference[keep] - drift * local[keep]))
        left = np.abs(difference - offset - drift * local)
        scatter = float(scatter_of(left[keep]))
        trimmed = left <= max(TUNING.outlier * scatter, TUNING.least_scatter_ns)
        if (trimmed == keep).all() or trimmed.sum() < TUNING.fewest_left:
            break
        keep = trimmed
    left = np.abs(difference - offset - drift * local)
    error = float(scatter_of(left)) if len(left) else 0.0
    return ClockFit(offset, drift, origin, error, len(difference))


def _drift(local: NDArray[np.float64], difference: NDArray[np.float64], before: float) -> float:
    """Growth of the difference with time; as ``before`` where the events do not tell, 0 where no clock drifts so."""
    if len(local) < TUNING.drift_events or np.ptp(local) <= TUNING.drift_span_ns:
        return before
    drift = _theil_sen(local, difference)
    return drift if abs(drift) <= TUNING.most_drift else 0.0


def _theil_sen(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Median of the slopes between events half the window apart: outliers on either side do not move it."""
    order = np.argsort(x)
    at, value = x[order], y[order]
    half = len(at) // 2
    run, rise = at[half:] - at[: len(at) - half], value[half:] - value[: len(at) - half]
    usable = run > 0
    return float(np.median(rise[usable] / run[usable])) if usable.any() else 0.0
