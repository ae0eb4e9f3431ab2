"""One rank that keeps the others waiting in windows too short to show why."""

from __future__ import annotations

import msgspec
import numpy as np

from ddpdoctor.measure.graph import CycleGroup, Graph
from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.taxonomy import INDEX, Component, SyncKind

from .attribution import Attribution


class UnseenTuning(msgspec.Struct, frozen=True):
    """From where on a rank is late though nobody saw with what."""

    step_share: float = 0.05
    """Share of the step that it must keep the others waiting: what rules warn of."""
    mostly: float = 0.5
    """Part of all waiting that it must cause, and of its own that must be left unexplained: more than half has one cause."""


UNSEEN = UnseenTuning()


def unseen(graph: Graph, attribution: Attribution) -> list[Array] | None:
    """[N, K, R] ns per group: waiting for the one rank that causes most of it, in windows that do not show what it did before.

    None where the cycles begin with all ranks together, where no single rank causes half of all waiting, or where what the
    rank was seen to do longer explains half of what it causes.
    """
    if len(graph.ranks) < 2 or not _begins_unseen(graph):
        return None
    waits = [_caused_ns(group) for group in graph.groups]
    caused_ns = sum((wait.sum(axis=(0, 1)) for wait in waits), np.zeros(len(graph.ranks)))
    leader = int(caused_ns.argmax())
    step_ns = float(np.median(np.concatenate([group.duration for group in graph.groups])))
    least_ns = max(UNSEEN.step_share * step_ns * graph.cycles, UNSEEN.mostly * float(caused_ns.sum()))
    explained_ns = sum(float(excess[:, :, leader].sum()) for excess in attribution.excess)
    if caused_ns[leader] < least_ns or explained_ns >= UNSEEN.mostly * float(caused_ns[leader]):
        return None
    return [
        _left_unexplained(wait, excess, leader)
        for wait, excess in zip(waits, attribution.excess, strict=True)
    ]


def _begins_unseen(graph: Graph) -> bool:
    """Whether a cycle begins before a rank's own window does."""
    column = INDEX[Component.UNSEEN]
    return any(bool(group.work[..., column].any()) for group in graph.groups)


def _caused_ns(group: CycleGroup) -> Array:
    """[N, K, R] ns by which a rank was the last to arrive, ahead of the second last, without what that one computed meanwhile."""
    caused = np.zeros(group.arrival.shape)
    cycles = np.arange(len(group.steps))
    for k, sync in enumerate(group.syncs):
        if len(sync.members) < 2 or sync.kind == SyncKind.STEP_END or sync.root is not None:
            continue
        members = np.array(sync.members)
        arrival = group.arrival[:, k, members]
        order = np.argsort(arrival, axis=1)
        last, second = members[order[:, -1]], members[order[:, -2]]
        waited = group.arrival[cycles, k, last] - group.arrival[cycles, k, second]
        computed = 0.0 if group.beside_wait is None else group.beside_wait[cycles, k, second]
        caused[cycles, k, last] = np.clip(waited - computed, 0.0, None)
    return caused


def _left_unexplained(wait: Array, excess: Array, rank: int) -> Array:
    """[N, K, R] ns: the ``wait`` that one rank causes, but for what it was seen to do longer, which has its own price."""
    explained = excess[:, :, rank].sum(axis=(1, 2))[:, None]
    whole = wait[:, :, rank].sum(axis=1, keepdims=True)
    left = np.zeros_like(wait)
    left[:, :, rank] = wait[:, :, rank] * np.clip(1.0 - explained / np.maximum(whole, 1.0), 0.0, 1.0)
    return left
