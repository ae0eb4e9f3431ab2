"""Where the time of a step goes: per rank, and on the critical path. The parts do not overlap and add up to
the step."""

from __future__ import annotations

import numpy as np

from .graph import BARRIER, COMPONENTS, Array, CycleGroup, Graph

PART_OF = {
    "data": "data_wait",
    "epoch_start": "data_wait",
    "copy": "h2d",
    "forward": "compute",
    "backward": "compute",
    "optimizer": "compute",
    "collection": "other",
    "checkpoint": "checkpoint",
    "device_sync": "host",
    "launch": "host",
    "host": "host",
    "unmatched": "comm_transfer",
    "unseen": "other",
}
"""Component of the work → part of the breakdown."""

PARTS = (
    "data_wait",
    "h2d",
    "compute",
    "comm_wait",
    "comm_transfer",
    "barrier",
    "host",
    "checkpoint",
    "other",
)
_COLUMN = {name: i for i, name in enumerate(PARTS)}


def rank_breakdown(graph: Graph) -> Array:
    """[R, parts] ns: mean over the cycles. A rank's row adds up to its mean cycle."""
    if not graph.groups:
        return np.zeros((len(graph.ranks), len(PARTS)))
    means: Array = np.concatenate([cycle_breakdown(group) for group in graph.groups]).mean(axis=0)
    return means


def cycle_breakdown(group: CycleGroup) -> Array:
    """[N, R, parts] ns for each cycle of a group."""
    cycles, _, world = group.arrival.shape
    result = np.zeros((cycles, world, len(PARTS)))
    for c, name in enumerate(COMPONENTS):
        result[:, :, _COLUMN[PART_OF[name]]] += np.nansum(group.work[:, :, :, c], axis=1)
    for k, sync in enumerate(group.syncs):
        members = list(sync.members)
        arrival, end = group.arrival[:, k, members], group.end[:, k, members]
        if sync.kind == BARRIER:
            result[:, members, _COLUMN["barrier"]] += end - arrival
            continue
        together = np.clip(group.together(k), arrival, end)
        result[:, members, _COLUMN["comm_wait"]] += together - arrival
        result[:, members, _COLUMN["comm_transfer"]] += end - together
    return result


def critical_breakdown(graph: Graph) -> dict[str, float]:
    """Shares of the critical path per part, summing to 1; {} without cycles.

    The path is followed backwards: from a synchronisation's end to its last arrival (transfer), along that
    rank's work to the end of the synchronisation before, and so on. Nobody waits on it.
    """
    total = np.zeros(len(PARTS))
    for group in graph.groups:
        total += _critical(group)
    whole = float(total.sum())
    return {part: float(total[i]) / whole for i, part in enumerate(PARTS)} if whole > 0 else {}


def _critical(group: CycleGroup) -> Array:
    """[parts] ns summed over the cycles of one group."""
    cycles, count, _ = group.arrival.shape
    rows = np.arange(cycles)
    total = np.zeros(len(PARTS))
    rank = np.nanargmax(np.nanmax(group.end, axis=1), axis=1)
    for k in range(count - 1, -1, -1):
        sync = group.syncs[k]
        here = np.isin(rank, sync.members)
        if not here.any():
            continue
        own_arrival, own_end = group.arrival[rows, k, rank], group.end[rows, k, rank]
        latest = np.nanargmax(np.nan_to_num(group.arrival[:, k], nan=-np.inf), axis=1)
        if sync.root is not None:
            members = list(sync.members)
            waits_for_all = own_end >= np.nanmax(group.arrival[:, k, members], axis=1)
            root_late = group.arrival[:, k, sync.root] > own_arrival
            latest = np.where(waits_for_all, latest, np.where(root_late, sync.root, rank))
        elif sync.kind == "step end":
            latest = rank
        rank = np.where(here, latest, rank)
        arrival = group.arrival[rows, k, rank]
        part = "barrier" if sync.kind == BARRIER else "comm_transfer"
        total[_COLUMN[part]] += np.where(here, own_end - arrival, 0.0).sum()
        for c, name in enumerate(COMPONENTS):
            total[_COLUMN[PART_OF[name]]] += np.where(here, group.work[rows, k, rank, c], 0.0).sum()
    return np.clip(total, 0, None)
