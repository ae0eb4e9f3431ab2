"""``ddpdoctor compare``: whether the job is faster than before, and which findings are resolved or new."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddpdoctor.cli.completion import runs
from ddpdoctor.cli.options import FiniteRange, check_outputs, job_option, output_file, say_written, to_stdout
from ddpdoctor.cli.session import diagnosing, import_numpy_single_threaded, say
from ddpdoctor.errors import UnusableInput

if TYPE_CHECKING:
    from ddpdoctor.report.compare import Comparison

EXIT_REGRESSION = 1


@click.command("compare")
@click.argument("before", metavar="BEFORE", shell_complete=runs)
@click.argument("after", metavar="AFTER", shell_complete=runs)
@output_file("--html", help_text="Write the comparison as one HTML file.")
@output_file("--json", "json_file", help_text="Write the comparison as JSON.")
@click.option(
    "--fail-on-regression",
    "percent",
    type=FiniteRange(min=0),
    metavar="PERCENT",
    help="Exit with 1 if the median step is longer by more than this and the difference is significant; "
    "with 2 if that cannot be determined.",
)
@job_option
def command(
    before: str,
    after: str,
    html: Path | None,
    json_file: Path | None,
    percent: float | None,
    job: int | None,
) -> None:
    """Compare two recordings of a job: step time, where it goes, and the findings.

    Each recording is a run directory, a folder of profiler traces, a diagnosis.json or an HTML report. Jobs with
    different world size, batch size or device are shown side by side without a verdict. The exit code is 0 for any
    result, unless --fail-on-regression is given.

    \b
    Examples:
      ddpdoctor compare ddpdoctor-runs/before ddpdoctor-runs/after
      ddpdoctor compare baseline.json ddpdoctor-runs/after --fail-on-regression 5
    """
    import_numpy_single_threaded()
    from rich.console import Console

    from ddpdoctor.report.compare import compare
    from ddpdoctor.report.json_output import formatted
    from ddpdoctor.report.runs_output import print_comparison, render_comparison
    from ddpdoctor.written import COMPARISON, COMPARISON_PAGE, write_file

    check_outputs([before, after], {"--html": (html, COMPARISON_PAGE), "--json": (json_file, COMPARISON)})
    with diagnosing(job=job) as at:
        comparison = compare(at(before), at(after))
    if json_file is not None:
        write_file(json_file, formatted(comparison), COMPARISON)
    if html is not None:
        write_file(html, render_comparison(comparison), COMPARISON_PAGE)
    print_comparison(comparison, Console(stderr=to_stdout((html, json_file))))
    say_written((html, json_file))
    if percent is not None:
        _exit_by_regression(comparison, percent)


def _exit_by_regression(comparison: Comparison, percent: float) -> None:
    slower = comparison.regression_percent()
    if slower is None:
        raise UnusableInput(f"no result for --fail-on-regression: {comparison.verdict}")
    after = comparison.after
    if slower > percent and not after.running:
        say(f"ddpdoctor: the median step is {slower:.1f} % longer, more than {percent:g} %.", err=True)
        sys.exit(EXIT_REGRESSION)
    if after.stopped:
        raise UnusableInput(
            f"no result for --fail-on-regression: the job after {after.stopped}; a job that did not complete does not "
            "count as passed."
        )
