"""Bus bandwidth by message size, one line per operation."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace

import msgspec

from ddpdoctor.diagnose.diagnosis import BandwidthPoint, Diagnosis
from ddpdoctor.report import words
from ddpdoctor.report.charts.scale import NEGLIGIBLE, Tick, finite_or_none, nice_ticks

OPERATIONS = 6
HEIGHT = 180


class Dot(msgspec.Struct, frozen=True):
    """A point: x in per cent of the width, y in pixels from the top, tooltip."""

    x: float
    y: float
    title: str


MIN_POINTS = 3
"""Minimum number of points for a chart."""


def bandwidth_data(diagnosis: Diagnosis) -> dict[str, list[BandwidthPoint]]:
    """Points by operation, and by size of the process group if there are several, smallest message first. At most :data:`OPERATIONS`
    lines, those with the largest total transfer time."""
    by_name: dict[str, list[BandwidthPoint]] = {}
    measured = sorted(_valid_points(diagnosis), key=lambda point: point.bytes)
    groups = {(point.operation, point.ranks, point.hosts) for point in measured}
    groups_per_operation = Counter(operation for operation, *_ in groups)
    for point in measured:
        hosts = "" if point.hosts < 2 else f" on {point.hosts} hosts"
        group = f", {point.ranks} ranks{hosts}" if groups_per_operation[point.operation] > 1 else ""
        by_name.setdefault(f"{point.operation}{group}", []).append(point)
    names = sorted(by_name, key=lambda name: -sum(p.count * p.transfer_ms for p in by_name[name]))
    return {name: by_name[name] for name in names[:OPERATIONS]}


def _valid_points(diagnosis: Diagnosis) -> list[BandwidthPoint]:
    return [
        p
        for p in diagnosis.bandwidth
        if p.bytes >= NEGLIGIBLE and math.isfinite(p.bus_gb_per_s) and p.bus_gb_per_s >= 0
    ]


def point_words(name: str, point: BandwidthPoint) -> str:
    """The tooltip of a point of the line ``name``."""
    return (
        f"{name}, {words.size(point.bytes)}: {words.significant(point.bus_gb_per_s)} GB/s, "
        f"{words.milliseconds(point.transfer_ms)} (median of {point.count:,})"
    )


def bandwidth(diagnosis: Diagnosis) -> SimpleNamespace | None:
    """A chart with a logarithmic axis of bytes, and the same numbers as a table; None if no transfer was measured. Fewer than
    :data:`MIN_POINTS` points are shown as sentences."""
    points = _valid_points(diagnosis)
    if not points:
        return None
    low = math.floor(math.log2(min(point.bytes for point in points)))
    high = max(math.ceil(math.log2(max(point.bytes for point in points))), low + 2)
    top = (finite_or_none(max(point.bus_gb_per_s for point in points)) or 1.0) * 1.1
    by_name = bandwidth_data(diagnosis)

    def dot(name: str, point: BandwidthPoint) -> Dot:
        x = 3 + 94 * (math.log2(point.bytes) - low) / (high - low)
        return Dot(round(x, 2), round(HEIGHT * (1 - point.bus_gb_per_s / top), 1), point_words(name, point))

    step = max(1, math.ceil((high - low) / 6))
    best = max(points, key=lambda point: point.bus_gb_per_s)
    lines = [
        SimpleNamespace(name=name, colour=number, dots=[dot(name, point) for point in points_of_name])
        for number, (name, points_of_name) in enumerate(by_name.items())
    ]
    return SimpleNamespace(
        operations=lines,
        sentences=[dot.title for line in lines for dot in line.dots] if len(points) < MIN_POINTS else [],
        height=HEIGHT,
        y_ticks=[
            Tick(round(HEIGHT * (1 - value / top), 1), words.strip_zeros(f"{words.significant(value)} GB/s"))
            for value in nice_ticks(top)
            if value > 0
        ],
        x_ticks=[
            Tick(round(3 + 94 * (exponent - low) / (high - low), 2), words.size(2.0**exponent))
            for exponent in range(low, high + 1, step)
        ],
        table=[
            [
                name,
                words.size(point.bytes),
                f"{point.count:,}",
                words.milliseconds(point.transfer_ms),
                f"{words.significant(point.bus_gb_per_s)} GB/s",
            ]
            for name, points_of_name in by_name.items()
            for point in points_of_name
        ],
        description="Bus bandwidth against message size; the best is "
        f"{words.significant(best.bus_gb_per_s)} GB/s at {words.size(best.bytes)}.",
    )
