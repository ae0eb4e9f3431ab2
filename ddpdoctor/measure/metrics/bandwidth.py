"""Bandwidth of collectives from their transfer alone, by the formulas of nccl-tests.

Algorithm bandwidth is size / time. Bus bandwidth multiplies it by a factor that makes it comparable over
operations and rank counts (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): allreduce 2
(n - 1) / n, allgather, reduce-scatter and alltoall (n - 1) / n, broadcast and reduce 1. Waiting for the last
rank is no transfer and does not count. GB are 10^9 bytes.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from ddpdoctor.measure.graph import Graph
from ddpdoctor.measure.summary import BandwidthPoint
from ddpdoctor.trace import classify

_LEAST_CLASS = 0.05
"""Share of all messages."""
_LARGE_BYTES = 1 << 20


def bus_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth / algorithm bandwidth."""
    if ranks < 2:
        return 1.0
    if operation == "allreduce":
        return 2.0 * (ranks - 1) / ranks
    if operation in ("allgather", "reducescatter", "alltoall"):
        return (ranks - 1) / ranks
    return 1.0


def transfers(graph: Graph) -> list[tuple[str, float, float, int]]:
    """(operation, bytes, transfer ns, ranks) of every collective whose size is known."""
    found = []
    for group in graph.groups:
        taken = group.transfer
        for k, sync in enumerate(group.syncs):
            operation = classify.communication_operation(sync.name) or sync.name
            for n in range(len(group.steps)):
                size = float(group.message_bytes[n, k])
                if size > 0 and taken[n, k] > 0:
                    found.append((operation, size, float(taken[n, k]), len(sync.members)))
    return found


def bandwidth_points(graph: Graph) -> list[BandwidthPoint]:
    """Median transfer and bus bandwidth per operation and power of two of bytes."""
    classes: dict[tuple[str, int], list[tuple[float, float, int]]] = defaultdict(list)
    for operation, size, taken, ranks in transfers(graph):
        classes[operation, int(np.log2(size))].append((size, taken, ranks))
    points = []
    for (operation, _), rows in sorted(classes.items()):
        size = float(np.median([row[0] for row in rows]))
        taken = float(np.median([row[1] for row in rows]))
        points.append(
            BandwidthPoint(
                operation=operation,
                bytes=size,
                count=len(rows),
                transfer_ms=taken / 1e6,
                bus_gb_per_s=size / taken * bus_factor(operation, rows[0][2]),
            )
        )
    return points


def latency_and_rate(sizes: np.ndarray, times_ns: np.ndarray) -> tuple[float, float | None]:  # type: ignore[type-arg]
    """(ns per message, bytes per ns) of the line time = latency + bytes / rate, fitted robustly.

    Medians per size class (a power of two), weighted so that each counts by its relative error: transfers scatter
    by a share of their length. Classes of a few messages among many are left out: one that met no disturbance, or a large
    one, would tilt the line. Where all messages have about one size, the latency is at most the whole time and
    the rate is None.
    """
    classes = np.round(np.log2(np.maximum(sizes, 1.0)))
    chosen = [classes == c for c in np.unique(classes)]
    chosen = [c for c in chosen if c.sum() >= _LEAST_CLASS * len(sizes)] or chosen
    x = np.array([np.median(sizes[c]) for c in chosen])
    y = np.array([np.median(times_ns[c]) for c in chosen])
    if x.max() < 2 * x.min():
        return float(np.median(times_ns)), None
    weight = np.array([np.sqrt(c.sum()) for c in chosen]) / y
    (latency, slope), *_ = np.linalg.lstsq(np.stack([weight, weight * x], axis=1), weight * y, rcond=None)
    if latency < 0:
        latency, slope = 0.0, float((weight**2 * x * y).sum() / (weight**2 * x * x).sum())
    if slope <= 0:
        return float(np.median(times_ns)), None
    return float(latency), 1.0 / float(slope)


def large_bus_gb_per_s(points: list[BandwidthPoint]) -> tuple[float | None, float | None]:
    """(median over classes of at least 1 MiB, best of all classes)."""
    large = [point.bus_gb_per_s for point in points if point.bytes >= _LARGE_BYTES]
    best = max((point.bus_gb_per_s for point in points), default=None)
    return (float(np.median(large)) if large else None), best
