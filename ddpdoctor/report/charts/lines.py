"""Line charts. Few lines are drawn separately, many as median, band and named outliers."""

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
    index_of,
    index_ticks,
    mean,
    nice_ticks,
    padded,
    percent_of,
    quantile,
    thin,
)

POINTS = 240
"""Maximum number of points along the width."""
COLUMNS = 60
"""Maximum number of columns with a tooltip."""
LINES = 6
"""Maximum number of lines drawn separately, which is the number of line colours."""
OUTLIERS = 3
"""Maximum number of lines drawn in addition to a median and its band."""
UNIT = 1000
"""Width and height of the paths' coordinate system, which is stretched over the plot."""
_PERIODIC_HEIGHT = 0.06
"""Height of the marks of periodic steps, as a share of the chart's height. They are low because there may be many."""


class Line(msgspec.Struct, frozen=True):
    """A line: name, number of its colour, path in a coordinate system of 1000 by 1000."""

    name: str
    colour: int
    path: str


class Column(msgspec.Struct, frozen=True):
    """A vertical strip of the chart with a tooltip. Position and width in per cent."""

    x: float
    width: float
    title: str


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """An event marked in a chart: single pauses, periodic steps, a change or growth."""

    kind: str
    """"pause", "periodic", "change" or "growth"."""
    label: str
    at: list[float]
    """Positions on the x axis, increasing."""
    levels: tuple[float, float] | None = None
    """Values at the first and the last position, joined by a line. None: a vertical line at each position."""

    def lines(self, top: float) -> list[tuple[float, float, float, float]]:
        """The lines (x, y, x, y) in a chart whose y axis goes from 0 to ``top``."""
        if self.levels is not None:
            (low, high), ends = self.levels, (self.at[0], self.at[-1])
            return [(ends[0], min(low, top), ends[1], min(high, top))]
        height = top * (_PERIODIC_HEIGHT if self.kind == "periodic" else 1.0)
        return [(place, 0.0, place, height) for place in self.at]


class MarkPath(msgspec.Struct, frozen=True):
    """A mark for the template: a path in a coordinate system of 1000 by 1000."""

    kind: str
    label: str
    path: str


class LineChart(msgspec.Struct, frozen=True, kw_only=True):
    """A chart for the template. Widths in per cent, heights in pixels."""

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
    marks: list[MarkPath] = []
    above: list[float] = []
    """Horizontal positions of points above the chart."""
    above_label: str = ""
    """Number of points above the chart, and the largest value."""
    notes: list[str] = []


class ChartAxes(msgspec.Struct, frozen=True, kw_only=True):
    """Title, axes and units of a chart."""

    title: str
    description: str
    x: Sequence[float]
    x_label: str
    height: int
    show: Callable[[float], str]
    """Formats a value with its unit."""
    unit: str
    group: str
    """What the lines represent, in the plural: "ranks"."""
    binary: bool = False
    """Whether values are bytes, with ticks at round multiples of powers of 1024."""
    are_means: bool = False
    """Whether each value may be the mean over all steps between two values of ``x``."""
    highest: float | None = None
    """Top of the axis if the quantity has an upper limit (100 %)."""


class LineData(msgspec.Struct, frozen=True, kw_only=True):
    """All numbers of a line chart, for SVG and plotly."""

    axes: ChartAxes
    lines: list[tuple[str, list[float | None]]]
    """(name, one value per ``frame.x``): all lines, or if there are many, the median and the outliers."""
    low: list[float | None] = []
    high: list[float | None] = []
    """Minimum and maximum over many lines; empty if all lines are drawn."""
    count: int
    """Total number of lines."""
    marks: list[Mark] = []

    @property
    def band_label(self) -> str:
        return f"from the lowest to the highest of {self.count} {self.axes.group}" if self.low else ""


def line_data(
    axes: ChartAxes,
    lines: Sequence[tuple[str, Numbers]],
    outliers: Sequence[str] = (),
    marks: Sequence[Mark] = (),
) -> LineData | None:
    """The data of a chart of ``lines`` (name, one value per ``frame.x``) and of the ``marks`` within its range; None without values.

    If there are more lines than colours, they are reduced to a median, a band from minimum to maximum, and the lines named in
    ``outliers``.
    """
    length = len(axes.x)
    nonempty = [(name, padded(values, length)) for name, values in lines]
    nonempty = [(name, values) for name, values in nonempty if finite_values(values)]
    if not nonempty:
        return None
    within = [mark for mark in marks if axes.x[0] <= mark.at[0] and mark.at[-1] <= axes.x[-1]]
    if len(nonempty) <= LINES:
        return LineData(axes=axes, lines=nonempty, count=len(nonempty), marks=within)
    low, high = _band([values for _, values in nonempty], length)
    drawn = _median_and_outliers(nonempty, outliers)
    return LineData(axes=axes, lines=drawn, low=low, high=high, count=len(nonempty), marks=within)


def line_chart(data: LineData | None) -> LineChart | None:
    """The chart of ``data``; None for None."""
    if data is None:
        return None
    axes, length = data.axes, len(data.axes.x)
    shown = [(name, thin(values, POINTS, mean)) for name, values in data.lines]
    low, high = thin(data.low, POINTS, min), thin(data.high, POINTS, max)
    everything = _drawn_values(shown, high)
    top, above = _axis_maximum(everything, axes.highest)
    notes = []
    step = max(1, -(-length // POINTS))
    # Computed from step numbers, because the points of a long run are already means.
    gaps = [after - before for before, after in pairwise(axes.x)]
    covered = round(step * quantile(gaps, 0.5)) if gaps else 1
    if step > 1 or (covered > 1 and axes.are_means):
        notes.append(f"Each point is the mean of {words.count(covered, axes.x_label)}.")
    return LineChart(
        title=axes.title,
        description=axes.description,
        height=axes.height,
        y_ticks=_y_ticks(axes, top),
        x_ticks=index_ticks(axes.x),
        x_label=axes.x_label,
        lines=[Line(name, index, _path(values, top)) for index, (name, values) in enumerate(shown)],
        band=_area(low, high, top) if data.low else None,
        band_label=data.band_label,
        columns=_columns(axes, data.lines),
        marks=[MarkPath(mark.kind, mark.label, _mark_path(mark, axes.x, top)) for mark in data.marks],
        above=_above(shown, high, top) if above else [],
        above_label=f"{words.count(above, 'point')} above the chart, up to {axes.show(max(everything))}"
        if above
        else "",
        notes=notes,
    )


def axis_maximum(data: LineData) -> float:
    """Maximum of the chart's y axis; a few very large points may be above it."""
    return _axis_maximum(_drawn_values(data.lines, data.high), data.axes.highest)[0]


def _drawn_values(lines: Sequence[tuple[str, Numbers]], high: Numbers) -> list[float]:
    return [value for _, values in lines for value in finite_values(values)] + finite_values(high)


def _y_ticks(axes: ChartAxes, top: float) -> list[Tick]:
    """Ticks of the y axis without 0. Charts of small height have fewer."""
    unit = 1024.0 ** max(0, int(math.log(top, 1024))) if axes.binary and top >= 1 else 1.0
    values = nice_ticks(top, 4 if axes.height > 120 else 3, unit)
    return [
        Tick(round(axes.height * (1 - v / top), 1), words.strip_zeros(axes.show(v))) for v in values if v > 0
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


def _axis_maximum(values: Sequence[float], highest: float | None) -> tuple[float, int]:
    """(Maximum of the y axis, number of points above it). A few very large points do not determine the scale."""
    if highest is not None:
        return highest, 0
    highest, typical = max(values), quantile(values, 0.97)
    if typical > 0 and highest > 3 * typical:
        top = 1.6 * typical
        return top, sum(value > top for value in values)
    # The axis begins at 0 even if there are negative values.
    return (highest * 1.08 if highest > 0 else 1.0), 0


def _above(lines: Sequence[tuple[str, Numbers]], high: Numbers, top: float) -> list[float]:
    """Positions, in per cent of the width, at which a line or the band exceeds ``top``."""
    rows = [*(values for _, values in lines), high]
    places = {
        percent_of(index, max(len(values) - 1, 1))
        for values in rows
        for index, value in enumerate(values)
        if value is not None and value > top
    }
    return sorted(places)


def _point(index: int, value: float, count: int, top: float) -> str:
    x = round(UNIT * index / max(count - 1, 1))
    y = round(UNIT * (1 - min(max(value, 0.0), top) / top))
    return f"{x} {y}"


def _path(values: Numbers, top: float) -> str:
    """SVG path data. Missing values are gaps; a single point between gaps is a short dash."""
    pieces, pen_down = [], False
    for index, value in enumerate(values):
        if value is None:
            pen_down = False
            continue
        point = _point(index, value, len(values), top)
        pieces.append(f"L{point}" if pen_down else f"M{point}h2")
        pen_down = True
    return "".join(pieces)


def _mark_path(mark: Mark, x: Sequence[float], top: float) -> str:
    def point(at: float, value: float) -> str:
        return f"{round(UNIT * index_of(x, at) / max(len(x) - 1, 1))} {round(UNIT * (1 - value / top))}"

    return "".join(f"M{point(x0, y0)}L{point(x1, y1)}" for x0, y0, x1, y1 in mark.lines(top))


def _area(low: Numbers, high: Numbers, top: float) -> str:
    known = [i for i, (a, b) in enumerate(zip(low, high, strict=True)) if a is not None and b is not None]
    upper = [_point(index, high[index] or 0.0, len(high), top) for index in known]
    lower = [_point(index, low[index] or 0.0, len(low), top) for index in reversed(known)]
    return f"M{'L'.join(upper + lower)}Z" if known else ""


def _columns(axes: ChartAxes, drawn: Sequence[tuple[str, Numbers]]) -> list[Column]:
    length = len(axes.x)
    size = max(1, -(-length // COLUMNS))
    columns = []
    for start in range(0, length, size):
        end = min(start + size, length)
        texts = [
            f"{name} {axes.show(mean(numbers))}"
            for name, values in drawn
            if (numbers := finite_values(values[start:end]))
        ]
        span = f"{axes.x[start]:,.0f}" + (f"–{axes.x[end - 1]:,.0f}" if end - start > 1 else "")
        if texts:
            title = f"{axes.x_label} {span}: {', '.join(texts)}"
            columns.append(
                Column(round(100 * start / length, 2), round(100 * (end - start) / length, 2), title)
            )
    return columns
