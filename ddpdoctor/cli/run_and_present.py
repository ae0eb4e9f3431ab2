"""What ``run`` and ``demo`` share: run the job, then diagnose and present it, and end as the job did."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ddpdoctor.cli.child import ChildFailedError, bound_memory, run_in_child, take_interrupts_as_exceptions
from ddpdoctor.cli.numpy_threads import import_numpy_single_threaded
from ddpdoctor.cli.say import say
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.launch import Outcome, RunOptions, run_job
from ddpdoctor.rundir import DIAGNOSIS_FILE, REPORT_FILE

if TYPE_CHECKING:
    from ddpdoctor.diagnose.diagnosis import Diagnosis

_LEAST_LIMIT_S, _LIMIT_SHARE = 600.0, 0.1
"""What the analysis may take: a share of the job's own time, or ten minutes if that is more."""


@dataclass(frozen=True)
class ReportOptions:
    """What to say at the end of a run."""

    analysis: bool = True
    quiet: bool = False
    source_text: bool = True
    static: bool = False


def run_and_present(
    command: Sequence[str],
    options: RunOptions,
    presentation: ReportOptions,
    environment: Mapping[str, str] | None = None,
) -> NoReturn:
    """Run ``command``, present its diagnosis on stderr, and end this process with the job's own exit code or
    signal.

    Raises DdpDoctorError before the job is started where the run directory must not be written to.
    """
    began_s = time.monotonic()
    diagnose = partial(_diagnose_hanging, presentation) if presentation.analysis else None
    outcome = run_job(command, options, environment, warn=_say, diagnose=diagnose)
    limit_s = max(_LEAST_LIMIT_S, (time.monotonic() - began_s) * _LIMIT_SHARE)
    try:
        take_interrupts_as_exceptions()
        _present(outcome, presentation, limit_s)
    except KeyboardInterrupt:
        _say(f"stopped before the analysis ended; `ddpdoctor analyze {outcome.run}` repeats it.")
    except ChildFailedError as error:
        _say(
            f"the analysis {error}. The recording is complete in {outcome.run}, and `ddpdoctor analyze {outcome.run}`, there or "
            "on a larger machine, takes what it needs."
        )
    except Exception as error:
        _say(f"the run could not be analysed, the recording is in {outcome.run}: {_words(error)}")
    outcome.status.take()


def _present(outcome: Outcome, presentation: ReportOptions, limit_s: float) -> None:
    _say_all(outcome.unsaved)
    run = outcome.to_analyze
    if run is None:
        _say_all(outcome.notes)
    elif not presentation.analysis:
        _say_all([*outcome.notes, f"recorded in {run}; `ddpdoctor analyze {run}` diagnoses it."])
    elif outcome.interrupted:
        _say_all([*outcome.notes, f"recorded in {run}, not analysed because ddpdoctor was asked to stop."])
    else:
        # The job's exit code and its manifest are settled: nothing that happens from here on may change them.
        run_in_child(lambda: _try_to_diagnose(run, presentation), limit_s)


def _try_to_diagnose(run: Path, presentation: ReportOptions) -> None:
    try:
        _diagnose(run, presentation)
    except MemoryError:
        raise
    except Exception as error:
        _say(f"the run could not be analysed, the recording is in {run}: {_words(error)}")


def _diagnose(run: Path, presentation: ReportOptions) -> None:
    """Analyse ``run``, print its diagnosis unless it is to be quiet, write it and the report into the run directory.

    The imports stand here because the job must not pay for them.
    """
    diagnosis = _diagnosis_of(run, presentation)
    from rich.console import Console

    from ddpdoctor.report import print_terminal

    if not presentation.quiet:
        print_terminal(diagnosis, Console(stderr=True))
    _say_all(_written(diagnosis, run, presentation))
    if (run / REPORT_FILE).exists():
        _say(f"report: {run / REPORT_FILE}")


def _diagnose_hanging(presentation: ReportOptions, run: Path) -> str:
    """Analyse ``run`` while its job hangs: the report is written; returns a sentence for the user."""
    try:
        failed = _written(_diagnosis_of(run, presentation), run, presentation)
        return failed[0] if failed else f"report: {run / REPORT_FILE}"
    except BaseException as error:
        return f"what the ranks did last is in {run}; it could not be analysed yet: {type(error).__name__}: {error}"


def _diagnosis_of(run: Path, presentation: ReportOptions) -> Diagnosis:
    import_numpy_single_threaded()
    from ddpdoctor.analysis import analyze
    from ddpdoctor.cli.progress import shown_progress
    from ddpdoctor.cli.project_config import configured

    bound_memory()
    with shown_progress() as progress:
        return analyze([str(run)], configured(progress, source_text=presentation.source_text))


def _written(diagnosis: Diagnosis, run: Path, presentation: ReportOptions) -> list[str]:
    """Write the diagnosis and its report into the run directory; what could not be written, in sentences."""
    from ddpdoctor.report import write_html, write_json

    failed = []
    write_report = partial(write_html, static=presentation.static)
    for write, path in ((write_json, run / DIAGNOSIS_FILE), (write_report, run / REPORT_FILE)):
        try:
            write(diagnosis, path)
        except Exception as error:
            failed.append(f"{path} could not be written: {_words(error)}")
    return failed


def _words(error: Exception) -> str:
    """The error's text; where that is no sentence for the user, with the error's name."""
    return str(error) if isinstance(error, DdpDoctorError) else f"{type(error).__name__}: {error}"


def _say_all(sentences: Sequence[str]) -> None:
    for sentence in sentences:
        _say(sentence)


def _say(sentence: str) -> None:
    try:
        say(f"ddpdoctor: {sentence}", err=True)
    except (OSError, ValueError):
        pass
