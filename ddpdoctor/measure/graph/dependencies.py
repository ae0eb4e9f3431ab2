"""How sure it is, by the timeline, that the computation of a rank waits for a collective.

DDP's buckets hold up nothing but the end of the backward pass. Those of sharded parameters, or of tensor parallelism,
look alike in a trace and are waited for: the next kernel has long been launched, and starts when the collective
is over. That is a dependency, and a replay must keep it.

No single gap decides. The computation must have stood still in most cycles, and no other collective may have ended in between; then
three kinds of evidence add up as logarithms of odds:

- **coincidence**: a computation that goes on for a reason of its own may do so at any time of its standstill, one that waited
  does so within some usual start times of kernels on this device;
- **the host**: a kernel that was launched before the end, and an idle device that did not start it, waited for something; one that
  was launched later waited for its host, unless that waited for the device meanwhile;
- **moving together**: over the cycles, a computation that waits keeps its distance from the collective's end, one that does
  not keeps it from what it did before, or from its launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.numerics import Array, Intervals, nan_median
from ddpdoctor.measure.window import Window, launches
from ddpdoctor.trace import classify


class Tuning(msgspec.Struct, frozen=True):
    """What shows that a computation stood still for a collective, and how much."""

    start_ns: float = 20_000.0
    """From an event on another stream to the kernel that waits for it, or from a launch to its kernel, at least: 5 to 20 us on
    devices of today. Where kernels usually take longer, that counts instead."""
    slowest_start_ns: float = 100_000.0
    """And at most: beyond, the host is what kernels wait for."""
    idle_ns: float = 100_000.0
    """A computation that stood still for longer before did so for the collective: gaps between launched kernels are
    shorter."""
    whole: float = 0.9
    """Or for this part of a collective that is itself shorter."""
    partly: float = 0.6
    """Of either: from here on a standstill begins to count."""
    rarely: float = 0.25
    """Of the cycles: up to here the computation does not stand still."""
    mostly: float = 0.75
    """Of the cycles: from here on it does."""
    most_by_gap: float = 4.0
    """Logarithm of the odds that a coincidence can speak for or against, about fifty to one: cycles are alike, so that they are
    one draw and not many."""
    most_by_host: float = 3.0
    """The same of the launch, twenty to one: an idle device starts at once what is launched and waits for nothing."""
    most_together: float = 6.0
    """The same of what moves together, over all cycles: four hundred to one."""
    fewest_cycles: int = 3
    """Of which it can be told what scatters."""
    least_scatter_ns: float = 5_000.0
    """By which a kernel's start scatters in any case."""
    clear: float = 0.1
    """Probability that counts as none, and distance from one that counts as certainty."""
    rounding_ns: float = 1_000.0
    """Clocks are read to the microsecond: a start that is rounded to before the end follows it all the same."""


TUNING = Tuning()


class ComputeTimeline(msgspec.Struct, frozen=True):
    """What a rank's device computes, and when its host launched that; ns from one origin."""

    computes: Intervals
    """The union of its kernels."""
    launched: Array
    """[kernels] when that with which each interval begins was launched; NaN where unknown."""
    over: Array
    """Ends of all its collectives, in order."""
    host_waits: Intervals = (np.empty(0), np.empty(0))
    """Calls in which the host waited for its device, in order of their ends."""

    @property
    def start_ns(self) -> float:
        """How long kernels usually take to start once the device is idle and they are launched."""
        starts, ends = self.computes
        since = starts[1:] - np.maximum(ends[:-1], self.launched[1:])
        known = since[~np.isnan(since)]
        usual = float(np.median(known)) if len(known) else 0.0
        return float(np.clip(usual, TUNING.start_ns, TUNING.slowest_start_ns))


class _ComputeStalls(msgspec.Struct, frozen=True):
    """What the computation of one rank did about the end of each collective; [N, K], NaN where it does not go on."""

    idle: Array
    """From its last computation to the end, ns; negative where it computes on."""
    gap: Array
    """From the end to the next computation."""
    launched: Array
    """From that one's launch to the end; negative where it was launched later."""
    weight: Array
    """0 to 1: how much it stood still."""


def compute_timeline(window: Window) -> ComputeTimeline:
    """The lane of a window, on the clock of its computation."""
    trace, starts = window.trace, window.compute[0]
    computes = trace.category_mask("kernel", "gpu_memset") & ~classify.communication_kernels(trace)
    rows = np.flatnonzero(computes)
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    launched = np.full(len(starts), np.nan)
    if len(rows) and len(starts):
        calls = launches(trace, rows)
        place = np.searchsorted(trace.start_ns[rows], starts - window.shifted_ns)
        place = np.minimum(place, len(rows) - 1)
        known = (calls[place] >= 0) & (trace.start_ns[rows[place]] == starts - window.shifted_ns)
        launched[known] = (trace.end_ns[calls[place]] + window.shifted_ns)[known]
    waits = window.waits
    host_waits = (trace.start_ns[waits.row] + window.shifted_ns, waits.end + window.shifted_ns)
    return ComputeTimeline(window.compute, launched, np.sort(window.collectives.end), host_waits)


def dependency_probability(timelines: Sequence[ComputeTimeline], arrival: Array, end: Array) -> Array:
    """[K, R] from 0 to 1: how sure it is that the rank's computation stood still for the collective, and went on at its end.

    ``arrival`` and ``end`` [N, K, R] are those of its own part, NaN where it takes none, by the clock of the lanes.
    """
    sure = np.zeros(arrival.shape[1:])
    for r, timeline in enumerate(timelines):
        takes_part = ~np.isnan(end[:, :, r])
        if len(timeline.computes[0]) and takes_part.any():
            seen = _compute_stalls(timeline, arrival[:, :, r], end[:, :, r])
            share = seen.weight.sum(axis=0) / np.maximum(takes_part.sum(axis=0), 1)
            still = np.clip((share - TUNING.rarely) / (TUNING.mostly - TUNING.rarely), 0.0, 1.0)
            odds = (
                _gap_odds(seen, timeline.start_ns)
                + _launch_odds(seen, timeline.start_ns)
                + _covariation_odds(seen)
            )
            likely = 1.0 / (1.0 + np.exp(-odds))
            sure[:, r] = still * np.clip((likely - TUNING.clear) / (1.0 - 2.0 * TUNING.clear), 0.0, 1.0)
    return sure


def _compute_stalls(timeline: ComputeTimeline, arrival: Array, end: Array) -> _ComputeStalls:
    starts, ends = timeline.computes
    over = np.nan_to_num(end)
    index = np.searchsorted(starts, over - TUNING.rounding_ns)
    following = np.minimum(index, len(starts) - 1)
    goes_on = np.where(np.isnan(end) | (index == len(starts)), np.nan, starts[following])
    length = np.nan_to_num(end - arrival)
    idle = np.where(index > 0, over - ends[np.maximum(index - 1, 0)], length)
    enough = np.minimum(TUNING.idle_ns, TUNING.whole * length)
    part = idle / np.maximum(enough, TUNING.rounding_ns)
    weight = np.clip((part - TUNING.partly) / (1.0 - TUNING.partly), 0.0, 1.0)
    later = np.searchsorted(timeline.over, over + TUNING.rounding_ns, side="right")
    another = timeline.over[np.minimum(later, len(timeline.over) - 1)] if len(timeline.over) else over
    answered = (another > over + TUNING.rounding_ns) & (another <= np.nan_to_num(goes_on))
    return _ComputeStalls(
        idle=idle,
        gap=np.maximum(goes_on - over, 0.0),
        launched=_launched(timeline, over, over - timeline.launched[following]),
        weight=np.where(np.isnan(goes_on) | answered, 0.0, weight),
    )


def _launched(timeline: ComputeTimeline, over: Array, launched: Array) -> Array:
    """``launched`` before the end, with no doubt where the host put that off because it waited for its device meanwhile."""
    begins, ends = timeline.host_waits
    if not len(ends):
        return launched
    call = np.searchsorted(ends, over - TUNING.rounding_ns)
    clipped = np.minimum(call, len(ends) - 1)
    waited = (call < len(ends)) & (begins[clipped] < over) & (ends[clipped] <= over - launched)
    return np.where(waited & (launched < 0), np.inf, launched)


def _gap_odds(seen: _ComputeStalls, start_ns: float) -> Array:
    """[K] log odds: a start after a wait is soon, with a long tail; any other is anywhere in the standstill."""
    whole = np.minimum(seen.idle, 1e3 * TUNING.idle_ns) + seen.gap
    odds = np.log(np.maximum(whole, 1.0) / start_ns) - 2.0 * np.log1p(seen.gap / start_ns)
    return np.clip(_mean(odds, seen.weight), -TUNING.most_by_gap, TUNING.most_by_gap)


def _launch_odds(seen: _ComputeStalls, start_ns: float) -> Array:
    """[K] log odds: for what was launched before the end, against what was launched later."""
    return TUNING.most_by_host * _mean(np.tanh(seen.launched / start_ns), seen.weight)


def _covariation_odds(seen: _ComputeStalls) -> Array:
    """[K] log odds: what the start keeps its distance from, cycle by cycle."""
    counts = seen.weight > 0
    number = counts.sum(axis=0)
    before = np.fmin(seen.idle, seen.launched)
    from_end, from_before = (_scatter(np.where(counts, far, np.nan)) for far in (seen.gap, before + seen.gap))
    odds = (number - 1) * np.log(from_before / from_end)
    odds = np.where(number < TUNING.fewest_cycles, 0.0, odds)
    return np.clip(odds, -TUNING.most_together, TUNING.most_together)


def _scatter(values: Array) -> Array:
    """[K] mean distance from the median over the cycles [N, K], as far as known."""
    apart = np.abs(values - nan_median(values, axis=0, keepdims=True))
    known = ~np.isnan(apart)
    mean = np.where(known, apart, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
    scatter: Array = np.maximum(mean, TUNING.least_scatter_ns)
    return scatter


def _mean(values: Array, weight: Array) -> Array:
    """[K] weighted by how much the computation stood still; 0 where nothing is known."""
    known = np.where(np.isnan(values), 0.0, weight)
    mean: Array = (known * np.nan_to_num(values)).sum(axis=0) / np.maximum(known.sum(axis=0), 1e-9)
    return mean
