"""The stages of an analysis, by which commands show how far it has come."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class Stage(StrEnum):
    """What an analysis is doing, in the order in which it does it."""

    LOGS = "reading step logs"
    TRACES = "reading traces"
    ALIGN = "aligning ranks"
    MEASURE = "measuring"
    PRICE = "pricing causes"
    RULES = "applying rules"
    REPORT = "writing reports"


WINDOWS_READ = 0.5
"""Part of ``ALIGN`` after which each trace is a window; then they are put on one clock, and into graphs."""

Progress = Callable[[Stage, float | None], None]
"""Called with the stage and the part of it that is done, 0 to 1; None where nobody can tell."""


def no_progress(stage: Stage, part: float | None) -> None:
    """The :data:`Progress` that nobody sees."""


def progress_counter(
    progress: Progress, stage: Stage, begin: float = 0.0, end: float = 1.0
) -> Callable[[int, int], None]:
    """What tells ``progress`` of a stage, from one part of it to another, by (things done, things in all)."""

    def show(done: int, total: int) -> None:
        progress(stage, begin + (end - begin) * done / max(total, 1))

    return show
