"""The first sentence of every report."""

from __future__ import annotations

from ddpdoctor.diagnose import words
from ddpdoctor.diagnose.diagnosis import Coverage, Verdict
from ddpdoctor.diagnose.engine import Outcome

_LEAST_STEPS = 2
"""Of ranks whose collectives could not be matched."""


def verdict(
    outcome: Outcome, *, coverage: Coverage, matched: bool = True, stopped: str | None = None
) -> tuple[bool, Verdict]:
    """Return ``(healthy, verdict)``. Healthy means that measured steps were checked and no rule warns.

    ``stopped``: what to say where only the job's end could be looked at, and nothing was found there.

    ``matched``: the collectives of the ranks, where there are several, could be brought together.
    """
    top = next((finding for finding in outcome.findings if finding.severity != "info"), None)
    stops = (
        top is not None and top.rule in outcome.stopping
    )  # that it stopped follows from no measured number
    if outcome.contradictions and not stops and (top is None or top.costs_ms_per_step is None):
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
            None, "Cannot tell: no training steps were measured, so there was nothing to check."
        )
    if not matched and coverage.ranks > 1 and coverage.steps < _LEAST_STEPS:
        return False, Verdict(
            None,
            f"Cannot tell: the collectives of {coverage.ranks} ranks could not be matched, and fewer than two whole steps were "
            "recorded on all ranks.",
        )
    share = outcome.thresholds["warning_share"]
    seen = f"{words.count(coverage.steps, 'step')} of {words.count(coverage.ranks, 'rank')}"
    if outcome.skipped:
        seen += f"; {len(outcome.skipped)} checks lacked data"
    if outcome.too_few:
        return True, Verdict(
            None, f"Nothing lasting was found ({seen}), but once: {outcome.headlines[outcome.too_few[0]]}"
        )
    told = next(
        (f for f in outcome.findings if (f.share or 0.0) >= share or f.rule in outcome.informing), None
    )
    if told is not None:
        # What is told without a warning may take much of the step all the same: a machine shared with others.
        return True, Verdict(None, f"No warnings ({seen}), but note: {outcome.headlines[told.rule]}")
    return True, Verdict(
        None, f"Healthy: {looked} checks found nothing that costs {share * 100:g} % of a step ({seen})."
    )
