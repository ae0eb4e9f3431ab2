"""One typical step over all ranks, as bars on the common clock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddpdoctor.measure.graph import CycleGroup, Graph
from ddpdoctor.measure.numerics import Intervals, clip
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.summary import Span, Timeline
from ddpdoctor.measure.taxonomy import DRAWN_AS, Component, SyncKind
from ddpdoctor.measure.window import Window

_MOST_RANKS = 16
_MOST_SPANS = 1200
_SHORTEST_SHARE = 0.001


def timeline(graph: Graph, logs: Sequence[RankLog], windows: Sequence[Window]) -> Timeline | None:
    """The cycle whose length is nearest to the median, with the ranks that matter most where there are
    many."""
    if not graph.groups:
        return None
    group, n = _typical(graph)
    positions = _positions(group)
    origin, end = float(np.nanmin(group.begin[n])), float(np.nanmax(group.end[n]))
    spans: list[Span] = []
    for position in positions:
        sets, zero = _sets(graph, position, logs, windows)
        rank = graph.ranks[position]
        lane = "host" if graph.source == "step-log" else "compute"
        spans += _work_spans(rank, lane, sets, zero, origin, end)
        spans += _sync_spans(rank, position, group, n, origin)
    spans.sort(key=lambda span: -span.duration_ms)
    note = (
        ""
        if len(positions) == len(graph.ranks)
        else f"{len(positions)} of {len(graph.ranks)} ranks shown: first, last and latest."
    )
    return Timeline(step=int(group.steps[n]), spans=spans[:_MOST_SPANS], note=note)


def _typical(graph: Graph) -> tuple[CycleGroup, int]:
    every = np.concatenate([group.duration for group in graph.groups])
    group = max(graph.groups, key=lambda g: len(g.steps))
    return group, int(np.abs(group.duration - np.median(every)).argmin())


def _positions(group: CycleGroup) -> list[int]:
    world = group.arrival.shape[2]
    if world <= _MOST_RANKS:
        return list(range(world))
    late = np.nanmean(np.nanmax(group.wait, axis=2, keepdims=True) - group.wait, axis=(0, 1))
    chosen = (
        set(range(4)) | set(range(world - 2, world)) | {int(r) for r in np.argsort(-late)[: _MOST_RANKS - 6]}
    )
    return sorted(chosen)


def _sets(
    graph: Graph, position: int, logs: Sequence[RankLog], windows: Sequence[Window]
) -> tuple[dict[str, Intervals], float]:
    if graph.source == "step-log":
        start = min(log.start_ns for log in logs if log.steps)
        return logs[position].activities.since(start).sets, 0.0
    return windows[position].sets, float(min(w.span[0] for w in windows))


def _work_spans(
    rank: int, lane: str, sets: dict[str, Intervals], zero: float, origin: float, end: float
) -> list[Span]:
    spans = []
    for name, intervals in sets.items():
        if name in ("unmatched", "unseen"):
            continue
        starts, ends = clip((intervals[0] - zero, intervals[1] - zero), origin, end)
        for a, b in zip(starts, ends, strict=True):
            if b - a >= _SHORTEST_SHARE * (end - origin):
                spans.append(
                    Span(
                        rank,
                        lane,
                        DRAWN_AS[Component(name)],
                        name,
                        round((a - origin) / 1e6, 4),
                        round((b - a) / 1e6, 4),
                    )
                )
    return spans


def _sync_spans(rank: int, position: int, group: CycleGroup, n: int, origin: float) -> list[Span]:
    spans = []
    for k, sync in enumerate(group.syncs):
        arrival, end = float(group.arrival[n, k, position]), float(group.end[n, k, position])
        if np.isnan(arrival) or end <= arrival:
            continue
        together = min(max(float(group.last_arrival[n, k]), arrival), end)
        wait, rest = (
            ("barrier", "barrier") if sync.kind == SyncKind.BARRIER else ("comm_wait", "comm_transfer")
        )
        for kind, a, b in ((wait, arrival, together), (rest, together, end)):
            if b > a:
                spans.append(
                    Span(
                        rank,
                        "communication",
                        kind,
                        sync.name,
                        round((a - origin) / 1e6, 4),
                        round((b - a) / 1e6, 4),
                    )
                )
    return spans
