"""Per-rank summaries and series over time, from the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.graph import CycleGroup, Graph, RankSteps, recorded_steps
from ddpdoctor.measure.numerics import Array, nan_median
from ddpdoctor.measure.summary import RankMemory, RankSummary, Series
from ddpdoctor.measure.taxonomy import PARTS, SyncKind

from .breakdown import rank_breakdown

_MOST_POINTS = 400
"""Of a series: about two pixels of the report's chart for each."""


def rank_summaries(
    graph: Graph, hosts: Sequence[str], devices: Sequence[str | None], memory: Mapping[int, RankMemory]
) -> list[RankSummary]:
    """One summary per rank."""
    if not graph.groups:
        return [
            RankSummary(
                rank=rank,
                host=host or None,
                device=device,
                step_ms=_mean_step_ms(steps),
                memory=memory.get(rank),
            )
            for rank, host, device, steps in zip(graph.ranks, hosts, devices, graph.steps, strict=True)
        ]
    parts = rank_breakdown(graph) / 1e6
    late, caused = lateness(graph)
    return [
        RankSummary(
            rank=rank,
            host=hosts[r] or None,
            device=devices[r],
            step_ms=float(parts[r].sum()),
            breakdown_ms={part: float(parts[r, i]) for i, part in enumerate(PARTS)},
            late_ms=float(late[r]) / 1e6,
            caused_wait_ms=float(caused[r]) / 1e6,
            memory=memory.get(rank),
        )
        for r, rank in enumerate(graph.ranks)
    ]


def _mean_step_ms(steps: RankSteps) -> float | None:
    return float((steps.end - steps.start).mean()) / 1e6 if len(steps.steps) else None


def behind(group: CycleGroup) -> Array:
    """[N, K, R] ns by which each rank arrives later than the median rank, of two than the other one; 0 where it is earlier. What
    it waited before for some of them only makes it no later itself."""
    own = group.arrival - _brought_along(group)
    return np.clip(own - typical_arrival(own), 0, None)


def typical_arrival(arrival: Array) -> Array:
    """[..., 1] when the median rank arrives, of arrivals [..., R] in which NaN takes no part; of two the first, for which the other
    one makes all of the wait."""
    of_two = (~np.isnan(arrival)).sum(axis=-1, keepdims=True) == 2
    middle = nan_median(arrival, axis=-1, keepdims=True)
    return np.where(of_two, np.nan_to_num(arrival, nan=np.inf).min(axis=-1, keepdims=True), middle)


def _brought_along(group: CycleGroup) -> Array:
    """[N, K, R] ns that a rank waited in a collective that not all members had part in, and behind which this one was queued:
    what is reduced within a host first waits there for the host's last rank."""
    brought = np.zeros(group.arrival.shape)
    if group.behind is None:
        return brought
    wait = group.wait
    for k, sync in enumerate(group.syncs):
        for j in np.unique(group.behind[:, k]):
            if j >= 0 and not set(sync.members) <= set(group.syncs[j].members):
                queued = group.behind[:, k] == j
                brought[:, k] = np.where(queued, wait[:, j] + brought[:, j], brought[:, k])
    return brought


def lateness(graph: Graph) -> tuple[Array, Array]:
    """[R] ns per cycle: lateness as of :func:`behind`, and the waiting that a rank causes to each other
    rank by being last."""
    world = len(graph.ranks)
    late, caused = np.zeros(world), np.zeros(world)
    for group in graph.groups:
        late += np.nansum(behind(group), axis=(0, 1))
        for k, sync in enumerate(group.syncs):
            members = np.array(sync.members)
            if len(members) < 2 or sync.kind == SyncKind.STEP_END:
                continue
            arrival = group.arrival[:, k, members]
            ordered = np.sort(arrival, axis=1)
            np.add.at(caused, members[arrival.argmax(axis=1)], ordered[:, -1] - ordered[:, -2])
    cycles = max(graph.cycles, 1)
    return late / cycles, caused / cycles


def _cycle_lateness(graph: Graph) -> tuple[NDArray[np.int64], Array]:
    """Step numbers [cycles] and [cycles, R] ns: the largest lateness of each rank in each cycle, in rising
    order of steps."""
    if not graph.groups:
        return np.empty(0, np.int64), np.empty((0, len(graph.ranks)))
    steps = np.concatenate([group.steps for group in graph.groups])
    values = [np.nan_to_num(np.nanmax(behind(group), axis=1)) for group in graph.groups]
    order = np.argsort(steps, kind="stable")
    return steps[order], np.concatenate(values)[order]


def series(graph: Graph) -> Series:
    """Step times and lateness over time, thinned to a few hundred points (means of neighbouring steps)."""
    numbers = sorted(recorded_steps(graph.steps))
    if not numbers:
        return Series()
    place = {number: i for i, number in enumerate(numbers)}
    stride = -(-len(numbers) // _MOST_POINTS)
    late_steps, late = _cycle_lateness(graph)
    known = [n for n, number in enumerate(late_steps.tolist()) if number in place]
    rows = [place[number] for number in late_steps[known].tolist()]
    step_ms, late_ms = [], []
    for r, steps in enumerate(graph.steps):
        times = np.full(len(numbers), np.nan)
        times[[place[number] for number in steps.steps.tolist()]] = (steps.end - steps.start) / 1e6
        step_ms.append(_thinned(times, stride))
        lates = np.full(len(numbers), np.nan)
        lates[rows] = late[known, r] / 1e6
        late_ms.append(_thinned(lates, stride))
    return Series(steps=numbers[::stride], ranks=list(graph.ranks), step_ms=step_ms, late_ms=late_ms)


def _thinned(values: Array, stride: int) -> list[float | None]:
    """Means of so many neighbours each; None where none of them is known."""
    padded = np.pad(values, (0, -len(values) % stride), constant_values=np.nan).reshape(-1, stride)
    known = (~np.isnan(padded)).sum(axis=1)
    means = np.nan_to_num(padded).sum(axis=1) / np.maximum(known, 1)
    return [
        round(mean, 4) if count else None for mean, count in zip(means.tolist(), known.tolist(), strict=True)
    ]
