"""Orders findings by cost and marks those that are effects of another finding (``caused_by``), which come last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import msgspec

from ddpdoctor.diagnose import facts_view
from ddpdoctor.diagnose.conditions import evaluate
from ddpdoctor.diagnose.diagnosis import Finding
from ddpdoctor.diagnose.rule import Effect, Rule

ANY = "*"
"""As an effect's rule: any finding that has a cost and at least warns."""

MANY_TIMES = 4.0
"""So many times a measured price, a bound comes before it."""


class RuleHit(msgspec.Struct, frozen=True):
    """A finding with its rule and the cost that priced it."""

    finding: Finding
    rule: Rule
    cost: dict[str, Any] | None
    informs: bool = False
    """Whether the rule's ``informs_when`` holds."""

    @property
    def from_short_window(self) -> bool:
        """Whether the finding is based on single outlier steps of a short window."""
        return bool(self.cost and self.cost["stands_out_in"])

    @property
    def severity_capped(self) -> bool:
        """Whether the severity has an upper bound regardless of the cost."""
        return self.rule.severity_most is not None or self.informs or self.from_short_window

    @property
    def capped_to_info(self) -> bool:
        """Whether that upper bound, not the cost, may be why the severity is info."""
        return self.finding.severity == "info" and self.severity_capped


def order_findings(
    hits: list[RuleHit], context: Mapping[str, Any], thresholds: Mapping[str, float], errors: list[str]
) -> list[Finding]:
    """Return causes by cost, then effects by cost with ``caused_by``; broken conditions go to ``errors``."""
    weights = _weights(hits, context, thresholds)
    by_cost = sorted(hits, key=lambda hit: (weights[hit.rule.id], not hit.severity_capped), reverse=True)
    causes: dict[str, str] = {}
    # Rules that any finding can explain come last, because they name the root cause.
    for entry in sorted(by_cost, key=lambda hit: any(effect.rule == ANY for effect in hit.rule.effects)):
        for other in by_cost:
            if other is not entry and not _follows(other.rule.id, entry.rule.id, causes):
                try:
                    explained = any(_explains(effect, other, entry, context) for effect in entry.rule.effects)
                except Exception as error:  # with a broken condition, the finding has no cause
                    errors.append(f"{entry.rule.id}: effect_of: {' '.join(str(error).split())[:300]}")
                    break
                if explained:
                    anything = any(effect.rule == ANY for effect in entry.rule.effects)
                    causes[entry.rule.id] = _root(other.rule.id, causes) if anything else other.rule.id
                    break
    capped = {entry.rule.id for entry in hits if entry.capped_to_info}
    findings = []
    for entry in by_cost:
        cause = causes.get(entry.rule.id)
        # An effect of a finding that is capped to info is info too.
        severity = "info" if cause in capped else entry.finding.severity
        findings.append(msgspec.structs.replace(entry.finding, caused_by=cause, severity=severity))
    return [f for f in findings if f.caused_by is None] + [f for f in findings if f.caused_by is not None]


def _weights(
    hits: Sequence[RuleHit], context: Mapping[str, Any], thresholds: Mapping[str, float]
) -> dict[str, float]:
    """By rule, what orders its finding: its loss, but one with a capped severity ranks below all findings of higher severities."""
    floor = {"critical": thresholds["critical_share"], "warning": thresholds["warning_share"]}

    def own(hit: RuleHit) -> float:
        if hit.rule.stops:
            return inf
        # A finding without a cost ranks like the smallest cost of its severity.
        least = floor.get(hit.finding.severity, 0.0) if hit.rule.severity else 0.0
        return max(_loss(hit.finding, context["run"], thresholds) / _discount(hit.finding), least)

    weights = {hit.rule.id: own(hit) for hit in hits}
    for severity, above in (("warning", ("critical",)), ("info", ("warning", "critical"))):
        severer = [own(hit) for hit in hits if hit.finding.severity in above]
        most = min([floor[above[0]], *severer])
        for hit in hits:
            if hit.severity_capped and hit.finding.severity == severity:
                weights[hit.rule.id] = min(weights[hit.rule.id], most)
    return weights


def _discount(finding: Finding) -> float:
    """By what the loss of a finding is divided for its place: a measured price comes before a bound or an assumption, and what costs
    something for sure before what may cost nothing, unless the latter is many times as much."""
    is_bound = finding.at_most or finding.estimated
    return MANY_TIMES**is_bound * MANY_TIMES ** includes_zero(finding)


def includes_zero(finding: Finding) -> bool:
    """Whether it may cost nothing: its range includes 0, though it is said of every step. (What happens in some steps was seen there.)"""
    ends_ms = finding.costs_ms_per_step_range
    return ends_ms is not None and ends_ms[0] <= 0.0 and finding.persistence in (None, "always")


def _loss(finding: Finding, run: Mapping[str, Any], thresholds: Mapping[str, float]) -> float:
    """Share that orders findings: of the step, or of the run for what is lost outside of ordinary steps. What happens once in a short run
    counts least, as it says nothing of a longer one."""
    if finding.costs_ms_per_step is not None or not finding.happens_once:
        return finding.share or finding.share_of_run or 0.0
    is_long = run["wall_s"] is not None and run["wall_s"] >= thresholds["short_run_s"]
    return (finding.share_of_run or 0.0) if is_long else 0.0


def _explains(effect: Effect, cause: RuleHit, entry: RuleHit, context: Mapping[str, Any]) -> bool:
    if effect.rule == ANY:
        if cause.finding.severity == "info" or cause.finding.costs_ms_per_step is None:
            return False
    elif effect.rule != cause.rule.id:
        return False
    elif cause.capped_to_info and cause.from_short_window and entry.finding.severity != "info":
        # Outlier steps of a short window do not explain a cost in all its steps.
        return False
    elif includes_zero(cause.finding) and _surely_more(entry.finding, cause.finding):
        return False
    if effect.when is None:
        return True
    names = dict(context) | {"cost": facts_view.as_cel(entry.cost), "cause": facts_view.as_cel(cause.cost)}
    return evaluate(effect.when, names) is True


def _surely_more(finding: Finding, other: Finding) -> bool:
    """Whether the whole range of a cost is above the other's cost per step."""
    ends_ms, other_ms = finding.costs_ms_per_step_range, other.costs_ms_per_step
    return ends_ms is not None and other_ms is not None and ends_ms[0] > other_ms


def _root(rule_id: str, causes: Mapping[str, str]) -> str:
    """Return the root cause of ``rule_id``, itself if it has no cause."""
    while rule_id in causes:
        rule_id = causes[rule_id]
    return rule_id


def _follows(rule_id: str, other_id: str, causes: Mapping[str, str]) -> bool:
    """Whether ``rule_id`` is a direct or indirect effect of ``other_id``."""
    seen: str | None = rule_id
    while seen is not None:
        seen = causes.get(seen)
        if seen == other_id:
            return True
    return False
