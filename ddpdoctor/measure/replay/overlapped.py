"""Replay a window with overlap: each rank's computation and its collectives run concurrently.

A bucket that is reduced during the backward pass ends earlier on a faster link, or without a straggler, but the next one is ready no
earlier: the backward pass has to reach it. For bucket *k* and rank *r*, with ``ready`` from the trace (the computation before it is
done, queued or not),

    lane[k, r]  = ready[k, r] + shift[r] - removed work of r since the computation last waited
    start[k, r] = max(lane[k, r], end[k - 1, r], end[j, r]), k - 1 being the one before in the same process group, and j
                  that of any group behind which it was queued (across hosts, say, what was reduced within each)
    end[k, r]   = max over members of start[k, r] + transfer[k] + lag[k, r]

and the computation moves, ``shift[r] = end[k, r] - measured end[k, r]``, where it waits: for the last bucket of a backward pass, for
every collective that is not DDP's, and where it was idle because of one (see ``graph.dependencies``: sharded parameters, tensor
parallelism in the backward pass). An uncertain dependency moves it by its probability. With nothing changed this gives the measured
times. The method is dPRO's (Hu et al., MLSys '22), reduced to a step of data parallel training.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddpdoctor.measure.graph import CycleGroup
from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.taxonomy import SyncKind


def waits_for_end(group: CycleGroup) -> Array:
    """[K, R] probability that the computation of a rank waits for the end of a collective: 1 for collectives that are not DDP's and for
    the last bucket of a backward pass, else as measured. 0 where the rank takes no part."""
    last_of = {
        (sync.micro, sync.group, sync.members): k
        for k, sync in enumerate(group.syncs)
        if sync.kind == SyncKind.GRADIENTS
    }
    waits = np.zeros(group.arrival.shape[1:])
    for k, sync in enumerate(group.syncs):
        is_last = last_of.get((sync.micro, sync.group, sync.members)) == k
        waits[k, list(sync.members)] = is_last or sync.kind != SyncKind.GRADIENTS
    if group.dependency_probability is not None:
        waits = np.maximum(waits, np.where(np.isnan(group.arrival[0]), 0.0, group.dependency_probability))
    return waits


def place_removed_work(group: CycleGroup, removed: Array) -> Array:
    """[N, K, R] ns: ``removed`` work, moved to the collectives for which it made the rank ready later.

    ``removed`` is measured by segments, which end when a rank's part of a collective starts. A rank whose part is queued after the late
    rank's has computed more by then, so the late rank's excess appears only after its last bucket. The time at which it was ready shows
    more: a rank that was ready L later than the others had done L of its excess by then, or all of it. No work is moved across a
    collective for which the computation waits, and none is added.
    """
    if group.ready is None or not removed.any():
        return removed
    late = np.nan_to_num(np.clip(group.ready - _middle(group.ready), 0, None))
    takes_part = ~np.isnan(group.ready)
    passed_on = 1.0 - waits_for_end(group)
    following = np.zeros_like(removed)
    for k in range(removed.shape[1] - 2, -1, -1):
        following[:, k] = passed_on[k] * (removed[:, k + 1] + following[:, k + 1])
    moved = np.zeros_like(removed)
    removed_so_far, placed_so_far = np.zeros_like(group.begin), np.zeros_like(group.begin)
    for k in range(removed.shape[1]):
        removed_so_far = removed_so_far + removed[:, k]
        whole = removed_so_far + following[:, k]
        excess = np.clip(whole - _middle(whole), 0, None)
        least = np.where(takes_part[:, k], np.minimum(late[:, k], excess), 0.0)
        now = np.minimum(np.maximum(np.maximum(removed_so_far, placed_so_far), least), whole)
        moved[:, k] = now - placed_so_far
        removed_so_far, placed_so_far = passed_on[k] * removed_so_far, passed_on[k] * now
    return moved


def _middle(values: Array) -> Array:
    """Lower median over the last axis, which is kept."""
    known = np.maximum((~np.isnan(values)).sum(axis=-1, keepdims=True), 1)
    middle: Array = np.take_along_axis(np.sort(values, axis=-1), (known - 1) // 2, axis=-1)
    return middle


def length_ns(
    group: CycleGroup, removed: Array, transfer: Array, synchronises: Sequence[bool], issue_time_saved: Array
) -> Array:
    """[N] ns: the length of each cycle by the formula of the module, at least the time in which the slowest host issues it. The
    arguments are those of a :class:`.replay.Scenario`, ``removed`` after :func:`place_removed_work`."""
    free: dict[tuple[str, tuple[int, ...]], Array] = {}
    ends: list[Array] = []
    shift, left_out, over = np.zeros_like(group.begin), np.zeros_like(group.begin), group.begin.copy()
    ready = group.arrival if group.ready is None else group.ready
    for k, (sync, waits) in enumerate(zip(group.syncs, waits_for_end(group), strict=True)):
        own = list(sync.members)
        left_out[:, own] += removed[:, k, own]
        lane = np.maximum(ready[:, k, own] + shift[:, own] - left_out[:, own], group.begin[:, own])
        if synchronises[k]:
            # Each process group has its own stream, which may wait for that of another.
            busy = free.get((sync.group, sync.members), group.begin[:, own])
            start = np.maximum(np.maximum(lane, busy), _queue_released_at(group, k, ends)[:, own])
            goes_on = start.max(axis=1)[:, None] + transfer[:, k, None] + group.exit_skew[:, k, own]
            free[sync.group, sync.members] = goes_on
            over[:, own] = np.maximum(over[:, own], goes_on)
        else:
            goes_on = lane if group.concurrent_compute is None else lane + group.concurrent_compute[:, k, own]
        ends.append(np.full_like(over, -np.inf))
        ends[k][:, own] = goes_on
        shift[:, own] += waits[own] * (goes_on - group.end[:, k, own] - shift[:, own])
        left_out[:, own] *= 1.0 - waits[own]
    length: Array = np.nanmax(over, axis=1) - np.nanmax(group.begin, axis=1)
    least = 0.0 if group.issue_time_ns is None else (group.issue_time_ns - issue_time_saved).max(axis=1)
    return np.maximum(length, least)


def _queue_released_at(group: CycleGroup, k: int, ends: Sequence[Array]) -> Array:
    """[N, R] ns when the collectives end after which the parts of collective ``k`` were queued, by the replayed ``ends``; -inf where
    there are none."""
    after: Array = np.full(group.begin.shape, -np.inf)
    if group.queued_after is None:
        return after
    for number in np.unique(group.queued_after[:, k]):
        if 0 <= number < k:
            queued = group.arrival[:, k] - group.end[:, number]
            after = np.where(group.queued_after[:, k] == number, ends[number] + queued, after)
    return after
