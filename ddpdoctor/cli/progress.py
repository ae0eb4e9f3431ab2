"""The progress bar of commands that may take longer than a second."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def reading_traces() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr; call what it gives with (files done, files in all). None where stderr is no terminal.

    Once all files are read, and where there are none, the bar says that they are being measured.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        bar = progress.add_task("measuring", total=None)

        def show(done: int, total: int) -> None:
            what = "reading traces" if done < total else "measuring"
            progress.update(bar, description=what, completed=done, total=total)

        yield show
