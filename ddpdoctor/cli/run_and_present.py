"""Runs a job, prints its diagnosis, and exits like the job. Used by ``run`` and ``demo``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ddpdoctor.cli.child import ChildFailedError, limit_memory, run_in_child, take_interrupts_as_exceptions
from ddpdoctor.cli.session import import_numpy_single_threaded, say
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.launch.options import RunOptions
from ddpdoctor.launch.session import Outcome, run_job
from ddpdoctor.rundir import DIAGNOSIS_FILE, REPORT_FILE

if TYPE_CHECKING:
    from ddpdoctor.diagnose.diagnosis import Diagnosis

_MIN_TIME_LIMIT_S, _TIME_LIMIT_SHARE = 600.0, 0.1
"""Time limit of the analysis: 10 % of the job's duration, at least 10 minutes."""


@dataclass(frozen=True)
class ReportOptions:
    """What to print and write at the end of a run."""

    analysis: bool = True
    quiet: bool = False
    source_text: bool = True
    static: bool = False


def run_and_present(
    command: Sequence[str],
    options: RunOptions,
    report_options: ReportOptions,
    environment: Mapping[str, str] | None = None,
) -> NoReturn:
    """Run ``command``, print its diagnosis to stderr, and end this process with the job's exit code or signal.

    Raises DdpDoctorError, before the job starts, if the run directory cannot be written.
    """
    began_s = time.monotonic()
    diagnose = partial(_diagnose_hanging, report_options) if report_options.analysis else None
    outcome = run_job(command, options, environment, warn=_say, diagnose=diagnose)
    limit_s = max(_MIN_TIME_LIMIT_S, (time.monotonic() - began_s) * _TIME_LIMIT_SHARE)
    try:
        take_interrupts_as_exceptions()
        _present(outcome, report_options, limit_s)
    except KeyboardInterrupt:
        _say(f"interrupted during the analysis; `ddpdoctor analyze {outcome.run}` repeats it.")
    except ChildFailedError as error:
        _say(
            f"the analysis {error}. The recording in {outcome.run} is complete; `ddpdoctor analyze {outcome.run}`, here or on a "
            "larger machine, has no limits of time and memory."
        )
    except Exception as error:
        _say(f"the run could not be analyzed; the recording is in {outcome.run}: {_error_text(error)}")
    outcome.status.exit_this_process()


def _present(outcome: Outcome, report_options: ReportOptions, limit_s: float) -> None:
    _say(*outcome.unsaved)
    run = outcome.to_analyze
    if run is None:
        _say(*outcome.notes)
    elif not report_options.analysis:
        _say(*outcome.notes, f"recorded in {run}; `ddpdoctor analyze {run}` diagnoses it.")
    elif outcome.interrupted:
        _say(*outcome.notes, f"recorded in {run}, not analyzed because ddpdoctor was interrupted.")
    else:
        # In a child process, so that failures cannot change the job's exit code and manifest.
        run_in_child(lambda: _diagnose(run, report_options), limit_s)


def _diagnose(run: Path, report_options: ReportOptions) -> None:
    """Analyse ``run``, print its diagnosis unless ``quiet``, and write diagnosis and report into the run directory.

    Imports are local, so that they do not delay the job. Raises only MemoryError; other exceptions are printed.
    """
    try:
        diagnosis = _diagnosis_of(run, report_options)
        from rich.console import Console

        from ddpdoctor.report.terminal import print_terminal

        if not report_options.quiet:
            print_terminal(diagnosis, Console(stderr=True))
        _say(*_write_outputs(diagnosis, run, report_options))
        if (run / REPORT_FILE).exists():
            _say(f"report: {run / REPORT_FILE}")
    except MemoryError:
        raise
    except Exception as error:
        _say(f"the run could not be analyzed; the recording is in {run}: {_error_text(error)}")


def _diagnose_hanging(report_options: ReportOptions, run: Path) -> str:
    """Analyse ``run`` while its job hangs, and write diagnosis and report. Returns a sentence for the user."""
    try:
        failed = _write_outputs(_diagnosis_of(run, report_options), run, report_options)
        return failed[0] if failed else f"report: {run / REPORT_FILE}"
    except BaseException as error:
        return f"the recording in {run} could not be analyzed yet: {type(error).__name__}: {error}"


def _diagnosis_of(run: Path, report_options: ReportOptions) -> Diagnosis:
    import_numpy_single_threaded()
    from ddpdoctor.analysis import analyze
    from ddpdoctor.cli.session import configured, shown_progress

    limit_memory()
    with shown_progress() as progress:
        return analyze([str(run)], configured(progress, source_text=report_options.source_text))


def _write_outputs(diagnosis: Diagnosis, run: Path, report_options: ReportOptions) -> list[str]:
    """Write diagnosis and report into the run directory. Returns a sentence for each file that could not be written."""
    from ddpdoctor.report.html import write_html
    from ddpdoctor.report.json_output import write_json

    failed = []
    write_report = partial(write_html, static=report_options.static)
    for write, path in ((write_json, run / DIAGNOSIS_FILE), (write_report, run / REPORT_FILE)):
        try:
            write(diagnosis, path)
        except Exception as error:
            failed.append(f"{path} could not be written: {_error_text(error)}")
    return failed


def _error_text(error: Exception) -> str:
    """The error's text, preceded by the exception's name unless it is one of ddpdoctor's own errors."""
    return str(error) if isinstance(error, DdpDoctorError) else f"{type(error).__name__}: {error}"


def _say(*sentences: str) -> None:
    for sentence in sentences:
        with contextlib.suppress(OSError, ValueError):
            say(f"ddpdoctor: {sentence}", err=True)
