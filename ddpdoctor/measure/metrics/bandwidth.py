"""Bandwidth of collectives from their transfer alone, by the formulas of nccl-tests.

Algorithm bandwidth is size / time. Bus bandwidth multiplies it by a factor that makes it comparable over
operations and rank counts (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): allreduce 2
(n - 1) / n, allgather, reduce-scatter and alltoall (n - 1) / n, broadcast and reduce 1. Waiting for the last
rank is no transfer and does not count. GB are 10^9 bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from ddpdoctor.measure.graph import Graph
from ddpdoctor.measure.numerics import Array, nan_median
from ddpdoctor.measure.summary import BandwidthPoint
from ddpdoctor.trace import classify


class Tuning(msgspec.Struct, frozen=True):
    """How a line is fitted to messages of several sizes."""

    least_class_share: float = 0.05
    """Of all messages, for a size class to count: the median of fewer is that of the disturbances that they met."""
    least_size_ratio: float = 2.0
    """Largest over smallest size class: between sizes that are nearer, transfers differ by less than they scatter."""


_TUNING = Tuning()
_LARGE_BYTES = 1 << 20
"""From 1 MiB on messages are bound by bandwidth rather than latency (msprof-analyze's "small packets" are below)."""


class Transfer(NamedTuple):
    """One collective of known size, from when its members wait for none of them to its end."""

    operation: str
    bytes: float
    ns: float
    kind: str
    ranks: int
    """In its process group."""
    hosts: int
    """On which those of them are that were recorded."""


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
    """Every collective whose size is known, and which took any time; ``hosts`` by position."""
    known = []
    for group in graph.groups:
        from_root = nan_median(group.end - group.released, axis=2)
        for k, sync in enumerate(group.syncs):
            operation = classify.communication_operation(sync.name) or sync.name
            ranks = max(sync.size, len(sync.members))
            spanned = len({hosts[position] for position in sync.members})
            sizes = group.message_bytes[:, k]
            times_ns = (group.transfer if sync.root is None else from_root)[:, k]
            told = (sizes > 0) & (times_ns > 0)
            pairs = zip(sizes[told].tolist(), times_ns[told].tolist(), strict=True)
            known += [Transfer(operation, size, ns, sync.kind, ranks, spanned) for size, ns in pairs]
    return known


def bandwidth_points(graph: Graph, hosts: Sequence[str]) -> list[BandwidthPoint]:
    """Median transfer and bus bandwidth per operation, ranks and hosts of the process group, and power of two of bytes. Groups
    within a host and between hosts use other links."""
    classes: dict[tuple[str, int, int, int], list[Transfer]] = defaultdict(list)
    for of in transfers(graph, hosts):
        classes[of.operation, of.ranks, of.hosts, int(np.log2(of.bytes))].append(of)
    return [_point(alike) for _, alike in sorted(classes.items())]


def _point(alike: list[Transfer]) -> BandwidthPoint:
    """One size class of one operation."""
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
    """Those of the process groups, by ranks and hosts, in which most time is ``spent``."""
    sums: dict[tuple[int, int], float] = defaultdict(float)
    for of, time in zip(of_groups, spent, strict=True):
        sums[of.ranks, of.hosts] += time
    longest = max(sums, key=lambda kind: sums[kind], default=None)
    return [of for of in of_groups if (of.ranks, of.hosts) == longest]


def latency_and_rate(sizes: Array, times_ns: Array) -> tuple[float, float | None]:
    """(ns per message, bytes per ns) of the line time = latency + bytes / rate, fitted robustly.

    Medians per size class (a power of two), weighted so that each counts by its relative error: transfers scatter
    by a share of their length. Classes of a few messages among many are left out: one that met no disturbance, or a large
    one, would tilt the line. Where all messages have about one size, the latency is at most the whole time and
    the rate is None.
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
    """(median over classes of at least 1 MiB, best of all classes), of the process groups, by ranks and hosts, that transfer
    longest: those of others are no measure of their links."""
    points = of_longest(points, [point.count * point.transfer_ms for point in points])
    large = [point.bus_gb_per_s for point in points if point.bytes >= _LARGE_BYTES]
    best = max((point.bus_gb_per_s for point in points), default=None)
    return (float(np.median(large)) if large else None), best
