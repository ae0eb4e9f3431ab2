"""Bus bandwidth by message size, one line per operation."""

from __future__ import annotations

import math

import msgspec

from ddpdoctor.diagnose.diagnosis import BandwidthPoint, Diagnosis
from ddpdoctor.report import words
from ddpdoctor.report.charts.scale import Tick, nice_ticks

OPERATIONS = 6
HEIGHT = 180


class Dot(msgspec.Struct, frozen=True):
    """A point: per cent along the width, pixels from the top, read-out."""

    x: float
    y: float
    title: str


class Operation(msgspec.Struct, frozen=True):
    """One operation's points, smallest message first."""

    name: str
    colour: int
    dots: list[Dot]


class Bandwidth(msgspec.Struct, frozen=True, kw_only=True):
    """The chart and the same numbers as rows of a table."""

    operations: list[Operation]
    height: int
    y_ticks: list[Tick]
    x_ticks: list[Tick]
    table: list[list[str]]
    description: str
    sentences: list[str]
    """The points in words where they are too few to draw; else empty."""


FEWEST = 3
"""Fewest points that make a chart."""


def bandwidth(diagnosis: Diagnosis) -> Bandwidth | None:
    """Points on a logarithmic axis of bytes; None where no transfer was measured."""
    points = [
        p
        for p in diagnosis.bandwidth
        if p.bytes > 0 and math.isfinite(p.bus_gb_per_s) and p.bus_gb_per_s >= 0
    ]
    if not points:
        return None
    low = math.floor(math.log2(min(point.bytes for point in points)))
    high = max(math.ceil(math.log2(max(point.bytes for point in points))), low + 2)
    top = max(point.bus_gb_per_s for point in points) * 1.1 or 1.0
    by_name: dict[str, list[BandwidthPoint]] = {}
    for point in sorted(points, key=lambda point: point.bytes):
        by_name.setdefault(point.operation, []).append(point)
    names = sorted(by_name, key=lambda name: -sum(p.count * p.transfer_ms for p in by_name[name]))[
        :OPERATIONS
    ]

    def dot(point: BandwidthPoint) -> Dot:
        x = 3 + 94 * (math.log2(point.bytes) - low) / (high - low)
        title = (
            f"{point.operation}, {words.size(point.bytes)}: {words.significant(point.bus_gb_per_s)} GB/s, "
            f"{words.milliseconds(point.transfer_ms)} (median of {point.count:,})"
        )
        return Dot(round(x, 2), round(HEIGHT * (1 - point.bus_gb_per_s / top), 1), title)

    step = max(1, math.ceil((high - low) / 6))
    best = max(points, key=lambda point: point.bus_gb_per_s)
    drawn = [Operation(n, i, [dot(point) for point in by_name[n]]) for i, n in enumerate(names)]
    return Bandwidth(
        operations=drawn,
        sentences=[dot.title for line in drawn for dot in line.dots] if len(points) < FEWEST else [],
        height=HEIGHT,
        y_ticks=[
            Tick(round(HEIGHT * (1 - value / top), 1), words.trimmed(f"{words.significant(value)} GB/s"))
            for value in nice_ticks(top)
            if value > 0
        ],
        x_ticks=[
            Tick(round(3 + 94 * (exponent - low) / (high - low), 2), words.size(2.0**exponent))
            for exponent in range(low, high + 1, step)
        ],
        table=[
            [
                point.operation,
                words.size(point.bytes),
                f"{point.count:,}",
                words.milliseconds(point.transfer_ms),
                f"{words.significant(point.bus_gb_per_s)} GB/s",
            ]
            for name in names
            for point in by_name[name]
        ],
        description="Bus bandwidth against message size; the best is "
        f"{words.significant(best.bus_gb_per_s)} GB/s at {words.size(best.bytes)}.",
    )
