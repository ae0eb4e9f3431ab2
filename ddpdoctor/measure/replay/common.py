"""What all ranks have in common: work, and the idle time of devices whose hosts have waited for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddpdoctor.measure.graph import Graph, LikeSegments
from ddpdoctor.measure.numerics import Array

from .replay import Change, without_sync, without_work


def common_part(work: Array, alone: Array, like: LikeSegments | None = None) -> Array:
    """[N, K, R] ns that the ranks have in common: of each, no more than the (lower) median rank has in the same segment, or in
    those that are ``like`` it.

    ``alone`` is the same work as each rank would have it by itself, see :attr:`CycleGroup.work_alone`.
    """
    parts = np.clip(alone if like is None else like.by_part(alone), 0, None)
    middle = np.sort(parts, axis=2)[:, :, (alone.shape[2] - 1) // 2, None]
    most = middle if like is None else like.by_segment(np.broadcast_to(middle, parts.shape))
    common: Array = np.minimum(np.clip(work, 0, None), most)
    return common


def idle_after(graph: Graph, kinds: Sequence[str]) -> list[Array]:
    """[N, K, R] ns, group by group: what is common to the ranks of the idle time after these kinds of waiting."""
    return [
        sum(
            (common_part(idle, idle, group.like) for kind, idle in group.idle_after.items() if kind in kinds),
            np.zeros(group.arrival.shape),
        )
        for group in graph.groups
    ]


def without_waiting(graph: Graph, kinds: Sequence[str]) -> list[Change]:
    """Takes out synchronisations of these kinds, and the idle time that the hosts' waiting there leads to."""
    return [
        without_sync(lambda group, k: group.syncs[k].kind in kinds),
        without_work(idle_after(graph, kinds)),
    ]
