"""Facts about collectives: waiting and transfer, overlap, bytes, bandwidth, slow links.

Bandwidth is that of the transfer alone, by the formulas of nccl-tests.

Algorithm bandwidth is size / time. Bus bandwidth multiplies it by a factor that makes it comparable over
operations and rank counts (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): allreduce 2
(n - 1) / n, allgather, reduce-scatter and alltoall (n - 1) / n, broadcast and reduce 1. Waiting for the last
rank is no transfer and does not count. GB are 10^9 bytes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.facts import CommunicationFacts
from ddpdoctor.measure.graph import Graph
from ddpdoctor.measure.numerics import Array, Intervals, clip, intersect, nan_median, subtract, total, union
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.summary import BandwidthPoint
from ddpdoctor.measure.taxonomy import SyncKind
from ddpdoctor.measure.window import UNKNOWN_STEP, Window, step_of_collectives
from ddpdoctor.trace import classify

from .breakdown import splits
from .links import slow_link_ranks

_TRANSFERRING = (SyncKind.GRADIENTS, SyncKind.COLLECTIVE, SyncKind.BROADCAST, SyncKind.MODEL)
"""Synchronisations that send bytes; barriers are a separate part of the breakdown."""
_SHARDED = ("allgather", "reducescatter")
"""Operations with which sharded parameters and gradients are sent (FSDP, ZeRO)."""


def communication_facts(
    graph: Graph,
    window_graph: Graph | None,
    logs: Sequence[RankLog],
    windows: Sequence[Window],
    latency_us: float | None,
) -> CommunicationFacts:
    """Waiting and transfer in ``graph``, the primary one, and what only a window shows.

    Single collectives, their bytes and their bandwidth come from the window. Where the step logs are primary, wait and transfer over
    the whole run come from them. ``latency_us`` is the result of :func:`message_cost`.
    """
    shown = graph if window_graph is None else window_graph
    logs_speak = graph is not window_graph and graph.matched > 0
    matched = graph if logs_speak else shown
    wait_ms, exposed_ms, _ = wait_and_transfer_ms(matched)
    total_ms = wait_and_transfer_ms(shown)[2]
    # If the window's total transfer is below the run's exposed transfer, it does not show how much is hidden.
    tells = not (logs_speak and total_ms is not None and total_ms < (exposed_ms or 0.0))
    hosts = [rank.host for rank in (logs if window_graph is None else windows)]
    median_bus, best_bus = large_bus_gb_per_s(bandwidth_points(shown, hosts))
    bytes_per_step = _bytes_per_step(windows)
    if logs_speak and not bytes_per_step:
        # Of the graph's synchronisations, where any size is known.
        sums = [float(np.nansum(group.message_bytes)) for group in graph.groups]
        bytes_per_step = sum(sums) / max(graph.cycles, 1) or None
    counts = [in_marked_steps(window).sum() for window in windows]
    # The window where its collectives were matched: it shows more of them than the step logs.
    compared = shown if shown is window_graph and shown.matched else graph
    compared_hosts = [rank.host for rank in (windows if compared is window_graph else logs)]
    return CommunicationFacts(
        wait_ms=wait_ms,
        transfer_ms=exposed_ms,
        total_transfer_ms=total_ms if tells else None,
        exposed_ms=_exposed_ms(windows),
        hidden_share=_hidden_share(windows) if tells else None,
        bytes_per_step=bytes_per_step,
        sharded_share=_sharded_share(windows),
        collectives_per_step=float(np.median(counts)) / marked_steps(windows) if counts else None,
        bus_gb_per_s=median_bus,
        best_bus_gb_per_s=best_bus,
        latency_us=latency_us,
        matched=matched.matched,
        unmatched=matched.unmatched,
        clock_error_us=shown.clock_error_ns / 1e3 if shown.clock_error_ns is not None else None,
        slow_link_ranks=slow_link_ranks(compared, compared_hosts),
    )


def wait_and_transfer_ms(graph: Graph) -> tuple[float, float, float] | tuple[None, None, None]:
    """Exposed wait, exposed transfer and all transfer in collectives (barriers apart), means over ranks and cycles, ms per
    step; None where no collectives were matched."""
    if not (graph.matched and graph.groups):
        return None, None, None
    sums_ns = np.zeros(3)
    for group in graph.groups:
        for sync, split in zip(group.syncs, splits(group), strict=True):
            if sync.kind in _TRANSFERRING:
                transfer = split.transfer.sum()
                sums_ns += split.wait.sum(), transfer, transfer + split.hidden_transfer.sum()
    wait_ms, exposed_ms, total_ms = (sums_ns / (len(graph.ranks) * graph.cycles * 1e6)).tolist()
    return wait_ms, exposed_ms, total_ms


def _hidden_share(windows: Sequence[Window]) -> float | None:
    """|communication and computation| / |communication|, median rank: HolisticTraceAnalysis's overlap."""
    shares = []
    for window in windows:
        in_collectives = communicating(window)
        if whole := total(in_collectives):
            shares.append(total(intersect(in_collectives, window.compute)) / whole)
    return float(np.median(shares)) if shares else None


def _exposed_ms(windows: Sequence[Window]) -> float | None:
    """Exposed communication inside the marked steps, per step, median rank."""
    per_step_ns = []
    for window in windows:
        if not len(window.collectives):
            continue
        exposed = subtract(communicating(window), window.compute)
        if window.steps:
            exposed = clip(exposed, window.steps[0][1], window.steps[-1][2])
        per_step_ns.append(total(exposed) / max(len(window.steps), 1))
    return float(np.median(per_step_ns)) / 1e6 if per_step_ns else None


def _bytes_per_step(windows: Sequence[Window]) -> float | None:
    """Bytes of the collectives in the marked steps, median rank of those whose messages' sizes are known."""
    sums = [
        float(np.nansum(window.collectives.bytes[in_marked_steps(window)]))
        for window in windows
        if len(window.collectives) and not np.isnan(window.collectives.bytes).all()
    ]
    return float(np.median(sums)) / marked_steps(windows) if sums else None


def _sharded_share(windows: Sequence[Window]) -> float | None:
    """Share of sharding operations in the time of collectives that send gradients or the parameters they belong to."""
    spent = [
        (float(length), operation in _SHARDED)
        for window in windows
        for length, operation, kind in zip(
            window.collectives.end - window.collectives.start,
            window.collectives.operation,
            window.collectives.kind,
            strict=True,
        )
        if kind in (SyncKind.GRADIENTS, SyncKind.MODEL)
    ]
    whole = sum(length for length, _ in spent)
    return sum(length for length, sharded in spent if sharded) / whole if whole else None


def marked_steps(windows: Sequence[Window]) -> float:
    """Steps that a window marks, median over those that mark any; 1.0 where none does."""
    marked = [len(window.steps) for window in windows if window.steps]
    return float(np.median(marked)) if marked else 1.0


def in_marked_steps(window: Window) -> NDArray[np.bool_]:
    """[M] whether the host launched each collective in the marked steps; all of them where none is marked."""
    inside: NDArray[np.bool_] = step_of_collectives(window) != UNKNOWN_STEP
    return inside


def of_kind(window: Window, kind: str) -> NDArray[np.bool_]:
    """[M] whether each collective is of this kind."""
    return np.array([own == kind for own in window.collectives.kind], bool)


def communicating(window: Window) -> Intervals:
    """Intervals in which the rank is in any collective."""
    return union(window.collectives.start, window.collectives.end)


_FEWEST_MESSAGES = 3
"""Fewest messages for a line: two points never contradict it."""


class MessageCost(msgspec.Struct, frozen=True):
    """A message takes ``latency_us`` and its bytes / ``bytes_per_ns``; None where the window did not show it."""

    latency_us: float | None = None
    bytes_per_ns: float | None = None


def message_cost(graph: Graph, hosts: Sequence[str]) -> MessageCost:
    """The cost over all reductions in the window in the kind of process group that reduces the gradients; ``hosts`` by position."""
    reductions = [of for of in transfers(graph, hosts) if of.operation == "allreduce"]
    gradients_ns = [of.ns if of.kind == SyncKind.GRADIENTS else 0.0 for of in reductions]
    reductions = of_longest(reductions, gradients_ns)
    if len(reductions) < _FEWEST_MESSAGES:
        return MessageCost()
    latency_ns, rate = latency_and_rate(
        np.array([transfer.bytes for transfer in reductions]),
        np.array([transfer.ns for transfer in reductions]),
    )
    return MessageCost(latency_ns / 1e3, rate)


class Tuning(msgspec.Struct, frozen=True):
    """How a line is fitted to messages of several sizes."""

    least_class_share: float = 0.05
    """Share of all messages that a size class needs to count: disturbances move the median of fewer."""
    least_size_ratio: float = 2.0
    """Least ratio of the largest to the smallest size class: transfers of closer sizes differ by less than they scatter."""


_TUNING = Tuning()
_LARGE_BYTES = 1 << 20
"""From 1 MiB on messages are bound by bandwidth rather than latency (msprof-analyze's "small packets" are below)."""


class Transfer(NamedTuple):
    """One collective of known size, from when all its members are released to its end."""

    operation: str
    bytes: float
    ns: float
    kind: str
    ranks: int
    """In its process group."""
    hosts: int
    """Hosts of its recorded ranks."""


_Of = TypeVar("_Of", Transfer, BandwidthPoint)


def bus_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth / algorithm bandwidth."""
    if ranks < 2:
        return 1.0
    if operation == "allreduce":
        return 2.0 * (ranks - 1) / ranks
    if operation in ("allgather", "reducescatter", "alltoall"):
        return (ranks - 1) / ranks
    return 1.0


def transfers(graph: Graph, hosts: Sequence[str]) -> list[Transfer]:
    """Every collective with a known size and a duration above 0; ``hosts`` by position."""
    known = []
    for group in graph.groups:
        from_root = nan_median(group.end - group.released, axis=2)
        for k, sync in enumerate(group.syncs):
            operation = classify.communication_operation(sync.name) or sync.name
            ranks = max(sync.size, len(sync.members))
            spanned = len({hosts[position] for position in sync.members})
            sizes = group.message_bytes[:, k]
            times_ns = (group.transfer if sync.root is None else from_root)[:, k]
            usable = (sizes > 0) & (times_ns > 0)
            pairs = zip(sizes[usable].tolist(), times_ns[usable].tolist(), strict=True)
            known += [Transfer(operation, size, ns, sync.kind, ranks, spanned) for size, ns in pairs]
    return known


def bandwidth_points(graph: Graph, hosts: Sequence[str]) -> list[BandwidthPoint]:
    """Median transfer and bus bandwidth per operation, ranks and hosts of the process group, and power of two of bytes. Groups within a
    host and between hosts use different links."""
    classes: dict[tuple[str, int, int, int], list[Transfer]] = defaultdict(list)
    for of in transfers(graph, hosts):
        classes[of.operation, of.ranks, of.hosts, int(np.log2(of.bytes))].append(of)
    return [_point(alike) for _, alike in sorted(classes.items())]


def _point(alike: list[Transfer]) -> BandwidthPoint:
    """The point of one size class of one operation."""
    first = alike[0]
    size = float(np.median([transfer.bytes for transfer in alike]))
    taken_ns = float(np.median([transfer.ns for transfer in alike]))
    return BandwidthPoint(
        operation=first.operation,
        ranks=first.ranks,
        hosts=first.hosts,
        bytes=size,
        count=len(alike),
        transfer_ms=taken_ns / 1e6,
        bus_gb_per_s=size / taken_ns * bus_factor(first.operation, first.ranks),
    )


def of_longest(of_groups: Sequence[_Of], spent: Sequence[float]) -> list[_Of]:
    """The transfers or points of the kind of process group (ranks, hosts) in which most time is ``spent``."""
    sums: dict[tuple[int, int], float] = defaultdict(float)
    for of, time in zip(of_groups, spent, strict=True):
        sums[of.ranks, of.hosts] += time
    longest = max(sums, key=lambda kind: sums[kind], default=None)
    return [of for of in of_groups if (of.ranks, of.hosts) == longest]


def latency_and_rate(sizes: Array, times_ns: Array) -> tuple[float, float | None]:
    """(ns per message, bytes per ns) of the line time = latency + bytes / rate, fitted robustly.

    Medians per size class (a power of two), weighted by their relative error: transfers scatter by a share of their length. Classes
    with few messages are left out: a disturbed one would tilt the line. Where all messages have about one size, the latency is at most
    the whole time and the rate is None.
    """
    classes = np.round(np.log2(np.maximum(sizes, 1.0)))
    every = [classes == size_class for size_class in np.unique(classes)]
    chosen = [rows for rows in every if rows.sum() >= _TUNING.least_class_share * len(sizes)] or every
    x = np.array([np.median(sizes[rows]) for rows in chosen])
    y = np.array([np.median(times_ns[rows]) for rows in chosen])
    if x.max() < _TUNING.least_size_ratio * x.min():
        return float(np.median(times_ns)), None
    weight = np.array([np.sqrt(rows.sum()) for rows in chosen]) / y
    (latency, slope), *_ = np.linalg.lstsq(np.stack([weight, weight * x], axis=1), weight * y, rcond=None)
    if latency < 0:
        latency, slope = 0.0, float((weight**2 * x * y).sum() / (weight**2 * x * x).sum())
    if slope <= 0:
        return float(np.median(times_ns)), None
    return float(latency), 1.0 / float(slope)


def large_bus_gb_per_s(points: list[BandwidthPoint]) -> tuple[float | None, float | None]:
    """(of the size class of at least 1 MiB that transfers longest, best of the classes of at most its size), in the kind of process group
    (ranks, hosts) that transfers longest. Larger messages are no measure: on fast links, bandwidth rises far beyond 1 MiB."""
    points = of_longest(points, [point.count * point.transfer_ms for point in points])
    large = [point for point in points if point.bytes >= _LARGE_BYTES]
    longest = max(large, key=lambda point: point.count * point.transfer_ms, default=None)
    most_bytes = math.inf if longest is None else longest.bytes
    best = max((point.bus_gb_per_s for point in points if point.bytes <= most_bytes), default=None)
    return (None if longest is None else longest.bus_gb_per_s), best
