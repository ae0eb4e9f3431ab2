"""Functions shared by the commands: output lines, progress, configuration, and diagnoses of paths."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddpdoctor.plain import plain
from ddpdoctor.stages import Progress, Stage, no_progress

if TYPE_CHECKING:
    from ddpdoctor.analysis import Options
    from ddpdoctor.diagnose.config import Config
    from ddpdoctor.diagnose.diagnosis import Diagnosis


def say(sentence: str, *, err: bool = False) -> None:
    """Print ``sentence`` as one line without control characters on stdout or, if ``err``, on stderr. Raises OSError."""
    click.echo(plain(sentence), err=err)


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """Context that shows stage, progress and elapsed time of an analysis on stderr, if it is a terminal."""
    if not sys.stderr.isatty():
        yield no_progress
        return
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.SpinnerColumn(),
        rich_progress.TextColumn("{task.description}"),
        rich_progress.TimeElapsedColumn(),
    )
    # Standard output may be a report.
    with rich_progress.Progress(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=False
    ) as line:
        # Shown until the modules of the analysis are imported.
        task = line.add_task("starting", total=None)
        current: list[Stage] = []

        def show(stage: Stage, part: float | None) -> None:
            begins = current != [stage]
            current[:] = [stage]
            line.update(task, description=_progress_text(stage, part), refresh=begins)

        yield show


def per_item_progress(progress: Progress, count: int) -> Iterator[Callable[[float], None]]:
    """Yields, for each of ``count`` outputs, a function to report the completed share of the output, 0 to 1."""
    for index in range(count):

        def on_progress(part: float, index: int = index) -> None:
            progress(Stage.REPORT, (index + part) / count)

        on_progress(0.0)
        yield on_progress


def _progress_text(stage: Stage, part: float | None) -> str:
    """The progress as text: ``2/7 reading traces, 40 %``."""
    stages = list(Stage)
    done = "" if part is None else f", {part:.0%}".replace("%", " %")
    return f"{stages.index(stage) + 1}/{len(stages)} {stage}{done}"


def import_numpy_single_threaded() -> None:
    """Import NumPy with a single thread for linear algebra. Call this before another module imports NumPy.

    OpenBLAS starts a thread per processor when it is loaded, and each thread spins before it sleeps. With two processors this takes
    0.1 CPU seconds, as long as the import itself, and the analysis never uses the threads. Only the command line does this, not
    scripts that import ddpdoctor. The environment variable is removed again, because a job would inherit it.
    """
    if "OPENBLAS_NUM_THREADS" in os.environ:
        return
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        import numpy  # noqa: F401
    finally:
        del os.environ["OPENBLAS_NUM_THREADS"]


def load_configuration() -> Config:
    """The configuration from the working directory or a folder above it. Prints a note for each file that is ignored because another
    user owns it."""
    from ddpdoctor.diagnose.config import load_config

    config = load_config(Path.cwd())
    for sentence in config.ignored_files:
        say(f"Note: {sentence}", err=True)
    return config


def configured(progress: Progress = no_progress, rules: Sequence[Path] = (), **fields: Any) -> Options:
    """Options of the analysis, from ``ddpdoctor.toml`` or ``pyproject.toml`` in the working directory or above it.

    ``rules``: additional folders of rules. ``fields``: further fields of :class:`Options`. Raises DdpDoctorError if a file cannot
    be read or names a rule or threshold that does not exist.
    """
    from ddpdoctor.analysis import Options
    from ddpdoctor.diagnose.config import check_config
    from ddpdoctor.diagnose.load import load_rules

    config = load_configuration()
    loaded = load_rules([*config.rules, *rules])
    check_config(config, loaded)
    return Options(
        loaded_rules=loaded,
        thresholds=config.thresholds,
        suppressed=config.suppress,
        suppressed_by=config.file or "",
        progress=progress,
        **fields,
    )


@contextmanager
def diagnosing(rules: Sequence[Path] = (), **fields: Any) -> Iterator[Callable[..., Diagnosis]]:
    """Context with a function that returns the diagnosis of paths: it reads a single diagnosis.json or report, else it analyses.

    ``fields``: fields of :class:`ddpdoctor.analysis.Options`. Rules and configuration are read once, and only if needed. The function
    raises DdpDoctorError.
    """
    with shown_progress() as progress:
        from ddpdoctor.analysis import analyze_or_read

        options = cache(partial(configured, progress, rules, **fields))
        yield lambda *paths: analyze_or_read(paths, options)


def diagnosis_at(*paths: str, rules: Sequence[Path] = (), **fields: Any) -> Diagnosis:
    """The diagnosis of ``paths``, see :func:`diagnosing`."""
    with diagnosing(rules, **fields) as at:
        return at(*paths)
