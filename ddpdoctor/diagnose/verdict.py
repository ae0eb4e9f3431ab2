"""The first sentence of every report."""

from __future__ import annotations

from ddpdoctor.diagnose.diagnosis import Coverage, Verdict
from ddpdoctor.diagnose.engine import Outcome

_LEAST_STEPS = 2
"""Of ranks whose collectives could not be matched."""


def verdict(
    outcome: Outcome, *, coverage: Coverage, matched: bool = True, stopped: str | None = None
) -> tuple[bool, Verdict]:
    """Return ``(healthy, verdict)``. Healthy means that rules looked at measured steps and none warns.

    ``stopped``: what to say where only the job's end could be looked at, and nothing was found there.

    ``matched``: the collectives of the ranks, where there are several, could be brought together.
    """
    top = next((finding for finding in outcome.findings if finding.severity != "info"), None)
    if outcome.contradictions and (top is None or top.costs_ms_per_step is None):
        return False, Verdict(
            None, f"Cannot tell: the measured numbers contradict each other: {outcome.contradictions[0]}."
        )
    if top is not None:
        return False, Verdict(top.rule, outcome.headlines[top.rule])
    looked = len(outcome.checked) + len(outcome.findings)
    if coverage.steps == 0 and stopped is not None:
        return False, Verdict(None, stopped)
    if coverage.steps == 0 or looked == 0:
        return False, Verdict(
            None, "Cannot tell: no training steps were measured, so no rule could look for lost time."
        )
    if not matched and coverage.ranks > 1 and coverage.steps < _LEAST_STEPS:
        return False, Verdict(
            None,
            f"Cannot tell: the collectives of {coverage.ranks} ranks could not be matched, and fewer than two whole steps were "
            "recorded on all of them.",
        )
    share = outcome.thresholds["warning_share"]
    steps = f"{coverage.steps} step{'s' if coverage.steps != 1 else ''}"
    ranks = f"{coverage.ranks} rank{'s' if coverage.ranks != 1 else ''}"
    if outcome.too_few:
        return True, Verdict(
            None,
            f"Nothing lasting found by {looked} rules, but once: {outcome.headlines[outcome.too_few[0]]}",
        )
    look = f"{steps} of {ranks} looked at"
    if outcome.skipped:
        look += f"; {len(outcome.skipped)} rules could not look"
    told = next(
        (f for f in outcome.findings if (f.share or 0.0) >= share or f.rule in outcome.informing), None
    )
    if told is not None:
        # What is told without a warning may take much of the step all the same: a machine shared with others.
        return True, Verdict(
            None, f"None of {looked} rules warns ({look}), but note: {outcome.headlines[told.rule]}"
        )
    return True, Verdict(
        None,
        f"Healthy: none of {looked} rules found anything that costs {share * 100:g} % of a step ({look}).",
    )
