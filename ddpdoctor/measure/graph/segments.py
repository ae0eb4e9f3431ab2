"""The work of each rank in the segments of a window's cycles, and concurrently with their collectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import Array, Intervals, covered, nan_median
from ddpdoctor.measure.taxonomy import COMPONENTS, DEVICE_WORK, INDEX, Component
from ddpdoctor.measure.window import QUEUED_NS, ROUNDING_NS, Window

from .cutting import Cycle, MatchedCollectives
from .dependencies import ComputeTimeline, dependency_probability
from .graph import CycleGroup, Sync


class Segments(msgspec.Struct, frozen=True, dict=True):
    """When the segments of cycles with the same synchronisations begin and end; axes as in :class:`CycleGroup`."""

    begin: Array
    """[N, R]"""
    arrival: Array
    """[N, K, R]"""
    end: Array
    """[N, K, R]"""
    on_device: bool = False
    """Whether a rank may be in several collectives at once, each on its own stream."""

    @cached_property
    def left(self) -> Array:
        """[N, K, R] own end of the previous collective; a segment continues across collectives of other ranks."""
        if self.on_device:
            return _over_before(self.begin, self.arrival, self.end)
        left = np.empty(self.arrival.shape)
        since = self.begin
        for k in range(self.arrival.shape[1]):
            left[:, k] = since
            since = np.where(np.isnan(self.arrival[:, k]), since, self.end[:, k])
        return left

    @cached_property
    def right(self) -> Array:
        """[N, K, R] own arrival; the segment is empty where the rank was still in another collective."""
        return np.maximum(self.arrival, self.left) if self.on_device else self.arrival


def _over_before(begin: Array, arrival: Array, end: Array) -> Array:
    """[N, K, R] when all collectives ended that the rank entered before this one; no work of its own ends earlier."""
    order = np.argsort(arrival, axis=1, kind="stable")
    ends = np.nan_to_num(np.take_along_axis(end, order, axis=1), nan=-np.inf)
    over = np.maximum.accumulate(np.concatenate((begin[:, None], ends), axis=1), axis=1)[:, :-1]
    left = np.empty(arrival.shape)
    np.put_along_axis(left, order, over, axis=1)
    return left


def queued_behind(arrival: Array, end: Array, ready: Array) -> NDArray[np.int64]:
    """[N, K, R] the collective at whose end the rank's part, which was ready before, could start; -1: none known."""
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
    """The group of these cycles, which have the same sequence of synchronisations; ``timelines``: what the devices compute."""
    bodies = np.array([cycle.body for cycle in cycles])
    on_device = all(window.on_device for window in windows)
    segments = Segments(_begin(cycles, matched), matched.arrival[bodies], matched.end[bodies], on_device)
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
        concurrent_compute=_within(computes, arrival, end),
        exposed=_exposed(computes, arrival, end),
        ready=ready,
        queued_after=queued_behind(arrival, end, ready) if on_device else None,
        idle_after=idle_after(windows, segments),
        on_device=on_device,
        dependency_probability=dependency_probability(timelines, arrival, end),
    )
    return replace(group, concurrent_compute_in_wait=_within(computes, arrival, group.released))


def _begin(cycles: Sequence[Cycle], matched: MatchedCollectives) -> Array:
    """[N, R] when each rank's cycle begins; the windows' clock begins at the first event of any rank."""
    ranks = np.arange(len(matched.windows))
    return np.array(
        [np.zeros(len(ranks)) if cycle.after is None else matched.end[cycle.after, ranks] for cycle in cycles]
    )


def _within(of_rank: Sequence[Intervals], left: Array, right: Array) -> Array:
    """[N, K, R] ns of each rank's intervals between two times [N, K, R]."""
    within = np.empty(left.shape)
    for r, own in enumerate(of_rank):
        within[:, :, r] = np.nan_to_num(covered(own, left[:, :, r], right[:, :, r]))
    return within


def rest_component(window: Window) -> Component:
    """Component of the time that no set of a window covers: the host's, if it was recorded at all."""
    return Component.HOST if window.shows_host else Component.IDLE


def work_between(sets: Mapping[str, Intervals], left: Array, right: Array, rest: Component) -> Array:
    """[..., C] ns per component between two times [...]; what no set covers is the ``rest``. Slightly negative where, by another rank's
    clock, a rank was woken after it arrived at the next point."""
    work = np.zeros((*left.shape, len(COMPONENTS)))
    for name, intervals in sets.items():
        work[..., INDEX[name]] = covered(intervals, left, right)
    work[..., INDEX[rest]] = (right - left) - work.sum(axis=-1)
    return work


def work_in(segments: Segments, of_ranks: Sequence[tuple[Mapping[str, Intervals], Component]]) -> Array:
    """[N, K, R, C] ns of each component in each segment, 0 where a rank takes no part in the synchronisation; ``of_ranks``: the sets of
    each rank, and the component of the rest of its time."""
    left, right = segments.left, segments.right
    work = np.empty((*right.shape, len(COMPONENTS)))
    for r, (sets, rest) in enumerate(of_ranks):
        work[:, :, r] = np.nan_to_num(work_between(sets, left[:, :, r], right[:, :, r], rest))
    return work


def _exposed(computes: Sequence[Intervals], arrival: Array, end: Array) -> Array:
    """[N, K] ns of each transfer that a faster link would save: the minimum over the ranks of the time without concurrent computation."""
    last, over = np.nanmax(arrival, axis=2), nan_median(end, axis=2)
    least: Array = np.clip(over - last, 0, None)
    for r, compute in enumerate(computes):
        alone = np.clip(over - last - covered(compute, last, np.maximum(over, last)), 0, None)
        least = np.where(np.isnan(arrival[:, :, r]), least, np.minimum(least, alone))
    return least


def _hidden(windows: Sequence[Window], segments: Segments, work: Array) -> Array:
    """[N, K, R, C] ns of computation, copies and late launches in the cycle outside the segments, by the collective that they overlap
    with. Where a rank is in several at once, their parts add up to the whole."""
    hidden = np.zeros(work.shape)
    for r, window in enumerate(windows):
        begin, arrival, end = segments.begin[:, r], segments.arrival[:, :, r], segments.end[:, :, r]
        last = np.nanmax(end, axis=1)
        for component in DEVICE_WORK:
            if component in window.sets:
                own = window.sets[component]
                c = INDEX[component]
                outside = np.nan_to_num(covered(own, begin, last)) - work[:, :, r, c].sum(axis=1)
                parts = np.nan_to_num(covered(own, arrival, end))
                share = np.clip(outside, 0, None) / np.maximum(parts.sum(axis=1), 1.0)
                hidden[:, :, r, c] = parts * share[:, None]
        late = covered(window.late_launches, arrival, end)
        hidden[:, :, r, INDEX[Component.LAUNCH]] = np.nan_to_num(late)
    return hidden


def _hidden_after_ready(windows: Sequence[Window], segments: Segments, ready: Array, hidden: Array) -> Array:
    """[N, K, R, C] ns of ``hidden`` after the rank was ready for its last collective of the cycle."""
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
    """[N, R, C] ns of each rank's device work after it was ready for the collective at whose end its cycle begins."""
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
    """Work of a window that can overlap with a collective, by component."""
    for component in DEVICE_WORK:
        if component in window.sets:
            yield component, window.sets[component]
    yield Component.LAUNCH, window.late_launches


def idle_after(windows: Sequence[Window], segments: Segments) -> dict[str, Array]:
    """[N, K, R] ns of each segment that are idle after each kind of host synchronisation."""
    idle: dict[str, Array] = {}
    left, right = segments.left, segments.right
    for r, window in enumerate(windows):
        for kind, intervals in window.idle_after.items():
            of_kind = idle.setdefault(kind, np.zeros(right.shape))
            of_kind[:, :, r] = np.nan_to_num(covered(intervals, left[:, :, r], right[:, :, r]))
    return idle
