"""Line charts: a few lines drawn each, many drawn as median, band and named outliers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec

from ddpdoctor.report import words
from ddpdoctor.report.charts.scale import (
    Numbers,
    Tick,
    finite_values,
    index_ticks,
    mean,
    nice_ticks,
    padded,
    quantile,
    thin,
)

POINTS = 240
"""Most points along the width: more than a screen shows apart."""
COLUMNS = 60
"""Most hover columns."""
LINES = 6
"""Most lines drawn each on their own; there are as many line colours."""
OUTLIERS = 3
"""Most lines named beside a median and its band."""
UNIT = 1000
"""Size of the path's own square, stretched over the plot."""


class Line(msgspec.Struct, frozen=True):
    """One line: its name, the number of its colour, its path in a square of 1000 by 1000."""

    name: str
    colour: int
    path: str


class Column(msgspec.Struct, frozen=True):
    """A stretch of the width with the read-out for it."""

    x: float
    width: float
    title: str


class LineChart(msgspec.Struct, frozen=True, kw_only=True):
    """All that the template needs. Widths are per cent, heights pixels."""

    title: str
    description: str
    height: int
    y_ticks: list[Tick]
    x_ticks: list[Tick]
    x_label: str
    lines: list[Line]
    band: str | None = None
    band_label: str = ""
    columns: list[Column] = []
    notes: list[str] = []


class ChartAxes(msgspec.Struct, frozen=True, kw_only=True):
    """What a chart is about, apart from its lines."""

    title: str
    description: str
    x: Sequence[float]
    x_label: str
    height: int
    show: Callable[[float], str]
    """A value with its unit."""
    unit: str
    group: str
    """What the lines are, in the plural: "ranks"."""
    binary: bool = False
    """Values are bytes: ticks at round multiples of a power of 1024."""
    are_means: bool = False
    """Values may be means, of as many steps as lie between two of ``x``."""
    ceiling: float | None = None
    """Top of the axis where the quantity has one (100 %)."""


class LineData(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a line chart, all of them, whoever draws them."""

    frame: ChartAxes
    lines: list[tuple[str, list[float | None]]]
    """Name and one value per ``frame.x``: each line, or of many the median and those worth naming."""
    low: list[float | None] = []
    high: list[float | None] = []
    """The least and the greatest of many lines; empty where each is drawn."""
    count: int
    """How many lines there were."""

    @property
    def band_label(self) -> str:
        return f"from the lowest to the highest of {self.count} {self.frame.group}" if self.low else ""


def line_data(
    frame: ChartAxes, lines: Sequence[tuple[str, Numbers]], outliers: Sequence[str] = ()
) -> LineData | None:
    """``lines`` (name, one value per ``frame.x``) as they are drawn; None where nothing was recorded.

    More lines than colours become a median with a band from the least to the greatest, and the lines
    named in ``outliers``.
    """
    length = len(frame.x)
    full = [(name, padded(values, length)) for name, values in lines]
    full = [(name, values) for name, values in full if finite_values(values)]
    if not full:
        return None
    if len(full) <= LINES:
        return LineData(frame=frame, lines=full, count=len(full))
    low, high = _band([values for _, values in full], length)
    drawn = _median_and_outliers(full, outliers)
    return LineData(frame=frame, lines=drawn, low=low, high=high, count=len(full))


def line_chart(data: LineData | None) -> LineChart | None:
    """The chart of ``data``; None for None."""
    if data is None:
        return None
    frame, length = data.frame, len(data.frame.x)
    shown = [(name, thin(values, POINTS, mean)) for name, values in data.lines]
    low, high = thin(data.low, POINTS, min), thin(data.high, POINTS, max)
    everything = _drawn(shown, high)
    top, above = _top(everything, frame.ceiling)
    notes = (
        [f"{words.count(above, 'point')} above the chart (up to {frame.show(max(everything))})."]
        if above
        else []
    )
    step = max(1, -(-length // POINTS))
    # The numbers of the axis count, not the points given: those of a long run are means themselves.
    gaps = [after - before for before, after in pairwise(frame.x)]
    covered = round(step * quantile(gaps, 0.5)) if gaps else 1
    if step > 1 or (covered > 1 and frame.are_means):
        notes.append(f"Each point is the mean of {words.count(covered, frame.x_label)}.")
    return LineChart(
        title=frame.title,
        description=frame.description,
        height=frame.height,
        y_ticks=_y_ticks(frame, top),
        x_ticks=index_ticks(frame.x),
        x_label=frame.x_label,
        lines=[Line(name, index, _path(values, top)) for index, (name, values) in enumerate(shown)],
        band=_area(low, high, top) if data.low else None,
        band_label=data.band_label,
        columns=_columns(frame, data.lines),
        notes=notes,
    )


def top_of(data: LineData) -> float:
    """Top of the chart's axis, which few huge points may lie above."""
    return _top(_drawn(data.lines, data.high), data.frame.ceiling)[0]


def _drawn(lines: Sequence[tuple[str, Numbers]], high: Numbers) -> list[float]:
    return [value for _, values in lines for value in finite_values(values)] + finite_values(high)


def _y_ticks(frame: ChartAxes, top: float) -> list[Tick]:
    """Fewer ticks on a low chart; 0 is the axis itself."""
    unit = 1024.0 ** max(0, int(math.log(top, 1024))) if frame.binary and top >= 1 else 1.0
    values = nice_ticks(top, 4 if frame.height > 120 else 3, unit)
    return [
        Tick(round(frame.height * (1 - v / top), 1), words.strip_zeros(frame.show(v)))
        for v in values
        if v > 0
    ]


def _median_and_outliers(
    lines: Sequence[tuple[str, list[float | None]]], outliers: Sequence[str]
) -> list[tuple[str, list[float | None]]]:
    rows = [values for _, values in lines]
    middle: list[float | None] = [
        quantile(numbers, 0.5) if (numbers := finite_values(column)) else None
        for column in zip(*rows, strict=True)
    ]
    named = dict(lines)
    return [("median", middle), *[(name, named[name]) for name in outliers[:OUTLIERS] if name in named]]


def _band(rows: Sequence[Numbers], length: int) -> tuple[list[float | None], list[float | None]]:
    columns = [finite_values([row[index] for row in rows]) for index in range(length)]
    return (
        [min(column) if column else None for column in columns],
        [max(column) if column else None for column in columns],
    )


def _top(values: Sequence[float], ceiling: float | None) -> tuple[float, int]:
    """Top of the axis and how many points lie above it: a few huge points must not flatten all others."""
    if ceiling is not None:
        return ceiling, 0
    highest, usual = max(values), quantile(values, 0.97)
    if usual > 0 and highest > 3 * usual:
        top = 1.6 * usual
        return top, sum(value > top for value in values)
    # An axis begins at 0, whatever lies below it.
    return (highest * 1.08 if highest > 0 else 1.0), 0


def _point(index: int, value: float, count: int, top: float) -> str:
    x = round(UNIT * index / max(count - 1, 1))
    y = round(UNIT * (1 - min(max(value, 0.0), top) / top))
    return f"{x} {y}"


def _path(values: Numbers, top: float) -> str:
    """SVG path data; a gap in the values is a gap in the line, and a lonely point is a short dash."""
    pieces, pen_down = [], False
    for index, value in enumerate(values):
        if value is None:
            pen_down = False
            continue
        point = _point(index, value, len(values), top)
        pieces.append(f"L{point}" if pen_down else f"M{point}h2")
        pen_down = True
    return "".join(pieces)


def _area(low: Numbers, high: Numbers, top: float) -> str:
    known = [i for i, (a, b) in enumerate(zip(low, high, strict=True)) if a is not None and b is not None]
    upper = [_point(index, high[index] or 0.0, len(high), top) for index in known]
    lower = [_point(index, low[index] or 0.0, len(low), top) for index in reversed(known)]
    return f"M{'L'.join(upper + lower)}Z" if known else ""


def _columns(frame: ChartAxes, drawn: Sequence[tuple[str, Numbers]]) -> list[Column]:
    length = len(frame.x)
    size = max(1, -(-length // COLUMNS))
    columns = []
    for start in range(0, length, size):
        end = min(start + size, length)
        texts = [
            f"{name} {frame.show(mean(numbers))}"
            for name, values in drawn
            if (numbers := finite_values(values[start:end]))
        ]
        span = f"{frame.x[start]:,.0f}" + (f"–{frame.x[end - 1]:,.0f}" if end - start > 1 else "")
        if texts:
            title = f"{frame.x_label} {span}: {', '.join(texts)}"
            columns.append(
                Column(round(100 * start / length, 2), round(100 * (end - start) / length, 2), title)
            )
    return columns
