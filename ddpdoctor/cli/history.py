"""``ddpdoctor history``: many runs of a job, and where its step time changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from ddpdoctor.cli.diagnosis_of import diagnosing
from ddpdoctor.cli.finite import FiniteRange
from ddpdoctor.cli.numpy_threads import import_numpy_single_threaded
from ddpdoctor.cli.outputs import check_outputs, output_file, say_written, to_stdout
from ddpdoctor.cli.say import say
from ddpdoctor.errors import DdpDoctorError, UnusableInput

if TYPE_CHECKING:
    from ddpdoctor.diagnose.diagnosis import Diagnosis
    from ddpdoctor.report.history import Unread

EXIT_REGRESSION = 1
_MOST_FILES = 10_000
_REPORTS = (".json", ".html")


@click.command("history")
@click.argument("paths", nargs=-1, required=True, metavar="DIR...")
@output_file("--html", says="Write the history as one HTML file.")
@output_file("--json", "json_file", says="Write the history as JSON.")
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
    help="Exit with 1 if a job's newest run is slower by more than this, and not by chance; with 2 if that cannot be decided.",
)
def command(
    paths: tuple[str, ...], html: Path | None, json_file: Path | None, last: int, percent: float | None
) -> None:
    """Show step times and verdicts of many runs over time, and where they changed.

    DIR holds run directories, diagnosis.json files or HTML reports, at any depth. Runs of another script, number of
    ranks, batch size or device are listed as another job.

    \b
    Examples:
      ddpdoctor history ddpdoctor-runs
      ddpdoctor history nightly/ --html history.html --last 10 --fail-on-regression 5
    """
    import_numpy_single_threaded()
    from rich.console import Console

    from ddpdoctor.report.history import history
    from ddpdoctor.report.history_output import print_history, write_history_html, write_history_json
    from ddpdoctor.written import HISTORY, HISTORY_PAGE

    left_out = SkippedSources([], [])
    sources = _without_own(_sources(paths, left_out), [html, json_file])
    check_outputs(
        [file for _, file in sources], {"--html": (html, HISTORY_PAGE), "--json": (json_file, HISTORY)}
    )
    recorded = _recorded(sources, left_out)
    if not recorded:
        said = f"{', '.join(paths)}: no run and no report could be read"
        raise UnusableInput("; ".join([said, *left_out.notes]))
    told = history(recorded, last, left_out.notes, left_out.unread)
    if json_file is not None:
        write_history_json(told, json_file)
    if html is not None:
        write_history_html(told, html)
    if not to_stdout([json_file, html]):
        print_history(told, Console(highlight=False))
    say_written([json_file, html])
    if percent is None:
        return
    slower, undecided = told.regression_percent(), [job for job in told.jobs if job.undecided]
    if slower is not None and slower > percent:
        say(f"Slower by {slower:.1f} %, more than the {percent:g} % allowed.", err=True)
        raise click.exceptions.Exit(EXIT_REGRESSION)
    if undecided:
        raise UnusableInput(f"{undecided[0].job}: a regression cannot be detected: {undecided[0].undecided}.")
    if slower is None:
        raise UnusableInput("no job has a run before its newest: a regression cannot be detected.")


class SkippedSources(NamedTuple):
    """What is not in the history, for its reader in ``notes``, for the gate in ``unread``."""

    notes: list[str]
    unread: list[Unread]

    def add(self, path: str, why: str, started_ns: int | None, command: Sequence[str] = ()) -> None:
        """What is at ``path`` may be a run. ``why`` is a sentence; for the rest see :class:`ddpdoctor.report.history.Unread`."""
        from ddpdoctor.report.history import Unread

        self.unread.append(Unread(path, command, started_ns, why.removesuffix(".")))

    def skip(self, path: str, why: str) -> None:
        """The same, with a note, of what is dated by what it says itself."""
        self.notes.append(f"skipped: {why}")
        command, started_ns = _said_by(path)
        self.add(path, why, started_ns, command)


def _recorded(sources: Sequence[tuple[str, str]], left_out: SkippedSources) -> list[tuple[str, Diagnosis]]:
    """(Where each run lies, with its diagnosis). A diagnosis that was made while the run was recorded, or that cannot be read, is made
    anew from the recording."""
    found: list[tuple[str, Diagnosis]] = []
    with diagnosing() as at:
        for source, file in sources:
            try:
                found.append((source, _newest_of(at, source, file)))
            except DdpDoctorError as error:
                left_out.skip(source, str(error))
    return found


def _newest_of(at: Callable[..., Diagnosis], source: str, file: str) -> Diagnosis:
    from ddpdoctor.diagnose.diagnosis import RUNNING
    from ddpdoctor.report.read import read_diagnosis

    if file == source:
        return at(source) if Path(source).is_dir() else read_diagnosis(source)
    try:
        made = at(file)
    except DdpDoctorError:
        return at(source)
    return at(source) if made.job.end == RUNNING else made


def _said_by(source: str) -> tuple[Sequence[str], int | None]:
    """(Command, start in epoch ns) of a run that cannot be judged; a report tells neither."""
    from ddpdoctor.analysis import command_and_start

    try:
        return command_and_start(source) if Path(source).is_dir() else ([], _changed_ns(source))
    except OSError:
        return [], None


def _changed_ns(path: str) -> int | None:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return None


def _without_own(sources: Iterable[tuple[str, str]], outputs: Sequence[Path | None]) -> list[tuple[str, str]]:
    """``sources`` but for the page that an earlier call wrote to one of ``outputs``, in the folder that it tells of."""
    from ddpdoctor.report.read import read_diagnosis

    left = []
    for source, file in sources:
        if any(path is not None and path.exists() and path.samefile(file) for path in outputs):
            try:
                read_diagnosis(file)
            except DdpDoctorError:
                continue
        left.append((source, file))
    return left


def _sources(paths: Sequence[str], left_out: SkippedSources) -> Iterator[tuple[str, str]]:
    """(Name, what to read) of each run: its own diagnosis where it was made, else the recording; then of reports elsewhere. What
    is left out is put there. A file that has the name of a report, or was given as one, is a report, whatever it holds."""
    from ddpdoctor.report.read import holds_diagnosis, is_page_of_others
    from ddpdoctor.rundir import DIAGNOSIS_FILE, REPORT_FILE, closed_folders, run_directories

    for path in paths:
        if not Path(path).exists():
            raise UnusableInput(f"{path}: no such file or directory")
        runs, errors = run_directories(path) if Path(path).is_dir() else ([], [])
        left_out.notes.extend(sentence.removesuffix(".") for sentence in closed_folders(errors))
        for error in errors:
            folder = str(error.filename)
            left_out.add(folder, closed_folders([error])[0], _changed_ns(folder))
        for run in runs:
            made = Path(run) / DIAGNOSIS_FILE
            yield run, str(made) if holds_diagnosis(made) else run
        for file in _reports(path, set(runs), left_out):
            named = file.name in (DIAGNOSIS_FILE, REPORT_FILE) and not is_page_of_others(file)
            named = named or (file == Path(path) and file.suffix in _REPORTS)
            if named or holds_diagnosis(file):
                yield str(file), str(file)
            elif (why := _why_closed(file)) is not None:
                left_out.skip(str(file), f"{file} cannot be read: {why}")


def _was_run(folder: str, folders: Sequence[str], files: Sequence[str]) -> bool:
    """Whether ``folder``, which holds ``folders`` and ``files`` and is no run directory, is what is left of one, without a report."""
    from ddpdoctor.rundir import DIAGNOSIS_FILE, MANIFEST_FILE, REPORT_FILE, read_json
    from ddpdoctor.rundir.stops import launches_of

    if {DIAGNOSIS_FILE, REPORT_FILE} & {*files}:
        return False
    # Others have a manifest.json, too.
    broken = MANIFEST_FILE in files and read_json(str(Path(folder) / MANIFEST_FILE), []) is None
    return "ranks" in folders or broken or bool(launches_of(folder, []))


def _why_closed(file: Path) -> str | None:
    from ddpdoctor.rundir import open_regular, reason_of

    try:
        os.close(open_regular(str(file), follow=True))
    except OSError as error:
        return reason_of(error).lower()
    return None


def _reports(path: str, runs: set[str], left_out: SkippedSources) -> Iterator[Path]:
    if Path(path).is_file():
        yield Path(path)
        return
    seen = 0
    for parent, folders, files in os.walk(path):
        folders[:] = sorted(
            name for name in folders if str(Path(parent) / name) not in runs and not name.startswith(".")
        )
        if parent in runs:
            folders.clear()
            continue
        if _was_run(parent, folders, files):
            left_out.skip(
                parent,
                f"{parent} is a run, but neither its manifest nor a rank's document or step log can be read",
            )
        for name in sorted(files):
            seen += 1
            if seen > _MOST_FILES:
                said = f"{path} holds more than {_MOST_FILES:,} files: reports among the others are left out."
                left_out.notes.append(said)
                left_out.add(path, said, None)
                return
            if name.endswith(_REPORTS):
                yield Path(parent) / name
