"""The bars from the measured step time towards what it could be."""

from __future__ import annotations

from ddpdoctor.diagnose.diagnosis import WaterfallBar
from ddpdoctor.diagnose.engine import Outcome


def waterfall(mean_ms: float | None, outcome: Outcome) -> list[WaterfallBar]:
    """Measured step time, what each finding costs, and what would be left. Savings overlap, so later ones are
    cut at what is left."""
    if mean_ms is None:
        return []
    bars, left = [WaterfallBar("measured step", mean_ms)], mean_ms
    for finding in outcome.findings:
        saved = min(finding.costs_ms_per_step or 0.0, left * 0.999)
        if finding.caused_by is None and saved > 0:
            ends_ms = None if finding.at_most else finding.costs_ms_per_step_range
            bars.append(WaterfallBar(finding.title, -saved, finding.rule, ends_ms))
            left -= saved
    bars.append(WaterfallBar("without these, at best", left))
    return bars
