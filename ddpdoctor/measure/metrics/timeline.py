"""One typical step over all ranks, as bars on the common clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.graph import CycleGroup, Graph
from ddpdoctor.measure.numerics import Intervals, clip
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.summary import Span, Timeline
from ddpdoctor.measure.taxonomy import DRAWN_AS, NO_WORK, Component, Part, SyncKind
from ddpdoctor.measure.window import Window


class Tuning(msgspec.Struct, frozen=True):
    """How much of a step is drawn."""

    most_ranks: int = 16
    """Lanes that fit on a screen one above the other."""
    first_ranks: int = 4
    """Drawn in any case where there are more ranks: the first ones, often of one host."""
    last_ranks: int = 2
    """Drawn in any case; the other places are the stragglers'."""
    most_spans: int = 1200
    """The longest ones: what a browser draws at once, and keeps the report small."""
    shortest_share: float = 0.001
    """Of the step: about one pixel."""


_TUNING = Tuning()


class _Cycle(msgspec.Struct, frozen=True):
    """The cycle that is drawn."""

    group: CycleGroup
    n: int
    """Its place in the group."""
    origin: float
    """When the first rank begins."""
    end: float
    """When the last rank is through."""


def timeline(graph: Graph, logs: Sequence[RankLog], windows: Sequence[Window]) -> Timeline | None:
    """The cycle that is nearest to the median, with the ranks that matter most where there are many."""
    if not graph.groups:
        return None
    cycle = _typical(graph)
    positions = _positions(cycle.group)
    lane = "host" if graph.source == "step-log" else "compute"
    spans: list[Span] = []
    for position in positions:
        rank = graph.ranks[position]
        sets = _sets(graph, position, logs, windows)
        spans += _work_spans(rank, lane, sets, cycle)
        spans += _sync_spans(rank, position, cycle)
    spans.sort(key=lambda span: -span.duration_ms)
    all_shown = len(positions) == len(graph.ranks)
    shown = f"{len(positions)} of {len(graph.ranks)} ranks shown: first, last and latest."
    return Timeline(
        step=int(cycle.group.steps[cycle.n]),
        spans=spans[: _TUNING.most_spans],
        note="" if all_shown else shown,
    )


def _typical(graph: Graph) -> _Cycle:
    """Of the largest group, the cycle that is nearest to the median of all: in its length, and in what each rank does in it. One that
    only takes as long as usual may do so for another reason than usual."""
    lengths = np.concatenate([group.duration for group in graph.groups])
    group = max(graph.groups, key=lambda group: len(group.steps))
    work = group.work.sum(axis=1)
    unlike = np.abs(work - np.median(work, axis=0)).sum(axis=2).max(axis=1)
    n = int((np.abs(group.duration - np.median(lengths)) + unlike).argmin())
    return _Cycle(group, n, float(np.nanmin(group.begin[n])), float(np.nanmax(group.end[n])))


def _positions(group: CycleGroup) -> list[int]:
    """The ranks that are drawn: all, or the first, the last, and those for which others wait longest."""
    world = group.arrival.shape[2]
    if world <= _TUNING.most_ranks:
        return list(range(world))
    late = np.nanmean(np.nanmax(group.wait, axis=2, keepdims=True) - group.wait, axis=(0, 1))
    fixed = {*range(_TUNING.first_ranks), *range(world - _TUNING.last_ranks, world)}
    stragglers = np.argsort(-late)[: _TUNING.most_ranks - len(fixed)]
    return sorted(fixed.union(stragglers.tolist()))


def _sets(
    graph: Graph, position: int, logs: Sequence[RankLog], windows: Sequence[Window]
) -> Mapping[str, Intervals]:
    """What a rank did, by components, on the clock of the graph."""
    if graph.source == "step-log":
        start = min(log.start_ns for log in logs if log.steps)
        return logs[position].activities.since(start).sets
    zero = float(min(window.span[0] for window in windows))
    return {name: (start - zero, end - zero) for name, (start, end) in windows[position].sets.items()}


def _work_spans(rank: int, lane: str, sets: Mapping[str, Intervals], cycle: _Cycle) -> list[Span]:
    """Bars of a rank's work, the shortest left out."""
    shortest = _TUNING.shortest_share * (cycle.end - cycle.origin)
    spans = []
    for name, intervals in sets.items():
        if name in NO_WORK:
            continue
        starts, ends = clip(intervals, cycle.origin, cycle.end)
        for start, end in zip(starts, ends, strict=True):
            if end - start >= shortest:
                spans.append(_span(rank, lane, DRAWN_AS[Component(name)], name, cycle, start, end))
    return spans


def _sync_spans(rank: int, position: int, cycle: _Cycle) -> list[Span]:
    """Bars of a rank's collectives: waiting for others, then transfer."""
    group, n = cycle.group, cycle.n
    spans = []
    for k, sync in enumerate(group.syncs):
        arrival, end = float(group.arrival[n, k, position]), float(group.end[n, k, position])
        if np.isnan(arrival) or end <= arrival:
            continue
        released = float(group.released[n, k, position])
        wait, transfer = Part.COMM_WAIT, Part.COMM_TRANSFER
        if sync.kind == SyncKind.BARRIER:
            wait = transfer = Part.BARRIER
        for part, begin, stop in ((wait, arrival, released), (transfer, released, end)):
            if stop > begin:
                spans.append(_span(rank, "communication", part, sync.name, cycle, begin, stop))
    return spans


def _span(rank: int, lane: str, kind: str, name: str, cycle: _Cycle, start: float, end: float) -> Span:
    """A bar in ms from the cycle's beginning."""
    start_ms, duration_ms = (start - cycle.origin) / 1e6, (end - start) / 1e6
    return Span(rank, lane, kind, name, round(start_ms, 4), round(duration_ms, 4))
