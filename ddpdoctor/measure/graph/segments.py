"""Compute the work of each rank in the segments of a window's cycles and concurrently with their collectives, and the probability that a
rank's computation waits for a collective.

With DDP's buckets, only the end of the backward pass waits for collectives. Collectives of sharded parameters or of tensor parallelism
look the same in a trace, but computation waits for them: the next kernel was launched long before, and starts when the collective is
over. A replay must keep that dependency.

The probability is estimated over all cycles. The computation must have been idle in most of them, without another collective ending
between the end of this one and the next computation. Then three kinds of evidence add up as log odds:

- **coincidence**: a computation that waited resumes within a few kernel start times of this device. One that resumes for another reason
may do so at any time of its idle period;

- **the host**: a kernel that was launched before the collective's end, but not started by an idle device, waited for something. One that
was launched later waited for its host, unless the host was waiting for the device;

- **covariation**: over the cycles, the start of a computation that waits has a constant distance from the collective's end. Otherwise it
has a constant distance from the previous computation, or from its launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.numerics import Array, Intervals, Ints, covered, nan_median
from ddpdoctor.measure.taxonomy import COMPONENTS, DEVICE_WORK, INDEX, Component
from ddpdoctor.measure.window import QUEUED_NS, ROUNDING_NS, Window, launches
from ddpdoctor.trace import classify

from .cutting import Cycle, MatchedCollectives
from .graph import CycleGroup, Sync


class Tuning(msgspec.Struct, frozen=True):
    """When a computation counts as idle because of a collective."""

    start_ns: float = 20_000.0
    """Kernel start time: from an event on another stream to the kernel that waits for it, or from a launch to its kernel. 5 to 20 us on
    current devices; a larger median in the trace replaces it."""
    slowest_start_ns: float = 100_000.0
    """Largest kernel start time. Kernels that start later wait for the host."""
    idle_ns: float = 100_000.0
    """Idle time before the collective's end that counts fully. Gaps between launched kernels are shorter."""
    full_share: float = 0.9
    """Share of a shorter collective for which the idle time counts fully."""
    partial_share: float = 0.6
    """Share of either limit from which on idle time begins to count."""
    not_idle_share: float = 0.25
    """Share of the cycles up to which the computation counts as not idle."""
    idle_share: float = 0.75
    """Share of the cycles from which on it counts as idle."""
    most_gap_odds: float = 4.0
    """Largest log odds from coincidence, about 50:1. Cycles are similar, so they count as one observation."""
    most_launch_odds: float = 3.0
    """Largest log odds from the launch, 20:1. An idle device that waits for nothing starts launched work at once."""
    most_covariation_odds: float = 6.0
    """Largest log odds from covariation over all cycles, 400:1."""
    fewest_cycles: int = 3
    """Fewest cycles for an estimate of scatter."""
    least_scatter_ns: float = 5_000.0
    """Least scatter of a kernel's start."""
    certainty_margin: float = 0.1
    """Probabilities below this count as 0, and those above 1 minus this as 1."""


TUNING = Tuning()


class ComputeTimeline(msgspec.Struct, frozen=True):
    """When a rank's device computes, and when its host launched the kernels; ns from a common origin."""

    computes: Intervals
    """Union of its kernels."""
    launched: Array
    """[intervals] when the first kernel of each interval was launched; NaN if unknown."""
    over: Array
    """Ends of all its collectives, in order."""
    host_waits: Intervals = (np.empty(0), np.empty(0))
    """Calls in which the host waited for its device, in order of their ends."""

    @property
    def start_ns(self) -> float:
        """Median time from when the device is idle and a kernel is launched to its start, within the limits of :class:`Tuning`."""
        starts, ends = self.computes
        since = starts[1:] - np.maximum(ends[:-1], self.launched[1:])
        known = since[~np.isnan(since)]
        usual = float(np.median(known)) if len(known) else 0.0
        return float(np.clip(usual, TUNING.start_ns, TUNING.slowest_start_ns))


class _ComputeStalls(msgspec.Struct, frozen=True):
    """The computation of one rank around the end of each collective; [N, K] ns, NaN if no computation follows."""

    idle: Array
    """From the last computation to the end; negative if computation continues."""
    gap: Array
    """From the end to the next computation."""
    launched: Array
    """From the launch of the next computation to the end; negative if it was launched later."""
    weight: Array
    """Degree to which the computation was idle, 0 to 1."""


def compute_timeline(window: Window) -> ComputeTimeline:
    """Return the compute timeline of a window, on its clock."""
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
    """Return the probability [K, R] that the rank's computation was idle because of the collective, and resumed at its end.

    ``arrival`` and ``end`` [N, K, R] are those of the rank's own part, on the clock of the timelines; NaN if it takes no part.
    """
    probability = np.zeros(arrival.shape[1:])
    for r, timeline in enumerate(timelines):
        takes_part = ~np.isnan(end[:, :, r])
        if len(timeline.computes[0]) and takes_part.any():
            seen = _compute_stalls(timeline, arrival[:, :, r], end[:, :, r])
            share = seen.weight.sum(axis=0) / np.maximum(takes_part.sum(axis=0), 1)
            idle_weight = np.clip(
                (share - TUNING.not_idle_share) / (TUNING.idle_share - TUNING.not_idle_share), 0.0, 1.0
            )
            # Positive for launches before the end, negative for later ones.
            launched = np.tanh(seen.launched / timeline.start_ns)
            launch_odds = TUNING.most_launch_odds * _mean(launched, seen.weight)
            odds = _gap_odds(seen, timeline.start_ns) + launch_odds + _covariation_odds(seen)
            likely = 1.0 / (1.0 + np.exp(-odds))
            probability[:, r] = idle_weight * np.clip(
                (likely - TUNING.certainty_margin) / (1.0 - 2.0 * TUNING.certainty_margin), 0.0, 1.0
            )
    return probability


def _compute_stalls(timeline: ComputeTimeline, arrival: Array, end: Array) -> _ComputeStalls:
    starts, ends = timeline.computes
    over = np.nan_to_num(end)
    index = np.searchsorted(starts, over - ROUNDING_NS)
    following = np.minimum(index, len(starts) - 1)
    resumes = np.where(np.isnan(end) | (index == len(starts)), np.nan, starts[following])
    length = np.nan_to_num(end - arrival)
    idle = np.where(index > 0, over - ends[np.maximum(index - 1, 0)], length)
    full_idle = np.minimum(TUNING.idle_ns, TUNING.full_share * length)
    part = idle / np.maximum(full_idle, ROUNDING_NS)
    weight = np.clip((part - TUNING.partial_share) / (1.0 - TUNING.partial_share), 0.0, 1.0)
    later = np.searchsorted(timeline.over, over + ROUNDING_NS, side="right")
    another = timeline.over[np.minimum(later, len(timeline.over) - 1)] if len(timeline.over) else over
    other_ended = (another > over + ROUNDING_NS) & (another <= np.nan_to_num(resumes))
    return _ComputeStalls(
        idle=idle,
        gap=np.maximum(resumes - over, 0.0),
        launched=_adjusted_launch(timeline, over, over - timeline.launched[following]),
        weight=np.where(np.isnan(resumes) | other_ended, 0.0, weight),
    )


def _adjusted_launch(timeline: ComputeTimeline, over: Array, launched: Array) -> Array:
    """``launched``, but infinite if the launch was late because the host was waiting for its device."""
    begins, ends = timeline.host_waits
    if not len(ends):
        return launched
    call = np.searchsorted(ends, over - ROUNDING_NS)
    clipped = np.minimum(call, len(ends) - 1)
    waited = (call < len(ends)) & (begins[clipped] < over) & (ends[clipped] <= over - launched)
    return np.where(waited & (launched < 0), np.inf, launched)


def _gap_odds(seen: _ComputeStalls, start_ns: float) -> Array:
    """[K] log odds from coincidence. After a wait, the start is soon after the end, with a long-tailed distribution; otherwise it is
    uniformly distributed over the idle period."""
    whole = np.minimum(seen.idle, 1e3 * TUNING.idle_ns) + seen.gap
    odds = np.log(np.maximum(whole, 1.0) / start_ns) - 2.0 * np.log1p(seen.gap / start_ns)
    return np.clip(_mean(odds, seen.weight), -TUNING.most_gap_odds, TUNING.most_gap_odds)


def _covariation_odds(seen: _ComputeStalls) -> Array:
    """[K] log odds from covariation: over the cycles, the scatter of the start relative to the previous computation or its launch,
    compared with the scatter relative to the collective's end."""
    counts = seen.weight > 0
    number = counts.sum(axis=0)
    before = np.fmin(seen.idle, seen.launched)
    from_end, from_before = (_scatter(np.where(counts, far, np.nan)) for far in (seen.gap, before + seen.gap))
    odds = (number - 1) * np.log(from_before / from_end)
    odds = np.where(number < TUNING.fewest_cycles, 0.0, odds)
    return np.clip(odds, -TUNING.most_covariation_odds, TUNING.most_covariation_odds)


def _scatter(values: Array) -> Array:
    """[K] mean absolute deviation of the known values from their median, over the cycles [N, K]."""
    deviation = np.abs(values - nan_median(values, axis=0, keepdims=True))
    known = ~np.isnan(deviation)
    mean = np.where(known, deviation, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
    scatter: Array = np.maximum(mean, TUNING.least_scatter_ns)
    return scatter


def _mean(values: Array, weight: Array) -> Array:
    """[K] weighted mean of the known values; 0 without any."""
    known = np.where(np.isnan(values), 0.0, weight)
    mean: Array = (known * np.nan_to_num(values)).sum(axis=0) / np.maximum(known.sum(axis=0), 1e-9)
    return mean


class Segments(msgspec.Struct, frozen=True, dict=True):
    """Begins and ends of the segments of cycles with the same synchronisations; axes as in :class:`CycleGroup`."""

    begin: Array
    """[N, R]"""
    arrival: Array
    """[N, K, R]"""
    end: Array
    """[N, K, R]"""
    on_device: bool = False
    """Whether a rank may be in several collectives at the same time, each on its own stream."""

    @cached_property
    def left(self) -> Array:
        """[N, K, R] begin of each segment: own end of the previous collective. A segment continues across collectives of other ranks."""
        if self.on_device:
            return _ends_before(self.begin, self.arrival, self.end)
        left = np.empty(self.arrival.shape)
        since = self.begin
        for k in range(self.arrival.shape[1]):
            left[:, k] = since
            since = np.where(np.isnan(self.arrival[:, k]), since, self.end[:, k])
        return left

    @cached_property
    def right(self) -> Array:
        """[N, K, R] end of each segment: own arrival. The segment is empty if the rank was still in another collective."""
        return np.maximum(self.arrival, self.left) if self.on_device else self.arrival


def _ends_before(begin: Array, arrival: Array, end: Array) -> Array:
    """[N, K, R] when all collectives that the rank entered before this one had ended, on devices."""
    order = np.argsort(arrival, axis=1, kind="stable")
    ends = np.nan_to_num(np.take_along_axis(end, order, axis=1), nan=-np.inf)
    over = np.maximum.accumulate(np.concatenate((begin[:, None], ends), axis=1), axis=1)[:, :-1]
    left = np.empty(arrival.shape)
    np.put_along_axis(left, order, over, axis=1)
    return left


def queued_behind(arrival: Array, end: Array, ready: Array) -> Ints:
    """Return [N, K, R] the collective behind which the rank's part was queued: it was ready earlier and started when that one ended.
    -1 if none is known."""
    count = arrival.shape[1]
    moments = np.concatenate((end, arrival + ROUNDING_NS), axis=1)
    order = np.argsort(moments, axis=1, kind="stable")
    latest = np.maximum.accumulate(np.where(order < count, np.arange(2 * count)[:, None], -1), axis=1)
    before = np.empty(order.shape, np.int64)
    found = np.take_along_axis(order, np.maximum(latest, 0), axis=1)
    np.put_along_axis(before, order, np.where(latest < 0, -1, found), axis=1)
    before = before[:, count:]
    over = np.take_along_axis(end, np.maximum(before, 0), axis=1)
    known = (before >= 0) & (before != np.arange(count)[:, None]) & (arrival - over < QUEUED_NS)
    return np.where(known & (ready < arrival), before, -1)


def cycle_group(
    syncs: tuple[Sync, ...],
    cycles: Sequence[Cycle],
    matched: MatchedCollectives,
    windows: Sequence[Window],
    timelines: Sequence[ComputeTimeline],
) -> CycleGroup:
    """Build the group of these cycles, which have the same sequence of synchronisations; ``timelines``: those of the devices."""
    bodies = np.array([cycle.body for cycle in cycles])
    on_device = all(window.on_device for window in windows)
    ranks = np.arange(len(windows))
    # The windows' clock begins at the first event of any rank.
    begin = [np.zeros(len(ranks)) if of.after is None else matched.end[of.after, ranks] for of in cycles]
    segments = Segments(np.array(begin), matched.arrival[bodies], matched.end[bodies], on_device)
    arrival, end, ready = segments.arrival, segments.end, matched.ready[bodies]
    work = work_in(segments, [(window.sets, rest_component(window)) for window in windows])
    hidden = _hidden(windows, segments, work)
    computes = [window.compute for window in windows]
    group = CycleGroup(
        syncs=syncs,
        steps=np.array([cycle.step for cycle in cycles], np.int64),
        begin=segments.begin,
        arrival=arrival,
        end=end,
        work=work,
        message_bytes=matched.message_bytes[bodies],
        hidden=hidden,
        hidden_after_ready=_hidden_after_ready(windows, segments, ready, hidden),
        carried_in=_carried_in(windows, cycles, matched),
        concurrent_compute=_covered_by_rank(computes, arrival, end),
        exposed=_exposed(computes, arrival, end),
        ready=ready,
        queued_after=queued_behind(arrival, end, ready) if on_device else np.full(arrival.shape, -1),
        idle_after=idle_after(windows, segments),
        on_device=on_device,
        dependency_probability=dependency_probability(timelines, arrival, end),
    )
    return replace(group, concurrent_compute_in_wait=_covered_by_rank(computes, arrival, group.released))


def _covered_by_rank(of_rank: Sequence[Intervals], left: Array, right: Array) -> Array:
    """[N, K, R] ns covered by each rank's intervals between ``left`` and ``right`` [N, K, R]."""
    within = np.empty(left.shape)
    for r, own in enumerate(of_rank):
        within[:, :, r] = np.nan_to_num(covered(own, left[:, :, r], right[:, :, r]))
    return within


def rest_component(window: Window) -> Component:
    """Return the component of time that no interval set of a window covers: host work, if the trace records the host at all."""
    return Component.HOST if window.shows_host else Component.IDLE


def work_between(sets: Mapping[str, Intervals], left: Array, right: Array, rest: Component) -> Array:
    """Return [..., C] ns per component between ``left`` and ``right`` [...]. Uncovered time is of component ``rest``; it is slightly
    negative if, by another rank's clock, a rank left a synchronisation after it arrived at the next one."""
    work = np.zeros((*left.shape, len(COMPONENTS)))
    for name, intervals in sets.items():
        work[..., INDEX[name]] = covered(intervals, left, right)
    work[..., INDEX[rest]] = (right - left) - work.sum(axis=-1)
    return work


def work_in(segments: Segments, of_ranks: Sequence[tuple[Mapping[str, Intervals], Component]]) -> Array:
    """Return [N, K, R, C] ns of each component in each segment; 0 if the rank is no member of the synchronisation. ``of_ranks``: the
    interval sets of each rank, and the component of its uncovered time."""
    left, right = segments.left, segments.right
    work = np.empty((*right.shape, len(COMPONENTS)))
    for r, (sets, rest) in enumerate(of_ranks):
        work[:, :, r] = np.nan_to_num(work_between(sets, left[:, :, r], right[:, :, r], rest))
    return work


def _exposed(computes: Sequence[Intervals], arrival: Array, end: Array) -> Array:
    """[N, K] :attr:`CycleGroup.exposed`."""
    last, over = np.nanmax(arrival, axis=2), nan_median(end, axis=2)
    least: Array = np.clip(over - last, 0, None)
    for r, compute in enumerate(computes):
        alone = np.clip(over - last - covered(compute, last, np.maximum(over, last)), 0, None)
        least = np.where(np.isnan(arrival[:, :, r]), least, np.minimum(least, alone))
    return least


def _hidden(windows: Sequence[Window], segments: Segments, work: Array) -> Array:
    """[N, K, R, C] ns of computation, copies and late launches outside the segments, by the collective that they overlap with. If a
    rank is in several collectives at the same time, the overlap is divided among them."""
    hidden = np.zeros(work.shape)
    for r, window in enumerate(windows):
        begin, arrival, end = segments.begin[:, r], segments.arrival[:, :, r], segments.end[:, :, r]
        last = np.nanmax(end, axis=1)
        for component, own in _device_work(window):
            parts, c = np.nan_to_num(covered(own, arrival, end)), INDEX[component]
            outside = np.nan_to_num(covered(own, begin, last)) - work[:, :, r, c].sum(axis=1)
            share = np.clip(outside, 0, None) / np.maximum(parts.sum(axis=1), 1.0)
            is_late = component == Component.LAUNCH
            hidden[:, :, r, c] = parts if is_late else parts * share[:, None]
    return hidden


def _hidden_after_ready(windows: Sequence[Window], segments: Segments, ready: Array, hidden: Array) -> Array:
    """[N, K, R, C] :attr:`CycleGroup.hidden_after_ready`."""
    arrival, end = segments.arrival, segments.end
    since = np.where(np.isnan(arrival), -np.inf, ready).max(axis=1, keepdims=True)
    later = np.clip(since, arrival, end)
    share = np.zeros(hidden.shape)
    for r, window in enumerate(windows):
        for component, own in _device_work(window):
            whole = np.nan_to_num(covered(own, arrival[:, :, r], end[:, :, r]))
            part = np.nan_to_num(covered(own, later[:, :, r], end[:, :, r]))
            share[:, :, r, INDEX[component]] = part / np.maximum(whole, 1.0)
    after_ready: Array = hidden * share
    return after_ready


def _carried_in(windows: Sequence[Window], cycles: Sequence[Cycle], matched: MatchedCollectives) -> Array:
    """[N, R, C] ns of each rank's device work after it was ready for the collective at whose end its cycle begins, up to that end."""
    ranks = np.arange(len(windows))
    carried = np.zeros((len(cycles), len(windows), len(COMPONENTS)))
    begins = [n for n, cycle in enumerate(cycles) if cycle.after is not None]
    after = np.array([cycles[n].after for n in begins], np.int64).reshape(-1, len(windows))
    ready, end = matched.ready[after, ranks], matched.end[after, ranks]
    for r, window in enumerate(windows):
        for component, own in _device_work(window):
            carried[begins, r, INDEX[component]] = covered(own, ready[:, r], end[:, r])
    return carried


def _device_work(window: Window) -> Iterator[tuple[Component, Intervals]]:
    """The work of a window that can overlap with a collective, by component."""
    for component in DEVICE_WORK:
        if component in window.sets:
            yield component, window.sets[component]
    yield Component.LAUNCH, window.late_launches


def idle_after(windows: Sequence[Window], segments: Segments) -> dict[str, Array]:
    """Return [N, K, R] idle ns of each segment that a host synchronisation caused, by its kind."""
    idle: dict[str, Array] = {}
    left, right = segments.left, segments.right
    for r, window in enumerate(windows):
        for kind, intervals in window.idle_after.items():
            of_kind = idle.setdefault(kind, np.zeros(right.shape))
            of_kind[:, :, r] = np.nan_to_num(covered(intervals, left[:, :, r], right[:, :, r]))
    return idle
