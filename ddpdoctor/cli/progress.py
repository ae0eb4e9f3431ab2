"""The progress line of commands that can take longer than a second."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from ddpdoctor.stages import Progress, Stage, no_progress


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """A line on stderr with the stage of the analysis, its progress and the elapsed time; nothing if stderr is not a terminal."""
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
    # Standard output may be the file of a report.
    with rich_progress.Progress(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=False
    ) as line:
        # Shown until the analysis is loaded.
        task = line.add_task("starting", total=None)
        current: list[Stage] = []

        def show(stage: Stage, part: float | None) -> None:
            begins = current != [stage]
            current[:] = [stage]
            line.update(task, description=_words(stage, part), refresh=begins)

        yield show


def per_item_progress(progress: Progress, stage: Stage, count: int) -> Iterator[Callable[[float], None]]:
    """For each of ``count`` items of a stage, in order, a function that takes the share of the item that is done, 0 to 1."""
    for index in range(count):
        on_progress = partial(_report_item, progress, stage, index, count)
        on_progress(0.0)
        yield on_progress


def _report_item(progress: Progress, stage: Stage, index: int, count: int, part: float) -> None:
    progress(stage, (index + part) / count)


def _words(stage: Stage, part: float | None) -> str:
    """``2/7 reading traces, 40 %``."""
    stages = list(Stage)
    done = "" if part is None else f", {part:.0%}".replace("%", " %")
    return f"{stages.index(stage) + 1}/{len(stages)} {stage}{done}"
