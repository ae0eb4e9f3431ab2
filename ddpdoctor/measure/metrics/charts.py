"""Data for charts and tables of reports: per-rank summaries, series over time, a timeline of one typical step on the common clock, and
telemetry over time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from ddpdoctor.measure.graph import CycleGroup, Graph, recorded_steps
from ddpdoctor.measure.numerics import Array, Intervals, Ints, clip
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.summary import RankMemory, RankSummary, Series, Span, TelemetrySeries, Timeline
from ddpdoctor.measure.taxonomy import NO_WORK, PARTS, Component, Part, SyncKind, drawn_as
from ddpdoctor.measure.telemetry import HostTelemetry
from ddpdoctor.measure.window import Window

from .steps import rank_breakdown

_MOST_IN_SERIES = 400
"""Most points of a series: about two pixels of the report's chart each."""


def rank_summaries(
    graph: Graph, hosts: Sequence[str], devices: Sequence[str | None], memory: Mapping[int, RankMemory]
) -> list[RankSummary]:
    """Return one summary per rank."""
    if not graph.groups:
        return [
            RankSummary(
                rank=rank,
                host=host or None,
                device=device,
                step_ms=float((steps.end - steps.start).mean()) / 1e6 if len(steps.steps) else None,
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


def lateness(graph: Graph) -> tuple[Array, Array]:
    """Return, in ns per cycle, the lateness that each rank gains [R] (see :class:`.Lateness`), and the time by which it is the last to
    arrive [R], from the second-last arrival to its own."""
    world = len(graph.ranks)
    late, caused = np.zeros(world), np.zeros(world)
    for group in graph.groups:
        late += group.lateness.gained.sum(axis=(0, 1))
        for k, sync in enumerate(group.syncs):
            members = np.array(sync.members)
            if len(members) < 2 or sync.kind == SyncKind.STEP_END:
                continue
            arrival = group.arrival[:, k, members]
            ordered = np.sort(arrival, axis=1)
            np.add.at(caused, members[arrival.argmax(axis=1)], ordered[:, -1] - ordered[:, -2])
    cycles = max(graph.cycles, 1)
    return late / cycles, caused / cycles


def latest_ns(group: CycleGroup) -> Array:
    """Return [N, R] the largest lateness of each rank in its cycle, at least 0 (see :class:`.Lateness`)."""
    latest: Array = np.nan_to_num(group.lateness.signed).max(axis=1, initial=0.0)
    return latest


def series(graph: Graph) -> Series:
    """Return step times and lateness over time, thinned to a few hundred points (means of neighbouring steps)."""
    numbers = sorted(recorded_steps(graph.steps))
    if not numbers:
        return Series()
    place = {number: i for i, number in enumerate(numbers)}
    stride = -(-len(numbers) // _MOST_IN_SERIES)
    # Step number → [R] largest lateness of each rank in its cycle.
    late = {
        number: row
        for group in graph.groups
        for number, row in zip(group.steps.tolist(), latest_ns(group), strict=True)
        if number in place
    }
    rows = [place[number] for number in late]
    step_ms, late_ms = [], []
    for r, steps in enumerate(graph.steps):
        times = np.full(len(numbers), np.nan)
        times[[place[number] for number in steps.steps.tolist()]] = (steps.end - steps.start) / 1e6
        step_ms.append(_thinned(times, stride))
        lates = np.full(len(numbers), np.nan)
        lates[rows] = [of_ranks[r] / 1e6 for of_ranks in late.values()]
        late_ms.append(_thinned(lates, stride))
    return Series(steps=numbers[::stride], ranks=list(graph.ranks), step_ms=step_ms, late_ms=late_ms)


def _thinned(values: Array, stride: int) -> list[float | None]:
    """Means of ``stride`` neighbours each; None if none of them is known."""
    padded = np.pad(values, (0, -len(values) % stride), constant_values=np.nan).reshape(-1, stride)
    known = (~np.isnan(padded)).sum(axis=1)
    means = np.nan_to_num(padded).sum(axis=1) / np.maximum(known, 1)
    return [
        round(mean, 4) if count else None for mean, count in zip(means.tolist(), known.tolist(), strict=True)
    ]


class Tuning(msgspec.Struct, frozen=True):
    """Limits of a timeline."""

    most_ranks: int = 16
    """Most ranks, so that all fit on a screen."""
    first_ranks: int = 4
    """Number of first ranks that are always drawn; they are often on one host."""
    last_ranks: int = 2
    """Number of last ranks that are always drawn. The other ranks drawn are the latest."""
    most_spans: int = 1200
    """Number of longest spans that are drawn, to bound the size of the report."""
    shortest_share: float = 0.001
    """Shortest span that is drawn, as a share of the step: about one pixel."""


_TUNING = Tuning()


class _DrawnCycle(msgspec.Struct, frozen=True):
    """The cycle that is drawn: the n-th of the group, from the earliest begin to the latest end of any rank."""

    group: CycleGroup
    n: int
    origin: float
    end: float

    def span(self, rank: int, lane: str, kind: str, name: str, start: float, end: float) -> Span:
        """Return a bar, in ms since the cycle's begin."""
        start_ms, duration_ms = (start - self.origin) / 1e6, (end - start) / 1e6
        return Span(rank, lane, kind, name, round(start_ms, 4), round(duration_ms, 4))


def timeline(graph: Graph, logs: Sequence[RankLog], windows: Sequence[Window]) -> Timeline | None:
    """Return the most typical cycle of the largest group, with the most relevant ranks if there are many; None without cycles."""
    if not graph.groups:
        return None
    # Typical in its length and in the work of each rank: a cycle may have the usual length for an unusual reason.
    group = max(graph.groups, key=lambda group: len(group.steps))
    work = group.work.sum(axis=1)
    deviation = np.abs(work - np.median(work, axis=0)).sum(axis=2).max(axis=1)
    n = int((np.abs(group.duration - np.median(graph.lengths_ns)) + deviation).argmin())
    cycle = _DrawnCycle(group, n, float(np.nanmin(group.begin[n])), float(np.nanmax(group.end[n])))
    positions = _drawn_positions(cycle.group)
    of_logs = graph.source == "step-log"
    lane = "host" if of_logs else "compute"
    # Origin of the graph's clock.
    begins = (
        [log.start_ns for log in logs if log.steps] if of_logs else [window.span[0] for window in windows]
    )
    zero = min(begins)
    spans: list[Span] = []
    for position in positions:
        rank = graph.ranks[position]
        sets: Mapping[str, Intervals]
        if of_logs:
            sets = logs[position].activities.since(zero).sets
        else:
            own = windows[position].sets.items()
            sets = {name: (start - float(zero), end - float(zero)) for name, (start, end) in own}
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


def _drawn_positions(group: CycleGroup) -> list[int]:
    """Positions of the ranks that are drawn: all, or the first, the last, and those for which others wait longest."""
    world = group.arrival.shape[2]
    if world <= _TUNING.most_ranks:
        return list(range(world))
    late = np.nanmean(np.nanmax(group.wait, axis=2, keepdims=True) - group.wait, axis=(0, 1))
    fixed = {*range(_TUNING.first_ranks), *range(world - _TUNING.last_ranks, world)}
    others = [rank for rank in np.argsort(-late, kind="stable").tolist() if rank not in fixed]
    return sorted(fixed.union(others[: _TUNING.most_ranks - len(fixed)]))


def _work_spans(rank: int, lane: str, sets: Mapping[str, Intervals], cycle: _DrawnCycle) -> list[Span]:
    shortest = _TUNING.shortest_share * (cycle.end - cycle.origin)
    spans = []
    for name, intervals in sets.items():
        if name in NO_WORK:
            continue
        for start, end in zip(*clip(intervals, cycle.origin, cycle.end), strict=True):
            if end - start >= shortest:
                spans.append(
                    cycle.span(rank, lane, drawn_as(Component(name), cycle.group.on_device), name, start, end)
                )
    return spans


def _sync_spans(rank: int, position: int, cycle: _DrawnCycle) -> list[Span]:
    """The bars of a rank's collectives: waiting for others, then transfer."""
    group, n = cycle.group, cycle.n
    spans = []
    for k, sync in enumerate(group.syncs):
        arrival, end = float(group.arrival[n, k, position]), float(group.end[n, k, position])
        if np.isnan(arrival) or end <= arrival:
            continue
        released = float(group.released[n, k, position])
        for part, begin, stop in (
            (Part.COMM_WAIT, arrival, released),
            (Part.COMM_TRANSFER, released, end),
        ):
            part = Part.BARRIER if sync.kind == SyncKind.BARRIER else part
            if stop > begin:
                spans.append(cycle.span(rank, "communication", part, sync.name, begin, stop))
    return spans


_MOST_IN_CURVE = 300
"""Most points of a curve in a chart of the report."""
_HOST_FIELDS = (("cpu_percent", "%"), ("memory_used_bytes", "bytes"))
_GPU_FIELDS = (
    ("gpu_utilization_percent", "%"),
    ("memory_used_bytes", "bytes"),
    ("power_watts", "W"),
    ("sm_clock_mhz", "MHz"),
    ("temperature_celsius", "°C"),
)
_RANK_FIELDS = (("process_memory_bytes", "bytes"), ("children_memory_bytes", "bytes"))
"""Field of a sample, and its unit."""
_MOST_RANKS = 32
"""Largest number of ranks for which curves of ranks are drawn. With more, the chart is unreadable."""


class Reading(NamedTuple):
    """One column of a host's telemetry."""

    host: str
    source: str
    field: str
    unit: str
    times: Ints
    """Epoch ns, by the host's own clock."""
    values: Array


def readings(hosts: Mapping[str, HostTelemetry]) -> Iterator[Reading]:
    """Yield the telemetry of the hosts, their GPUs and ranks that is drawn, without empty columns."""
    with_ranks = sum(len(host.ranks) for host in hosts.values()) <= _MOST_RANKS
    for name, host in hosts.items():
        columns = [(name, field, unit, host.host_column(field)) for field, unit in _HOST_FIELDS]
        for index in (int(gpu["index"]) for gpu in host.gpus):
            source = f"{name} GPU {index}"
            columns += [(source, field, unit, host.gpu_column(index, field)) for field, unit in _GPU_FIELDS]
        for rank in host.ranks if with_ranks else ():
            source = f"{name} rank {rank}"
            columns += [(source, field, unit, host.rank_column(rank, field)) for field, unit in _RANK_FIELDS]
        for source, field, unit, (times, values) in columns:
            if len(values) and not np.isnan(values).all():
                yield Reading(name, source, field, unit, times, values)


def telemetry_series(hosts: Mapping[str, HostTelemetry], started_ns: int | None) -> list[TelemetrySeries]:
    """Return the thinned curves of :func:`readings`; times count from ``started_ns``, or else from when each host's telemetry started."""
    curves = []
    for reading in readings(hosts):
        origin_ns = started_ns or int(hosts[reading.host].header.get("started_ns") or 0)
        stride = -(-len(reading.values) // _MOST_IN_CURVE)
        times, values = reading.times[::stride].tolist(), reading.values[::stride].tolist()
        curves.append(
            TelemetrySeries(
                source=reading.source,
                field=reading.field,
                unit=reading.unit,
                t_s=[round((time - origin_ns) / 1e9, 3) for time in times],
                values=[None if value != value else round(value, 3) for value in values],
            )
        )
    return curves
