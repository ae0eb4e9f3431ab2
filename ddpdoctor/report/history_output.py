"""A history on the terminal, as JSON, and as one HTML file."""

from __future__ import annotations

import os

from rich.console import Console
from rich.text import Text

from ddpdoctor.plain import plain
from ddpdoctor.report import words
from ddpdoctor.report.charts.lines import ChartAxes, LineChart, Mark, line_chart, line_data
from ddpdoctor.report.compare_output import Grid, table_of
from ddpdoctor.report.console_output import print_wrapped, truncated
from ddpdoctor.report.history import History, HistoryRun, JobHistory
from ddpdoctor.report.html import render_plain
from ddpdoctor.report.json_output import formatted
from ddpdoctor.written import HISTORY, HISTORY_PAGE, write_file

_COMMIT = 10
"""Characters of a commit that are shown."""
_LEAST_DRAWN = 3
"""Fewest runs of a chart: two are compared faster in the table."""
_CHART_HEIGHT = 140
"""Pixels."""


def write_history_json(history: History, path: str | os.PathLike[str]) -> None:
    """Write the history as JSON (schema ``ddpdoctor.history/1``). Raises DdpDoctorError where it cannot."""
    write_file(path, formatted(history), HISTORY)


def write_history_html(history: History, path: str | os.PathLike[str]) -> None:
    """Write the history as one HTML document without scripts. Raises DdpDoctorError where it cannot."""
    jobs = [(job, _sentences(job), chart_of(job), [grid_of(job)]) for job in history.jobs]
    write_file(path, render_plain("history.html.j2", jobs=jobs, notes=history.notes), HISTORY_PAGE)


def print_history(history: History, console: Console) -> None:
    """Print each job with its changes and runs, the newest run last."""
    for number, job in enumerate(history.jobs):
        if number:
            console.print()
        print_wrapped(console, Text(plain(truncated(job.job)), style="bold"))
        for sentence in _sentences(job):
            print_wrapped(console, Text(plain(truncated(sentence))))
        print_wrapped(console, table_of(grid_of(job)))
    for note in history.notes:
        print_wrapped(console, Text(plain(truncated(f"Note: {note}")), style="dim"))


def chart_of(job: JobHistory) -> LineChart | None:
    """The median step time of each run, with a mark where it changed; None with fewer than ``_LEAST_DRAWN`` runs that have one."""
    if sum(run.median_ms is not None for run in job.runs) < _LEAST_DRAWN:
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


def grid_of(job: JobHistory) -> Grid:
    """The runs as a table of text; the first run after a change is marked."""
    changed = {change.first: change for change in job.changes}
    is_accounted = any(run.wall_s is not None for run in job.runs)
    is_restarted = any(run.restarts for run in job.runs)
    rows = []
    for index, run in enumerate(job.runs):
        change = changed.get(index)
        mark = "" if change is None else f"{100 * (change.ratio - 1):+.1f} % from here"
        rows.append(
            [
                (run.started or "time unknown").replace("T", " ")[:16],
                (run.commit or "")[:_COMMIT],
                words.milliseconds(run.median_ms) + _interval(run),
                *(_whole_run(run) if is_accounted else ()),
                *([str(run.restarts)] if is_restarted else ()),
                "healthy" if run.healthy else run.rule or "no verdict",
                mark,
            ]
        )
    of_run = [*(("wall time", "goodput") if is_accounted else ()), *(["restarts"] if is_restarted else ())]
    return Grid("Runs", ["started (UTC)", "commit", "median step", *of_run, "verdict", ""], rows)


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
        where = f"{change.source}{f' ({change.commit[:_COMMIT]})' if change.commit else ''}"
        sentences.append(
            f"{'Slower' if change.ratio > 1 else 'Faster'} from {where} on: {words.milliseconds(change.before_ms)} → "
            f"{words.milliseconds(change.after_ms)} per step ({100 * (change.ratio - 1):+.1f} %; p = "
            f"{change.chance:.2g})."
        )
    if job.newest_percent is not None and job.slower:
        sentences.append(f"The newest run is slower than those before it: {job.newest_percent:+.1f} %.")
    elif job.newest_percent is not None and not job.undecided:
        sentences.append(
            f"The newest run is not clearly slower than those before it ({job.newest_percent:+.1f} %)."
        )
    if job.undecided:
        sentences.append(
            f"{job.undecided[0].upper()}{job.undecided[1:]}. The newest run does not count as passed."
        )
    return sentences
