"""A comparison on the terminal, as JSON, and as one HTML file."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ddpdoctor.plain import plain
from ddpdoctor.report import words
from ddpdoctor.report.compare import Comparison, FindingChange, Side
from ddpdoctor.report.console_output import MOST_CELL_LENGTH, print_wrapped, truncated
from ddpdoctor.report.html import render_plain
from ddpdoctor.report.json_output import formatted
from ddpdoctor.written import COMPARISON, COMPARISON_PAGE, write_file

_STYLES = {"faster": "bold green", "slower": "bold red"}
_STATUS_STYLES = {"resolved": "green", "new": "red", "changed": "yellow"}
_CHANGES, _ROWS = 12, 500
"""Most changed settings, and most rows of any other table, on the terminal; also most rows on the page. The JSON has all."""


class Grid(msgspec.Struct, frozen=True):
    """A titled table of text; the first column names the row, the others are its values."""

    title: str
    head: list[str]
    rows: list[list[str]]
    styles: list[str] = []
    """A style for each row; [] if all are alike."""


def comparison_json(comparison: Comparison) -> bytes:
    """The comparison as JSON (schema ``ddpdoctor.comparison/1``)."""
    return formatted(comparison)


def write_comparison_json(comparison: Comparison, path: str | os.PathLike[str]) -> None:
    """Write the comparison as JSON to ``path``. Raises DdpDoctorError where it cannot."""
    write_file(path, comparison_json(comparison), COMPARISON)


def render_comparison(comparison: Comparison) -> str:
    """The comparison as one HTML document without scripts."""
    sides = [
        (name, f"{', '.join(side.source)}: {words.strip_backticks(side.headline)}")
        for name, side in (("before", comparison.before), ("after", comparison.after))
    ]
    return render_plain("compare.html.j2", comparison=comparison, sides=sides, grids=grids(comparison))


def write_comparison_html(comparison: Comparison, path: str | os.PathLike[str]) -> None:
    """Write the comparison as HTML to ``path``. Raises DdpDoctorError where it cannot."""
    write_file(path, render_comparison(comparison), COMPARISON_PAGE)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the verdict and the tables. Lines fit 80 columns where possible, but no id and no path is broken."""
    print_wrapped(
        console, Text(plain(truncated(comparison.verdict)), style=_STYLES.get(comparison.judgement, "bold"))
    )
    for side, name in ((comparison.before, "before"), (comparison.after, "after")):
        line = f"{name}: {', '.join(side.source)}: {side.headline}"
        print_wrapped(console, Text(plain(truncated(line)), style="dim"))
    for grid in grids(comparison):
        console.print()
        print_wrapped(console, table_of(grid))
    for note in comparison.notes:
        print_wrapped(console, Text(plain(truncated(f"Note: {note}")), style="dim"))


def grids(comparison: Comparison) -> list[Grid]:
    """The tables of a comparison, as text; empty ones are omitted."""
    found = [
        Grid("Steps", ["", "before", "after", "change"], _step_rows(comparison.before, comparison.after)),
        Grid("The whole run", ["", "before", "after", "change"], _run_rows(comparison)),
        Grid(
            "Critical path, per step",
            ["", "before", "after", "change"],
            [
                [
                    words.part(row.part),
                    _with_share(row.before_ms, row.before_share),
                    _with_share(row.after_ms, row.after_share),
                    _difference(row.before_ms, row.after_ms),
                ]
                for row in comparison.breakdown
            ],
        ),
        Grid(
            "Findings",
            ["finding", "status", "before", "after"],
            [_finding_row(row, comparison) for row in comparison.findings],
            [_STATUS_STYLES.get(row.status, "") for row in comparison.findings],
        ),
        Grid(
            "Other differences",
            ["", "before", "after"],
            [[change.what, change.before, change.after] for change in comparison.changes],
        ),
    ]
    return [grid for grid in found if grid.rows]


def _step_rows(before: Side, after: Side) -> list[list[str]]:
    rows = [
        [name, words.milliseconds(old), words.milliseconds(new), _percent(old, new)]
        for name, old, new in (
            ("median step", before.median_ms, after.median_ms),
            ("mean, measured steps", before.mean_ms, after.mean_ms),
            ("p95, measured steps", before.p95_ms, after.p95_ms),
        )
        if old is not None or new is not None
    ]
    old, new = before.samples_per_s, after.samples_per_s
    if old is not None or new is not None:
        rows.append(["samples per second", _number(old), _number(new), _percent(old, new)])
    return [*rows, ["steps measured", f"{before.steps_measured:,}", f"{after.steps_measured:,}", ""]]


def _run_rows(comparison: Comparison) -> list[list[str]]:
    if not comparison.run:
        return []
    before, after = comparison.before, comparison.after
    times = [("wall time", before.wall_s, after.wall_s)]
    times += [(words.part(row.part), row.before_s, row.after_s) for row in comparison.run]
    rows = [
        [name, *(words.milliseconds(_ms(value)) for value in (old, new)), _difference(_ms(old), _ms(new))]
        for name, old, new in times
    ]
    return [["goodput", words.percent(before.goodput), words.percent(after.goodput), ""], *rows]


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else 1e3 * value_s


def _finding_row(row: FindingChange, comparison: Comparison) -> list[str]:
    before, after = comparison.before.all_ranks, comparison.after.all_ranks
    return [
        row.rule,
        row.status,
        _cost(row.before_severity, row.before_ms_per_step, row.before_ranks, before),
        _cost(row.after_severity, row.after_ms_per_step, row.after_ranks, after),
    ]


def _cost(severity: str | None, ms: float | None, ranks: list[int] | None, all_ranks: str) -> str:
    if severity is None:
        return "–"
    who = words.rank_names(ranks, all_ranks)
    return f"{words.milliseconds(ms) if ms is not None else '?'}, {who} ({severity})"


def _with_share(ms: float | None, share: float | None) -> str:
    if share is None:
        return words.ABSENT
    return f"{words.milliseconds(ms)} ({words.percent(share)})" if ms is not None else words.percent(share)


def _difference(old: float | None, new: float | None) -> str:
    if old is None or new is None:
        return ""
    return f"{'+' if new > old else ''}{words.milliseconds(new - old)}"


def _percent(old: float | None, new: float | None) -> str:
    return f"{100 * (new / old - 1):+.1f} %" if old and new is not None else ""


def _number(value: float | None) -> str:
    return words.ABSENT if value is None else words.significant(value)


def table_of(grid: Grid) -> Table:
    """A grid as rich draws it."""
    table = Table(
        title=grid.title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    numbers = "change" in grid.head
    for index, name in enumerate(grid.head):
        table.add_column(name, justify="right" if numbers and index else "left")
    rows: Sequence[list[str]] = grid.rows[: _ROWS if numbers or grid.styles else _CHANGES]
    for index, row in enumerate(rows):
        style = grid.styles[index] if grid.styles else ""
        table.add_row(*[Text(plain(truncated(cell, MOST_CELL_LENGTH)), style=style) for cell in row])
    if len(rows) < len(grid.rows):
        table.caption = f"and {len(grid.rows) - len(rows)} more (--json shows them)"
    return table
