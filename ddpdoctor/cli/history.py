"""``ddpdoctor history``: many runs of a job, and when its step time changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from ddpdoctor.cli.options import FiniteRange, check_outputs, output_file, say_written, to_stdout
from ddpdoctor.cli.session import diagnosing, import_numpy_single_threaded, say
from ddpdoctor.errors import DdpDoctorError, UnusableInput

if TYPE_CHECKING:
    from ddpdoctor.diagnose.diagnosis import Diagnosis
    from ddpdoctor.report.history import Unread

EXIT_REGRESSION = 1
_MAX_FILES = 10_000
_REPORT_SUFFIXES = (".json", ".html")


@click.command("history")
@click.argument("paths", nargs=-1, required=True, metavar="DIR...")
@output_file("--html", help_text="Write the history as one HTML file.")
@output_file("--json", "json_file", help_text="Write the history as JSON.")
@click.option(
    "--last",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    metavar="N",
    help="Compare each job's newest run with the N before it.",
)
@click.option(
    "--fail-on-regression",
    "percent",
    type=FiniteRange(min=0),
    metavar="PERCENT",
    help="Exit with 1 if a job's newest run is significantly slower, by more than this; with 2 if that cannot be determined.",
)
def command(
    paths: tuple[str, ...], html: Path | None, json_file: Path | None, last: int, percent: float | None
) -> None:
    """Show step times and verdicts of many runs over time, and when the step time changed.

    DIR contains run directories, diagnosis.json files or HTML reports, at any depth. Runs with a different script,
    number of ranks, batch size or device are listed as different jobs.

    \b
    Examples:
      ddpdoctor history ddpdoctor-runs
      ddpdoctor history nightly/ --html history.html --last 10 --fail-on-regression 5
    """
    import_numpy_single_threaded()
    from rich.console import Console

    from ddpdoctor.report.history import history
    from ddpdoctor.report.json_output import formatted
    from ddpdoctor.report.runs_output import print_history, render_history
    from ddpdoctor.written import HISTORY, HISTORY_PAGE, write_file

    skipped = SkippedSources([], [])
    sources = _without_outputs(_sources(paths, skipped), [html, json_file])
    check_outputs(
        [file for _, file in sources], {"--html": (html, HISTORY_PAGE), "--json": (json_file, HISTORY)}
    )
    recorded = _diagnoses(sources, skipped)
    if not recorded:
        reason = (
            f"{', '.join(paths)}: no run and no report could be read. A run directory is made by `ddpdoctor run`, a report of traces by "
            "`ddpdoctor analyze TRACES --json diagnosis.json`"
        )
        raise UnusableInput("; ".join([reason, *skipped.notes]))
    result = history(recorded, last, skipped.notes, skipped.unread)
    if json_file is not None:
        write_file(json_file, formatted(result), HISTORY)
    if html is not None:
        write_file(html, render_history(result), HISTORY_PAGE)
    if not to_stdout([json_file, html]):
        print_history(result, Console(highlight=False))
    say_written([json_file, html])
    if percent is None:
        return
    slower, undecided_jobs = result.regression_percent(), [job for job in result.jobs if job.why_undecided]
    if slower is not None and slower > percent:
        say(f"ddpdoctor: the newest run is slower by {slower:.1f} %, more than {percent:g} %.", err=True)
        raise click.exceptions.Exit(EXIT_REGRESSION)
    if undecided_jobs:
        raise UnusableInput(
            f"{undecided_jobs[0].job}: a regression cannot be detected: {undecided_jobs[0].why_undecided}."
        )
    if slower is None:
        raise UnusableInput("no job has two runs to compare: a regression cannot be detected.")


class SkippedSources(NamedTuple):
    """Files and folders that are missing in the history: ``notes`` for the user, ``unread`` for --fail-on-regression."""

    notes: list[str]
    unread: list[Unread]

    def add(self, path: str, why: str, started_ns: int | None, command: Sequence[str] = ()) -> None:
        """Add ``path``, which may be a run. ``why``: a sentence; see :class:`ddpdoctor.report.history.Unread`."""
        from ddpdoctor.report.history import Unread

        self.unread.append(Unread(path, command, started_ns, why.removesuffix(".")))

    def skip(self, path: str, why: str) -> None:
        """Add ``path`` and a note. Command and start time are read from ``path``."""
        self.notes.append(f"skipped: {why}")
        command, started_ns = _command_and_start(path)
        self.add(path, why, started_ns, command)


def _diagnoses(sources: Sequence[tuple[str, str]], skipped: SkippedSources) -> list[tuple[str, Diagnosis]]:
    """(Path, diagnosis) of each run. If a stored diagnosis is of a running job or cannot be read, the recording is analysed again."""
    found: list[tuple[str, Diagnosis]] = []
    with diagnosing() as diagnose:
        for source, file in sources:
            try:
                found.append((source, _newest_diagnosis(diagnose, source, file)))
            except DdpDoctorError as error:
                skipped.skip(source, str(error))
    return found


def _newest_diagnosis(diagnose: Callable[..., Diagnosis], source: str, file: str) -> Diagnosis:
    from ddpdoctor.diagnose.diagnosis import RUNNING
    from ddpdoctor.report.read import read_diagnosis

    if file == source:
        return diagnose(source) if Path(source).is_dir() else read_diagnosis(source)
    try:
        report = diagnose(file)
    except DdpDoctorError:
        return diagnose(source)
    return diagnose(source) if report.job.end == RUNNING else report


def _command_and_start(source: str) -> tuple[Sequence[str], int | None]:
    """(Command, start in epoch ns) of a run directory; for a report ([], modification time)."""
    from ddpdoctor.analysis import command_and_start

    try:
        return command_and_start(source) if Path(source).is_dir() else ([], _modified_ns(source))
    except OSError:
        return [], None


def _modified_ns(path: str) -> int | None:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return None


def _without_outputs(
    sources: Iterable[tuple[str, str]], outputs: Sequence[Path | None]
) -> list[tuple[str, str]]:
    """``sources`` without histories that an earlier call wrote to ``outputs`` inside the analysed folder."""
    from ddpdoctor.report.read import read_diagnosis

    remaining = []
    for source, file in sources:
        if any(path is not None and path.exists() and path.samefile(file) for path in outputs):
            try:
                read_diagnosis(file)
            except DdpDoctorError:
                continue
        remaining.append((source, file))
    return remaining


def _sources(paths: Sequence[str], skipped: SkippedSources) -> Iterator[tuple[str, str]]:
    """(Name, path to read) of each run and of reports outside of runs. For a run, the diagnosis is read if there is one.

    Adds unreadable files and folders to ``skipped``. Files with the name of a report, or given by the user, always count as reports.
    """
    from ddpdoctor.report.read import holds_diagnosis, is_foreign_page
    from ddpdoctor.rundir import DIAGNOSIS_FILE, REPORT_FILE, closed_folders, run_directories

    for path in paths:
        if not Path(path).exists():
            raise UnusableInput(f"{path}: no such file or directory")
        runs, errors = run_directories(path) if Path(path).is_dir() else ([], [])
        skipped.notes.extend(sentence.removesuffix(".") for sentence in closed_folders(errors))
        for error in errors:
            folder = str(error.filename)
            skipped.add(folder, closed_folders([error])[0], _modified_ns(folder))
        for run in runs:
            report = Path(run) / DIAGNOSIS_FILE
            yield run, str(report) if holds_diagnosis(report) else run
        for file in _reports(path, set(runs), skipped):
            is_report = file.name in (DIAGNOSIS_FILE, REPORT_FILE) and not is_foreign_page(file)
            is_report = is_report or (file == Path(path) and file.suffix in _REPORT_SUFFIXES)
            if is_report or holds_diagnosis(file):
                yield str(file), str(file)
            elif (why := _read_error(file)) is not None:
                skipped.skip(str(file), f"{file} cannot be read: {why}")


def _is_damaged_run(folder: str, folders: Sequence[str], files: Sequence[str]) -> bool:
    """Whether ``folder``, which is not a run directory now, is a damaged one without a report. ``folders`` and ``files``: its content."""
    from ddpdoctor.rundir import DIAGNOSIS_FILE, MANIFEST_FILE, REPORT_FILE, read_json
    from ddpdoctor.rundir.stops import launches_of

    if {DIAGNOSIS_FILE, REPORT_FILE} & {*files}:
        return False
    # Other programs also write a manifest.json, so it counts only if it cannot be read.
    broken = MANIFEST_FILE in files and read_json(str(Path(folder) / MANIFEST_FILE), []) is None
    return "ranks" in folders or broken or bool(launches_of(folder, []))


def _read_error(file: Path) -> str | None:
    from ddpdoctor.rundir import open_regular, reason_of

    try:
        os.close(open_regular(str(file), follow=True))
    except OSError as error:
        return reason_of(error).lower()
    return None


def _reports(path: str, runs: set[str], skipped: SkippedSources) -> Iterator[Path]:
    if Path(path).is_file():
        yield Path(path)
        return
    files_seen = 0
    for parent, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if parent in runs:
            folders.clear()
            continue
        if _is_damaged_run(parent, folders, files):
            skipped.skip(
                parent,
                f"{parent} is a run, but neither its manifest nor a rank's document or step log can be read",
            )
        for name in sorted(files):
            files_seen += 1
            if files_seen > _MAX_FILES:
                reason = (
                    f"{path} contains more than {_MAX_FILES:,} files: reports among the others are skipped."
                )
                skipped.notes.append(reason)
                skipped.add(path, reason, None)
                return
            if name.endswith(_REPORT_SUFFIXES):
                yield Path(parent) / name
