"""The order of findings: by cost, and what is an effect of another finding below it, naming it."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import msgspec

from ddpdoctor.diagnose import facts_view
from ddpdoctor.diagnose.conditions import evaluate
from ddpdoctor.diagnose.diagnosis import Finding
from ddpdoctor.diagnose.rule import Effect, Rule

ANY = "*"
"""As an effect's rule: any finding that costs time and at least warns."""


class Fired(msgspec.Struct, frozen=True):
    """A finding with its rule and the cost that priced it."""

    finding: Finding
    rule: Rule
    cost: dict[str, Any] | None

    @property
    def stands_out(self) -> bool:
        """Whether it rests on single steps of a short window."""
        return bool(self.cost and self.cost["stands_out_in"])

    @property
    def bounded(self) -> bool:
        """Whether something else than its cost bounds how severe it is."""
        rule = self.rule
        return rule.severity_most is not None or rule.informs_when is not None or self.stands_out

    @property
    def only_informs(self) -> bool:
        """Whether it is an information because it may not warn, whatever it costs."""
        return self.finding.severity == "info" and self.bounded


def ordered(
    fired: list[Fired], context: Mapping[str, Any], thresholds: Mapping[str, float], errors: list[str]
) -> list[Finding]:
    """Return causes by cost, then effects by cost with ``caused_by``; broken conditions go to ``errors``."""

    def weight(entry: Fired) -> float:
        if entry.rule.stops:
            return inf
        # What has no price ranks where a cost of its severity would begin.
        floor = {"critical": thresholds["critical_share"], "warning": thresholds["warning_share"]}
        least = floor.get(entry.finding.severity, 0.0) if entry.rule.severity else 0.0
        # Nor does what may only inform stand above what warns.
        above = {"info": floor["warning"], "warning": floor["critical"]}
        most = above.get(entry.finding.severity, inf) if entry.bounded else inf
        return min(max(entry.finding.share or 0.0, least), most)

    by_cost = sorted(fired, key=weight, reverse=True)
    causes: dict[str, str] = {}
    # Rules that any finding explains come last: they name the root, which must be known by then.
    for entry in sorted(by_cost, key=lambda fired: any(effect.rule == ANY for effect in fired.rule.effects)):
        for other in by_cost:
            if other is not entry and not _follows(other.rule.id, entry.rule.id, causes):
                try:
                    explained = any(_explains(effect, other, entry, context) for effect in entry.rule.effects)
                except Exception as error:  # a broken condition leaves the finding to stand for itself
                    errors.append(f"{entry.rule.id}: effect_of: {' '.join(str(error).split())[:300]}")
                    break
                if explained:
                    anything = any(effect.rule == ANY for effect in entry.rule.effects)
                    causes[entry.rule.id] = _root(other.rule.id, causes) if anything else other.rule.id
                    break
    informing = {entry.rule.id for entry in fired if entry.only_informs}
    findings = []
    for entry in by_cost:
        cause = causes.get(entry.rule.id)
        # What follows from one that only informs does not warn either.
        severity = "info" if cause in informing else entry.finding.severity
        findings.append(msgspec.structs.replace(entry.finding, caused_by=cause, severity=severity))
    return [f for f in findings if f.caused_by is None] + [f for f in findings if f.caused_by is not None]


def _explains(effect: Effect, cause: Fired, entry: Fired, context: Mapping[str, Any]) -> bool:
    if effect.rule == ANY:
        if cause.finding.severity == "info" or cause.finding.costs_ms_per_step is None:
            return False
    elif effect.rule != cause.rule.id:
        return False
    elif cause.only_informs and cause.stands_out and entry.finding.severity != "info":
        # Single steps of a short window are no reason for what all its steps show.
        return False
    if effect.when is None:
        return True
    names = dict(context) | {"cost": facts_view.as_cel(entry.cost), "cause": facts_view.as_cel(cause.cost)}
    return evaluate(effect.when, names) is True


def _root(rule_id: str, causes: Mapping[str, str]) -> str:
    """Return the finding that ``rule_id`` follows from in the end, itself where from none."""
    while rule_id in causes:
        rule_id = causes[rule_id]
    return rule_id


def _follows(rule_id: str, other_id: str, causes: Mapping[str, str]) -> bool:
    """Tell whether ``rule_id`` is already an effect, at any distance, of ``other_id``."""
    seen: str | None = rule_id
    while seen is not None:
        seen = causes.get(seen)
        if seen == other_id:
            return True
    return False
