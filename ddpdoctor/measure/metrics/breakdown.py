"""Where the time of a step goes: per rank, and on the critical path. The parts do not overlap and add up to
the step."""

from __future__ import annotations

import numpy as np

from ddpdoctor.measure.graph import CycleGroup, Graph
from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.taxonomy import COMPONENTS, PART_OF, PARTS, SyncKind

_COLUMN: dict[str, int] = {name: i for i, name in enumerate(PARTS)}


def rank_breakdown(graph: Graph) -> Array:
    """[R, parts] ns: mean over the cycles. A rank's row adds up to its mean cycle."""
    if not graph.groups:
        return np.zeros((len(graph.ranks), len(PARTS)))
    means: Array = np.concatenate([cycle_breakdown(group) for group in graph.groups]).mean(axis=0)
    return means


def cycle_breakdown(group: CycleGroup) -> Array:
    """[N, R, parts] ns for each cycle of a group. Communication beside which the rank computes counts as computation."""
    cycles, _, world = group.arrival.shape
    result = np.zeros((cycles, world, len(PARTS)))
    for c, name in enumerate(COMPONENTS):
        # Collectives of several process groups run at the same time: a segment between two of them may have no length.
        result[:, :, _COLUMN[PART_OF[name]]] += np.nansum(np.clip(group.work[:, :, :, c], 0, None), axis=1)
    over = group.begin.copy()
    nothing = np.zeros_like(group.arrival)
    beside = nothing if group.beside is None else group.beside
    waiting = nothing if group.beside_wait is None else group.beside_wait
    for k, sync in enumerate(group.syncs):
        own = list(sync.members)
        arrival, end = group.arrival[:, k, own], group.end[:, k, own]
        together = np.clip(group.together(k), arrival, end)
        # What another collective covers already is counted there.
        new = 1.0 - np.clip((over[:, own] - arrival) / np.maximum(end - arrival, 1.0), 0.0, 1.0)
        over[:, own] = np.maximum(over[:, own], end)
        hidden = np.minimum(beside[:, k, own], end - arrival)
        in_wait = np.minimum(waiting[:, k, own], np.minimum(hidden, together - arrival))
        result[:, own, _COLUMN["compute"]] += new * hidden
        if sync.kind == SyncKind.BARRIER:
            result[:, own, _COLUMN["barrier"]] += new * (end - arrival - hidden)
            continue
        result[:, own, _COLUMN["comm_wait"]] += new * (together - arrival - in_wait)
        result[:, own, _COLUMN["comm_transfer"]] += new * (end - together - (hidden - in_wait))
    return result


def critical_breakdown(graph: Graph) -> dict[str, float]:
    """Shares of the critical path per part, summing to 1; {} without cycles.

    The path is followed backwards: from a synchronisation's end to its last arrival (transfer), along that
    rank's work to the end of the synchronisation before, and so on. Nobody waits on it. Transfer beside which that rank
    computes counts as computation: it costs nothing.
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
        part = "barrier" if sync.kind == SyncKind.BARRIER else "comm_transfer"
        spent = np.where(here, own_end - arrival, 0.0)
        beside = np.zeros(cycles) if group.beside is None else group.beside[rows, k, rank]
        hidden = np.clip(np.minimum(beside, spent), 0, None)
        total[_COLUMN["compute"]] += hidden.sum()
        total[_COLUMN[part]] += (spent - hidden).sum()
        for c, name in enumerate(COMPONENTS):
            total[_COLUMN[PART_OF[name]]] += np.where(here, group.work[rows, k, rank, c], 0.0).sum()
    return np.clip(total, 0, None)
