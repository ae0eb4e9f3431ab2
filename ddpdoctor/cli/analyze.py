"""``ddpdoctor analyze``: diagnose recorded runs or profiler traces."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddpdoctor.cli.completion import runs
from ddpdoctor.cli.options import (
    check_outputs,
    job_option,
    open_in_browser,
    output_file,
    processes_option,
    say_written,
    temporary_report,
    to_stdout,
)
from ddpdoctor.cli.session import (
    diagnosis_at,
    import_numpy_single_threaded,
    per_item_progress,
    say,
    shown_progress,
)
from ddpdoctor.errors import DdpDoctorError, UnusableInput
from ddpdoctor.severities import SEVERITIES, is_as_severe
from ddpdoctor.stages import no_progress

if TYPE_CHECKING:
    from ddpdoctor.diagnose.diagnosis import Diagnosis
    from ddpdoctor.written import Form

EXIT_FAIL_ON = 1
_COLOUR_VARIABLES = {"FORCE_COLOR", "TTY_COMPATIBLE"}
"""Environment variables with which Rich may use colours although its output is not a terminal."""


@click.command("analyze")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", shell_complete=runs)
@output_file("--html", help_text="Write the report as one HTML file.")
@click.option(
    "--open",
    "opened",
    is_flag=True,
    help="Open the HTML report in the browser; without --html, a temporary file.",
)
@output_file("--json", "json_file", help_text="Write diagnosis.json.")
@output_file("--markdown", help_text="Write Markdown, for a ticket.")
@output_file("--sarif", help_text="Write SARIF 2.1.0, for code hosts.")
@output_file("--junit", help_text="Write JUnit XML, for CI.")
@click.option(
    "--fail-on",
    type=click.Choice(SEVERITIES),
    metavar="SEVERITY",
    help="Exit with 1 if a finding is at least this severe: critical, warning or info; with 2 if that cannot be determined.",
)
@click.option(
    "--rules",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Additional folder of rules; can be repeated.",
)
@processes_option
@click.option("--no-cache", is_flag=True, help="Neither use nor write the cache of traces.")
@click.option(
    "--engine",
    metavar="E",
    help="Read traces on a cluster: dask://HOST:PORT or ray://HOST:PORT; dask or ray alone uses the cluster of the environment, "
    "or else starts one on this machine's loopback (needs ddpdoctor[dask] or [ray]).",
)
@job_option
@click.option(
    "--window",
    type=click.IntRange(min=1),
    metavar="N",
    help="Use the profiler window with this number from `ddpdoctor capture`, not the first one.",
)
@click.option(
    "--attempt",
    type=click.IntRange(min=1),
    metavar="N",
    help="Of a run that was restarted, measure the steps of this attempt, not of the longest one.",
)
@click.option(
    "--training",
    type=click.IntRange(min=1),
    metavar="N",
    help="Where the same processes train several models one after the other, measure this training, not the longest one.",
)
@click.option("--hta", is_flag=True, help="Add the results of HolisticTraceAnalysis (needs ddpdoctor[hta]).")
@click.option(
    "--redact",
    "redacted",
    is_flag=True,
    help="Remove host names, user names, paths and arguments from all outputs.",
)
@click.option("--no-source-text", is_flag=True, help="Show only file and line, not the text of source lines.")
@click.option("--static", is_flag=True, help="Omit interactive charts from the HTML (0.6 MB smaller).")
@click.option("-q", "--quiet", is_flag=True, help="Print only the verdict.")
@click.option(
    "-v", "--verbose", is_flag=True, help="Also print the evidence of all findings, and the skipped rules."
)
def command(
    paths: tuple[str, ...],
    html: Path | None,
    opened: bool,
    json_file: Path | None,
    markdown: Path | None,
    sarif: Path | None,
    junit: Path | None,
    fail_on: str | None,
    rules: tuple[Path, ...],
    jobs: int | None,
    no_cache: bool,
    engine: str | None,
    job: int | None,
    window: int | None,
    attempt: int | None,
    training: int | None,
    hta: bool,
    redacted: bool,
    no_source_text: bool,
    static: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Diagnose run directories, or profiler traces: folders, globs, single files, URLs.

    Several run directories are joined into one job (one per host). A diagnosis.json or an HTML report is shown
    again. The output file - is standard output; the summary then goes to stderr.

    \b
    Examples:
      ddpdoctor analyze ddpdoctor-runs/20260101T120000Z-train
      ddpdoctor analyze traces/ --html report.html --open
      ddpdoctor analyze 'traces/rank*.json.gz' --fail-on warning --json diagnosis.json
    """
    from ddpdoctor import written

    if opened and to_stdout([html]):
        raise DdpDoctorError("--open needs a file: name one with --html, or leave --html out.")
    outputs = {
        "--html": (html, written.REPORT),
        "--json": (json_file, written.DIAGNOSIS),
        "--markdown": (markdown, written.MARKDOWN),
        "--sarif": (sarif, written.SARIF),
        "--junit": (junit, written.JUNIT),
    }
    import_numpy_single_threaded()
    check_outputs(paths, outputs)
    options: dict[str, Any] = {
        "jobs": jobs,
        "cache": not no_cache,
        "engine": engine,
        "job": job,
        "window": window,
        "attempt": attempt,
        "training": training,
        "hta": hta,
        "source_text": not no_source_text,
    }
    diagnosis = diagnosis_at(*paths, rules=rules, **options)

    if redacted:
        from ddpdoctor.report.redaction import redact

        diagnosis = redact(diagnosis)
    if no_source_text:
        from ddpdoctor.report.redaction import without_source_text

        diagnosis = without_source_text(diagnosis)
    if opened:
        html = html or temporary_report()
        outputs["--html"] = html, written.REPORT
    contents = _contents(diagnosis, static, fail_on or "warning")
    files = [path for path, _ in outputs.values()]
    _write_all(
        [(contents[option], path, form) for option, (path, form) in outputs.items() if path is not None],
        report_on_stdout=to_stdout(files),
    )
    _show(diagnosis, files, quiet=quiet, verbose=verbose, hint=html is None)
    if opened and html is not None:
        open_in_browser(html)
    if fail_on is not None:
        _exit_by_severity(diagnosis, fail_on)


def _show(
    diagnosis: Diagnosis, files: Sequence[Path | None], *, quiet: bool, verbose: bool, hint: bool
) -> None:
    """Print the diagnosis and the written ``files``. ``hint``: on a terminal, also name the options that write HTML."""
    on_stderr = to_stdout(files)
    stream = sys.stderr if on_stderr else sys.stdout
    # Without colours, one line needs neither Rich nor the rest of the report, whose import takes a twentieth of a small analysis.
    if quiet and not (stream.isatty() or _COLOUR_VARIABLES & os.environ.keys()):
        say(diagnosis.verdict.headline, err=on_stderr)
        return
    from rich.console import Console

    from ddpdoctor.report.terminal import print_terminal

    console = Console(stderr=on_stderr)
    print_terminal(diagnosis, console, quiet=quiet, verbose=verbose)
    if quiet:
        return
    say_written(files)
    if hint and console.is_terminal:
        say("`--open` shows the report with its charts in the browser; `--html F` writes it.", err=True)


def _contents(diagnosis: Diagnosis, static: bool, fail_on: str) -> dict[str, Callable[[], str | bytes]]:
    """By option, a function that renders the output. Only what is written is imported."""

    def html() -> str:
        from ddpdoctor.report.html import render_html

        return render_html(diagnosis, static=static)

    def as_json() -> bytes:
        from ddpdoctor.report.json_output import formatted

        return formatted(diagnosis)

    def markdown() -> str:
        from ddpdoctor.report.markdown import render_markdown

        return render_markdown(diagnosis)

    def sarif() -> bytes:
        from ddpdoctor.report.json_output import formatted
        from ddpdoctor.report.sarif import to_sarif

        return formatted(to_sarif(diagnosis))

    def junit() -> str:
        from ddpdoctor.report.junit import render_junit

        return render_junit(diagnosis, fail_on=fail_on)

    return {"--html": html, "--json": as_json, "--markdown": markdown, "--sarif": sarif, "--junit": junit}


def _exit_by_severity(diagnosis: Diagnosis, fail_on: str) -> None:
    from ddpdoctor.report.words import why_not_passed

    if any(is_as_severe(each.severity, fail_on) for each in diagnosis.findings):
        sys.exit(EXIT_FAIL_ON)
    if (why := why_not_passed(diagnosis)) is not None:
        raise UnusableInput(f"no result for --fail-on: {why}.")


def _write_all(
    outputs: Sequence[tuple[Callable[[], str | bytes], Path, Form]], *, report_on_stdout: bool
) -> None:
    """Write (content, path, kind) of each output."""
    from ddpdoctor.written import write_file

    if not outputs:
        return
    # A progress line would mix with a report on standard output if both are the same terminal.
    with nullcontext(no_progress) if report_on_stdout else shown_progress() as progress:
        progress_of_outputs = per_item_progress(progress, len(outputs))
        for (content, path, form), _ in zip(outputs, progress_of_outputs, strict=True):
            try:
                write_file(path, content(), form)
            except OSError as error:
                raise DdpDoctorError(f"{path} cannot be written: {error.strerror or error}.") from error
