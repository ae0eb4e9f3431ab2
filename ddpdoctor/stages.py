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


Progress = Callable[[Stage, float | None], None]
"""Called with the stage and the part of it that is done, 0 to 1; None where nobody can tell."""


def untold(stage: Stage, part: float | None) -> None:
    """The :data:`Progress` that nobody sees."""


def counted(progress: Progress, stage: Stage) -> Callable[[int, int], None]:
    """What tells ``progress`` of a stage by (things done, things in all)."""

    def show(done: int, total: int) -> None:
        progress(stage, done / max(total, 1))

    return show
