"""The attempts of a run that was restarted: one table."""

from __future__ import annotations

from typing import Any

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.measure.runfacts import AttemptFacts
from ddpdoctor.report import words
from ddpdoctor.report.finding_view import place
from ddpdoctor.report.job_view import Table

_MOST = 32
"""Most rows: the first and the last attempts."""


def attempts_table(diagnosis: Diagnosis) -> Table | None:
    """One row per attempt, the measured one marked; None for a single attempt, or where the facts hold something else."""
    run: Any = diagnosis.facts.get("run")
    try:
        attempts = msgspec.convert(run["attempts"], list[AttemptFacts])
    except (msgspec.ValidationError, TypeError, KeyError):
        return None
    if len(attempts) < 2:
        return None
    left = max(len(attempts) - _MOST, 0)
    shown = attempts if not left else [*attempts[: _MOST // 2], *attempts[-_MOST // 2 :]]
    rows = [
        [
            f"{'→ ' if each.is_measured else ''}{each.number}",
            _from_to(each),
            words.ABSENT if each.world_size is None else str(each.world_size),
            f"{each.steps:,}",
            words.milliseconds(each.step_ms),
            words.ABSENT if each.checkpoint_step is None else f"step {each.checkpoint_step}",
            (each.ended or "unknown") + (f" at {place(each.where[0]).short}" if each.where else ""),
        ]
        for each in shown
    ]
    title = "Attempts (→ measured)" + (f", {left} more in the report's data" if left else "")
    return Table(
        title, ["attempt", "from – to", "ranks", "steps", "step", "last checkpoint", "how it ended"], rows
    )


def _from_to(attempt: AttemptFacts) -> str:
    return f"{words.seconds(attempt.started_s)} – {words.seconds(attempt.ended_s)}"
