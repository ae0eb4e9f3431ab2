"""The stages of an analysis, for progress reports."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class Stage(StrEnum):
    """A stage of an analysis, in the order of execution."""

    LOGS = "reading step logs"
    TRACES = "reading traces"
    ALIGN = "aligning ranks"
    MEASURE = "measuring"
    PRICE = "pricing causes"
    RULES = "applying rules"
    REPORT = "writing reports"


WINDOWS_READ = 0.5
"""Share of ``ALIGN`` that is done when traces are reduced to windows; the rest is clock alignment and building graphs."""

Progress = Callable[[Stage, float | None], None]
"""Called with a stage and the completed share of it, 0 to 1; None if unknown."""


def no_progress(stage: Stage, part: float | None) -> None:
    """A :data:`Progress` that does nothing."""


def progress_counter(
    progress: Progress, stage: Stage, begin: float = 0.0, end: float = 1.0
) -> Callable[[int, int], None]:
    """A callback (items done, total items) that reports to ``progress`` a share of ``stage`` between ``begin`` and ``end``."""

    def show(done: int, total: int) -> None:
        progress(stage, begin + (end - begin) * done / max(total, 1))

    return show
