"""Replaying a window: the computation of each rank in one lane, its collectives in another.

A bucket that is reduced beside the backward pass ends earlier on a faster link, or when a straggler is late no
more, but the next one is ready no earlier: the backward pass has to get there. For bucket *k* and rank *r*, with
``ready`` from the trace (the computation before it is done, whether or not it was then queued),

    lane[k, r]  = ready[k, r] + shift[r] - removed work of r since the computation last waited
    start[k, r] = max(lane[k, r], end[k - 1, r], end[j, r]), k - 1 being the one before in the same process group, and j
                  that of any group behind which it was queued (across hosts, say, what was reduced within each)
    end[k, r]   = max over members of start[k, r] + transfer[k] + lag[k, r]

and the computation moves, ``shift[r] = end[k, r] - measured end[k, r]``, where it waits: for the last bucket of a
backward pass, for every collective that is not DDP's, and where it was seen to stand still for one (see ``graph.dependencies``:
sharded parameters, tensor parallelism in the backward pass); where that is not sure, by as much of it as it is likely. With
nothing changed this gives back the measured times. It is the view of dPRO (Hu et al., MLSys '22), cut down to what a step of
data parallel training needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.graph import CycleGroup
from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.taxonomy import SyncKind


class Transmission(msgspec.Struct, frozen=True):
    """One collective of a cycle in the lane of communication; axes as in :class:`CycleGroup`, members only."""

    members: list[int]
    gradients: bool
    ready: Array
    """[N, M] ns"""
    transfer: Array
    """[N] ns"""
    lag: Array
    """[N, M] ns"""
    end: Array
    """[N, M] ns, measured"""
    beside: Array
    """[N, M] ns of computation beside it"""
    holds: bool
    """The computation waits for its end by what it is for: it is not DDP's, or the last bucket of a backward pass."""
    dependent: Array
    """[M] from 0 to 1: how sure it is that the computation was seen to wait for its end."""
    message_bytes: Array
    """[N]"""
    number: int
    """Its place in the cycle's sequence."""
    behind: NDArray[np.int64]
    """[N, M] number of the one behind which the member's part was queued, -1: none."""
    queued: Array
    """[N, M] ns from the end of that one to the arrival."""
    run: tuple[int, str, tuple[int, ...]]
    """Buckets of the same backward pass and process group have this in common."""
    removed: Array | float = 0.0
    """[N, M] ns of work before it that is taken out."""
    synchronises: bool = True
    """False where the collective is taken out."""


def transmissions_of(group: CycleGroup) -> list[Transmission]:
    """The collectives of the group's cycles as measured, in order."""
    none = np.zeros(group.arrival.shape[2])
    runs = [(sync.micro, sync.group, sync.members) for sync in group.syncs]
    gradients = [sync.kind == SyncKind.GRADIENTS for sync in group.syncs]
    ready = group.arrival if group.ready is None else group.ready
    transfer, lag = group.transfer, group.lag
    beside = np.zeros_like(ready) if group.beside is None else group.beside
    behind = np.full(ready.shape, -1) if group.behind is None else group.behind
    queued = group.arrival - np.take_along_axis(group.end, np.maximum(behind, 0), axis=1)
    last_of = {run: k for k, run in enumerate(runs) if gradients[k]}
    transmissions = []
    for k, sync in enumerate(group.syncs):
        members = list(sync.members)
        transmissions.append(
            Transmission(
                members=members,
                gradients=gradients[k],
                ready=ready[:, k, members],
                transfer=transfer[:, k],
                lag=lag[:, k, members],
                end=group.end[:, k, members],
                beside=beside[:, k, members],
                holds=not gradients[k] or last_of[runs[k]] == k,
                dependent=none[members] if group.dependent is None else group.dependent[k, members],
                message_bytes=group.message_bytes[:, k],
                number=k,
                behind=behind[:, k, members],
                queued=queued[:, k, members],
                run=runs[k],
            )
        )
    return transmissions


def when_ready(group: CycleGroup, transmissions: Sequence[Transmission], removed: Array) -> Array:
    """[N, K, R] ns: ``removed`` work at the collectives for which it made the rank ready later.

    What is removed is told by segments, which end when a rank's part of a collective starts. Others, whose part waits in the
    queue for that of the late rank before it, have computed more by then, so that the late rank's work seems to exceed theirs
    only behind its last bucket. When it was ready tells more: a rank that was ready L later than the others had done L of its
    excess by then, or all of it. Nothing is moved beyond a collective for which the computation waits, and nothing added.
    """
    if group.ready is None or not removed.any():
        return removed
    late = np.nan_to_num(np.clip(group.ready - _middle(group.ready), 0, None))
    takes_part = ~np.isnan(group.ready)
    passing = np.ones(removed.shape[1:])
    for k, transmission in enumerate(transmissions):
        passing[k, transmission.members] = 0.0 if transmission.holds else 1.0 - transmission.dependent
    following = np.zeros_like(removed)
    for k in range(removed.shape[1] - 2, -1, -1):
        following[:, k] = passing[k] * (removed[:, k + 1] + following[:, k + 1])
    moved = np.zeros_like(removed)
    told, placed = np.zeros_like(group.begin), np.zeros_like(group.begin)
    for k in range(removed.shape[1]):
        told = told + removed[:, k]
        whole = told + following[:, k]
        excess = np.clip(whole - _middle(whole), 0, None)
        least = np.where(takes_part[:, k], np.minimum(late[:, k], excess), 0.0)
        now = np.minimum(np.maximum(np.maximum(told, placed), least), whole)
        moved[:, k] = now - placed
        told, placed = passing[k] * told, passing[k] * now
    return moved


def _middle(values: Array) -> Array:
    """The (lower) median rank's, over the last axis, which stays."""
    known = np.maximum((~np.isnan(values)).sum(axis=-1, keepdims=True), 1)
    middle: Array = np.take_along_axis(np.sort(values, axis=-1), (known - 1) // 2, axis=-1)
    return middle


def length_ns(group: CycleGroup, transmissions: Sequence[Transmission], relief: Array | float = 0.0) -> Array:
    """[N] ns: the length of each cycle with these collectives, by the formula of the module, but no less than the slowest
    host needs to issue it. ``relief`` [N, R] ns of that need are taken out."""
    free: dict[tuple[str, tuple[int, ...]], Array] = {}
    ends: dict[int, Array] = {}
    shift, removed, over = np.zeros_like(group.begin), np.zeros_like(group.begin), group.begin.copy()
    for transmission in transmissions:
        own = transmission.members
        removed[:, own] += transmission.removed
        lane = np.maximum(transmission.ready + shift[:, own] - removed[:, own], group.begin[:, own])
        if transmission.synchronises:
            # Each process group has a stream of its own, which may wait for that of another.
            busy = free.get(transmission.run[1:], group.begin[:, own])
            start = np.maximum(np.maximum(lane, busy), _after_queue(transmission, ends))
            goes_on = start.max(axis=1)[:, None] + transmission.transfer[:, None] + transmission.lag
            free[transmission.run[1:]] = goes_on
            over[:, own] = np.maximum(over[:, own], goes_on)
        else:
            goes_on = lane + transmission.beside
        ends[transmission.number] = np.full_like(over, -np.inf)
        ends[transmission.number][:, own] = goes_on
        held = np.maximum(transmission.dependent, transmission.holds)
        shift[:, own] += held * (goes_on - transmission.end - shift[:, own])
        removed[:, own] *= 1.0 - held
    length: Array = np.nanmax(over, axis=1) - np.nanmax(group.begin, axis=1)
    return (
        length
        if group.issue_time_ns is None
        else np.maximum(length, (group.issue_time_ns - relief).max(axis=1))
    )


def _after_queue(transmission: Transmission, ends: Mapping[int, Array]) -> Array:
    """[N, M] ns when those before it are over, by number, behind which its parts were queued; -inf where there are none."""
    own, behind = transmission.members, transmission.behind
    after = np.full(behind.shape, -np.inf)
    for number in np.unique(behind):
        if number in ends:
            after = np.where(behind == number, ends[number][:, own] + transmission.queued, after)
    return after
