"""Heat map of lateness by rank and step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.report import words
from ddpdoctor.report.charts.scale import (
    Numbers,
    Tick,
    finite_or_none,
    finite_values,
    index_ticks,
    mean,
    padded,
    quantile,
    thin,
)

ROWS = 48
COLUMNS = 120
LEVELS = 5
"""Number of shades for late ranks, without that of "on time"."""
ON_TIME_SHARE = 0.02
"""Lateness below this share of the median step is drawn as on time, so that noise does not colour the map."""
UNIT = 1000
MIN_LABEL_HEIGHT = 13
"""Minimum height per label, in pixels."""


class HeatRow(msgspec.Struct, frozen=True):
    """A rank or a group of consecutive ranks: y in pixels from the top, label (empty if there is no room), tooltip."""

    y: float
    label: str
    title: str


class HeatMap(msgspec.Struct, frozen=True, kw_only=True):
    """One path of rectangles per shade, in a coordinate system of 1000 by 1000. Cells without a rectangle were on time.

    If no rank was late, there are no rows and only the description is shown.
    """

    description: str
    rows: list[HeatRow] = []
    row_height: float = 0.0
    height: float = 0.0
    paths: list[str] = []
    missing: str = ""
    """Path of the cells without a recording."""
    legend: list[str] = []
    x_ticks: list[Tick] = []
    notes: list[str] = []


class LatenessCells(msgspec.Struct, frozen=True, kw_only=True):
    """Lateness in ms, [rows][columns]. Each cell has the maximum over its ranks and steps."""

    cells: list[list[float | None]]
    ranks: list[tuple[int, int]]
    """The first and the last rank of each row."""

    @property
    def labels(self) -> list[str]:
        return [str(first) if first == last else f"{first}–{last}" for first, last in self.ranks]


class LatenessData(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of the map, for SVG and plotly."""

    rows: list[tuple[int, list[float | None]]]
    """(rank, lateness in ms in each of ``steps``)."""
    steps: list[int]
    bounds: list[float]
    """Lower bounds of the shades, in ms."""
    all_on_time: bool
    """Whether no rank is later than the first of ``bounds``."""
    shared: LatenessCells
    """``rows`` in at most 48 rows and 120 columns."""


def late_data(diagnosis: Diagnosis) -> LatenessData | None:
    """The numbers of the map; None with fewer than two ranks or without values."""
    series = diagnosis.series
    length = min(len(series.steps), max((len(row) for row in series.late_ms), default=0))
    rows = [(rank, padded(row, length)) for rank, row in zip(series.ranks, series.late_ms, strict=False)]
    if len(rows) < 2 or not any(finite_values(row) for _, row in rows):
        return None
    shared = late_cells(rows)
    late = [value for row in shared.cells for value in finite_values(row) if value > 0]
    top = quantile(late, 0.99) if late else 1.0
    floor = max(ON_TIME_SHARE * (finite_or_none(diagnosis.steps.median_ms) or top), top / 50)
    bounds = [floor + (top - floor) * index / LEVELS for index in range(LEVELS)] if top > floor else [floor]
    bounds = [float(f"{bound:.2g}") for bound in bounds]
    all_on_time = all(value <= bounds[0] for value in late)
    return LatenessData(
        rows=rows, steps=series.steps[:length], bounds=bounds, all_on_time=all_on_time, shared=shared
    )


def lateness(data: LatenessData | None) -> HeatMap | None:
    """The map of ``data``; None for None."""
    if data is None:
        return None
    rows, steps, bounds, length = data.rows, data.steps, data.bounds, len(data.steps)
    if data.all_on_time:
        floor = words.strip_zeros(words.milliseconds(bounds[0]))
        over = f"over {words.count(length, 'point')} in time"
        return HeatMap(description=f"All {len(rows)} ranks are on time: none is later than {floor}, {over}.")
    cells = data.shared.cells
    height_px = max(6.0, min(18.0, 420 / len(cells)))
    notes = []
    if len(cells) < len(rows) or length > COLUMNS:
        notes.append("Neighboring ranks and steps share a cell, which shows their largest lateness.")
    worst = max(rows, key=lambda pair: sum(max(v, 0.0) for v in finite_values(pair[1])))
    worst_ms = mean(finite_values(worst[1]) or [0.0])
    return HeatMap(
        rows=_rows(cells, data.shared.labels, steps, height_px),
        row_height=height_px,
        height=round(height_px * len(cells), 1),
        paths=[_path(cells, bounds, level) for level in range(len(bounds))],
        missing=_path(cells, [], None),
        legend=[f"over {words.strip_zeros(words.milliseconds(bound))}" for bound in bounds],
        x_ticks=index_ticks(steps),
        description=f"Lateness of {words.count(len(rows), 'rank')} relative to "
        f"{'the other rank' if len(rows) == 2 else 'the median rank'}, {words.count(length, 'point')} in time; "
        f"rank {worst[0]} is the latest, by {words.milliseconds(worst_ms)} on average.",
        notes=notes,
    )


def late_cells(
    rows: Sequence[tuple[int, Numbers]], max_rows: int = ROWS, max_columns: int = COLUMNS
) -> LatenessCells:
    """``rows`` reduced to at most ``max_rows`` by ``max_columns`` cells, each with the maximum over its ranks and steps."""
    cells: list[list[float | None]] = []
    ranks = []
    # Groups of a power of two keep the ranks of one host together.
    size = 1 << max(0, math.ceil(len(rows) / max_rows) - 1).bit_length()
    for start in range(0, len(rows), size):
        members = rows[start : start + size]
        columns = zip(*(row for _, row in members), strict=True)
        latest: Numbers = [max(numbers) if (numbers := finite_values(column)) else None for column in columns]
        cells.append(thin(latest, max_columns, max))
        ranks.append((members[0][0], members[-1][0]))
    return LatenessCells(cells=cells, ranks=ranks)


def _rows(
    cells: Sequence[Numbers], labels: Sequence[str], steps: Sequence[int], height: float
) -> list[HeatRow]:
    rows = []
    for index, (row, label) in enumerate(zip(cells, labels, strict=True)):
        numbers = finite_values(row)
        text = f"rank {label}: nothing recorded"
        if numbers:
            worst = max(range(len(row)), key=lambda column: row[column] or float("-inf"))
            step = steps[min(len(steps) - 1, round(worst * len(steps) / len(row)))]
            text = (
                f"rank {label}: {words.milliseconds(mean(numbers))} late on average, "
                f"at most {words.milliseconds(max(numbers))} (around step {step:,})"
            )
        room = index % math.ceil(MIN_LABEL_HEIGHT / height) == 0
        rows.append(HeatRow(round(index * height, 1), label if room else "", text))
    return rows


def _path(cells: Sequence[Numbers], bounds: Sequence[float], level: int | None) -> str:
    """SVG path of all cells with shade ``level`` (None: cells without a value). Adjacent cells are joined."""
    pieces = []
    for y, row in enumerate(cells):
        top, bottom = UNIT * y // len(cells), UNIT * (y + 1) // len(cells)
        start: int | None = None
        for x in range(len(row) + 1):
            same = x < len(row) and _level(row[x], bounds) == level
            if same and start is None:
                start = x
            elif not same and start is not None:
                left, right = UNIT * start // len(row), UNIT * x // len(row)
                pieces.append(f"M{left} {top}H{right}V{bottom}H{left}z")
                start = None
    return "".join(pieces)


def _level(value: float | None, bounds: Sequence[float]) -> int | None:
    if value is None:
        return None
    return sum(value > bound for bound in bounds) - 1
