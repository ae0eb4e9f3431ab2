"""The progress of commands that may take longer than a second."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from ddpdoctor.stages import Progress, Stage, no_progress


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """A line on stderr with the stage of the analysis, what is done of it and the time since the start; nothing where stderr
    is no terminal."""
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
    # Standard output is another file, perhaps, in which a report is to stand.
    with rich_progress.Progress(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=False
    ) as line:
        # Until the analysis itself is loaded.
        task = line.add_task("starting", total=None)
        shown: list[Stage] = []

        def show(stage: Stage, part: float | None) -> None:
            begins = shown != [stage]
            shown[:] = [stage]
            line.update(task, description=_words(stage, part), refresh=begins)

        yield show


def per_item_progress(progress: Progress, stage: Stage, count: int) -> Iterator[Callable[[float], None]]:
    """For each of ``count`` things that a stage does one after the other, as it begins, what tells which part of it is done."""
    for place in range(count):
        told = partial(_print_per_item, progress, stage, place, count)
        told(0.0)
        yield told


def _print_per_item(progress: Progress, stage: Stage, place: int, count: int, part: float) -> None:
    progress(stage, (place + part) / count)


def _words(stage: Stage, part: float | None) -> str:
    """``2/7 reading traces, 40 %``."""
    stages = list(Stage)
    done = "" if part is None else f", {part:.0%}".replace("%", " %")
    return f"{stages.index(stage) + 1}/{len(stages)} {stage}{done}"
