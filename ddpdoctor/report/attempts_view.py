"""The attempts of a run that was restarted, and the trainings of processes that take several: a table each."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.measure.runfacts import AttemptFacts, TrainingFacts
from ddpdoctor.report import words
from ddpdoctor.report.finding_view import place
from ddpdoctor.report.job_view import Table

_MOST = 32
"""Most rows: the first and the last ones."""

_Facts = TypeVar("_Facts", AttemptFacts, TrainingFacts)


def attempts_table(diagnosis: Diagnosis) -> Table | None:
    """One row per attempt, the measured one marked; None for a single attempt, or where the facts hold something else."""
    shown, title = _shown(diagnosis, "attempts", AttemptFacts)
    if not shown:
        return None
    rows = [
        [
            f"{'→ ' if each.is_measured else ''}{each.number}",
            _from_to(each),
            words.ABSENT if each.world_size is None else str(each.world_size),
            f"{each.steps:,}" if each.first_step is None else _steps(each.first_step, each.steps),
            words.milliseconds(each.step_ms),
            words.ABSENT
            if each.checkpoint_step is None
            else f"step {(each.first_step or 0) + each.checkpoint_step:,}",
            (each.ended or "unknown") + (f" at {place(each.where[0]).short}" if each.where else ""),
            _first_finding(diagnosis, each),
        ]
        for each in shown
    ]
    columns = ["attempt", "from – to", "ranks", "steps", "step", "last checkpoint", "how it ended"]
    return Table(title, [*columns, "first finding"], rows)


def _from_to(attempt: AttemptFacts) -> str:
    return f"{words.seconds(attempt.started_s)} – {words.seconds(attempt.ended_s)}"


def trainings_table(diagnosis: Diagnosis) -> Table | None:
    """One row per training, the measured one marked; None for a single training, or where the facts hold something else."""
    shown, title = _shown(diagnosis, "trainings", TrainingFacts)
    if not shown:
        return None
    rows = [
        [
            f"{'→ ' if each.is_measured else ''}{each.number}",
            ", ".join(each.models) or words.ABSENT,
            words.size(each.parameters_bytes),
            _steps(each.first_step, each.steps),
            words.seconds(each.total_s),
            words.milliseconds(each.step_ms),
            _first_finding(diagnosis, each),
        ]
        for each in shown
    ]
    columns = ["training", "model", "parameters", "steps", "time", "step", "first finding"]
    return Table(title, columns, rows)


def _steps(first: int, count: int) -> str:
    return f"{first:,} – {first + count - 1:,}" if count else "none"


def _first_finding(diagnosis: Diagnosis, each: AttemptFacts | TrainingFacts) -> str:
    if each.is_measured:
        return diagnosis.findings[0].rule if diagnosis.findings else "none"
    return "not diagnosed" if each.finding is None else each.finding or "none"


def _shown(diagnosis: Diagnosis, name: str, kind: type[_Facts]) -> tuple[list[_Facts], str]:
    """(The rows of the facts ``run.<name>``, the first and the last ones if there are many, [] if there is only one; the title.)"""
    run: Any = diagnosis.facts.get("run")
    try:
        every: list[_Facts] = msgspec.convert(run[name], list[kind])  # type: ignore[valid-type]
    except (msgspec.ValidationError, TypeError, KeyError):
        return [], ""
    left = max(len(every) - _MOST, 0)
    title = f"{name.capitalize()} (→ measured)" + (f", {left} more in the report's data" if left else "")
    if len(every) < 2:
        return [], title
    return (every if not left else every[: _MOST // 2] + every[-_MOST // 2 :]), title
