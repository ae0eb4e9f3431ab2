"""Shows a comparison of two runs, and the history of many, on the terminal and as one HTML file."""

from __future__ import annotations

import rich.table
from rich.console import Console

from ddpdoctor.report import words
from ddpdoctor.report.charts.lines import ChartAxes, LineChart, Mark, line_chart, line_data
from ddpdoctor.report.compare import Comparison, FindingChange, Side
from ddpdoctor.report.console_output import cell, print_line, print_wrapped
from ddpdoctor.report.history import History, HistoryRun, JobHistory
from ddpdoctor.report.html import render_without_scripts
from ddpdoctor.report.job_view import Table

_STYLES = {"faster": "bold green", "slower": "bold red"}
_STATUS_STYLES = {"resolved": "green", "new": "red", "changed": "yellow"}
_MAX_CHANGES, _MAX_ROWS = 12, 500
"""Maximum number of rows on the terminal: of the table of changed settings, and of all other tables. The JSON has all."""


def render_comparison(comparison: Comparison) -> str:
    """The comparison as one HTML document without scripts."""
    sides = [
        (name, f"{', '.join(side.source)}: {words.strip_backticks(side.headline)}")
        for name, side in (("before", comparison.before), ("after", comparison.after))
    ]
    return render_without_scripts(
        "compare.html.j2", comparison=comparison, sides=sides, grids=grids(comparison)
    )


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the verdict and the tables. Lines fit 80 columns if possible, but ids and paths are not broken."""
    print_line(console, comparison.verdict, _STYLES.get(comparison.judgement, "bold"))
    for side, name in ((comparison.before, "before"), (comparison.after, "after")):
        line = f"{name}: {', '.join(side.source)}: {side.headline}"
        print_line(console, line, "dim")
    for grid in grids(comparison):
        console.print()
        print_wrapped(console, table_of(grid))
    for note in comparison.notes:
        print_line(console, f"Note: {note}", "dim")


def grids(comparison: Comparison) -> list[Table]:
    """The tables of a comparison, without empty ones."""
    found = [
        Table("Steps", ["", "before", "after", "change"], _step_rows(comparison.before, comparison.after)),
        Table("The whole run", ["", "before", "after", "change"], _run_rows(comparison)),
        Table(
            "Critical path, per step",
            ["", "before", "after", "change"],
            [
                [
                    words.part(row.part),
                    _time_and_share(row.before_ms, row.before_share),
                    _time_and_share(row.after_ms, row.after_share),
                    _difference(row.before_ms, row.after_ms),
                ]
                for row in comparison.breakdown
            ],
        ),
        Table(
            "Findings",
            ["finding", "status", "before", "after"],
            [_finding_row(row, comparison) for row in comparison.findings],
            [_STATUS_STYLES.get(row.status, "") for row in comparison.findings],
        ),
        Table(
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
        [
            name,
            *(words.milliseconds(_to_ms(value)) for value in (old, new)),
            _difference(_to_ms(old), _to_ms(new)),
        ]
        for name, old, new in times
    ]
    return [["goodput", words.percent(before.goodput), words.percent(after.goodput), ""], *rows]


def _to_ms(value_s: float | None) -> float | None:
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


def _time_and_share(ms: float | None, share: float | None) -> str:
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


def table_of(grid: Table) -> rich.table.Table:
    """``grid`` as a table of rich."""
    table = rich.table.Table(
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
    rows = grid.rows[: _MAX_ROWS if numbers or grid.styles else _MAX_CHANGES]
    for index, row in enumerate(rows):
        style = grid.styles[index] if grid.styles else ""
        table.add_row(*(cell(text, style) for text in row))
    if len(rows) < len(grid.rows):
        table.caption = f"and {len(grid.rows) - len(rows)} more (--json shows them)"
    return table


_COMMIT_LENGTH = 10
"""Number of characters shown of a commit hash."""
_MIN_CHART_RUNS = 3
"""Minimum number of runs for a chart; two are easier to compare in the table."""
_CHART_HEIGHT = 140
"""Pixels."""


def render_history(history: History) -> str:
    """The history as one HTML document without scripts."""
    jobs = [(job, _sentences(job), chart_of(job), grid_of(job)) for job in history.jobs]
    return render_without_scripts("history.html.j2", jobs=jobs, notes=history.notes)


def print_history(history: History, console: Console) -> None:
    """Print each job with its changes and its runs, newest run last."""
    for number, job in enumerate(history.jobs):
        if number:
            console.print()
        print_line(console, job.job, "bold")
        for sentence in _sentences(job):
            print_line(console, sentence)
        print_wrapped(console, table_of(grid_of(job)))
    for note in history.notes:
        print_line(console, f"Note: {note}", "dim")


def chart_of(job: JobHistory) -> LineChart | None:
    """A chart of the median step time by run with its changes; None if fewer than ``_MIN_CHART_RUNS`` runs have a step time."""
    if sum(run.median_ms is not None for run in job.runs) < _MIN_CHART_RUNS:
        return None
    axes = ChartAxes(
        title="Median step time by run",
        description=f"The runs of {job.job} in the order of the table, the oldest first.",
        x=range(1, len(job.runs) + 1),
        x_label="run",
        height=_CHART_HEIGHT,
        show=words.milliseconds,
        unit="ms",
        group="runs",
    )
    marks = [
        Mark(
            kind="change",
            label=f"{words.milliseconds(change.before_ms)} → {words.milliseconds(change.after_ms)} from run {change.first + 1} on",
            at=[change.first + 1],
        )
        for change in job.changes
    ]
    return line_chart(
        line_data(axes, [("median step time", [run.median_ms for run in job.runs])], marks=marks)
    )


def grid_of(job: JobHistory) -> Table:
    """A table of the runs. The first run after a change is marked."""
    changed = {change.first: change for change in job.changes}
    has_wall_time = any(run.wall_s is not None for run in job.runs)
    has_restarts = any(run.restarts for run in job.runs)
    rows = []
    for index, run in enumerate(job.runs):
        change = changed.get(index)
        mark = "" if change is None else f"{100 * (change.ratio - 1):+.1f} % from here"
        rows.append(
            [
                (run.started or "time unknown").replace("T", " ")[:16],
                (run.commit or "")[:_COMMIT_LENGTH],
                words.milliseconds(run.median_ms) + _interval(run),
                *(_whole_run(run) if has_wall_time else ()),
                *([str(run.restarts)] if has_restarts else ()),
                "healthy" if run.healthy else run.rule or "no verdict",
                mark,
            ]
        )
    run_columns = [
        *(("wall time", "goodput") if has_wall_time else ()),
        *(["restarts"] if has_restarts else ()),
    ]
    return Table("Runs", ["started (UTC)", "commit", "median step", *run_columns, "verdict", ""], rows)


def _whole_run(run: HistoryRun) -> tuple[str, str]:
    if run.wall_s is None:
        return words.NO_COST, words.NO_COST
    return words.seconds(run.wall_s), words.percent(run.goodput)


def _interval(run: HistoryRun) -> str:
    if run.interval_ms is None or not run.median_ms:
        return ""
    low, high = run.interval_ms
    return f" ±{50 * (high - low) / run.median_ms:.1f} %"


def _sentences(job: JobHistory) -> list[str]:
    sentences = []
    for change in job.changes:
        where = f"{change.source}{f' ({change.commit[:_COMMIT_LENGTH]})' if change.commit else ''}"
        sentences.append(
            f"{'Slower' if change.ratio > 1 else 'Faster'} from {where} on: {words.milliseconds(change.before_ms)} → "
            f"{words.milliseconds(change.after_ms)} per step ({100 * (change.ratio - 1):+.1f} %; p = "
            f"{change.chance:.2g})."
        )
    if job.newest_percent is not None and job.slower:
        sentences.append(f"The newest run is slower than those before it: {job.newest_percent:+.1f} %.")
    elif job.newest_percent is not None and not job.why_undecided:
        sentences.append(
            f"The newest run is not clearly slower than those before it ({job.newest_percent:+.1f} %)."
        )
    if job.why_undecided:
        sentences.append(
            f"{job.why_undecided[0].upper()}{job.why_undecided[1:]}. The newest run does not count as passed."
        )
    return sentences
