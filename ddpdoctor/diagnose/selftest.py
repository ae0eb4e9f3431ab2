"""Runs the tests inside rule files: facts for which the rule must or must not fire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ddpdoctor.diagnose import facts_view
from ddpdoctor.diagnose.diagnosis import Coverage, Finding
from ddpdoctor.diagnose.engine import Outcome, diagnose
from ddpdoctor.diagnose.load import RuleSet
from ddpdoctor.diagnose.rule import Common, Rule, RuleTest
from ddpdoctor.measure.facts import Facts


class TestResult(msgspec.Struct, frozen=True):
    """Result of one test of one rule."""

    __test__ = False  # pytest would otherwise take the class for a test case
    rule: str
    name: str
    failures: list[str]
    """Differences from the expected result; empty if the test passes."""


def run_tests(rule: Rule, common: Common) -> list[TestResult]:
    """Run all tests of a rule, with this rule alone."""
    return [TestResult(rule.id, test.name, _failures(rule, common, test)) for test in rule.tests]


def outcome_of(rule: Rule, common: Common, facts: Mapping[str, Any]) -> Outcome:
    """Run one rule over nested test facts. Raises msgspec.ValidationError if a fact has the wrong type."""
    given = msgspec.convert(with_cost_shares(facts), Facts)
    return diagnose(
        given, RuleSet(common, {rule.id: rule}), coverage=Coverage(steps=100, ranks=given.job.ranks_seen)
    )


def with_cost_shares(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return test facts with ``share`` and ``speedup`` added to every cost, from its ms and the mean step."""
    mean_ms = facts_view.lookup(facts, "steps.mean_ms")
    whole: dict[str, Any] = {}
    for group, values in facts.items():
        whole[group] = dict(values) if isinstance(values, Mapping) else values
        for name, value in whole[group].items() if isinstance(values, Mapping) else ():
            if mean_ms and isinstance(value, Mapping) and facts_view.is_cost(f"{group}.{name}"):
                cost_ms = value.get("ms_per_step", 0.0)
                share, speedup = cost_ms / mean_ms, mean_ms / max(mean_ms - cost_ms, 0.001)
                whole[group][name] = {"share": share, "speedup": speedup, **value}
    return whole


def _failures(rule: Rule, common: Common, test: RuleTest) -> list[str]:
    try:
        outcome = outcome_of(rule, common, test.facts)
    except msgspec.ValidationError as error:
        return [f"facts: {error}"]
    found = list(outcome.errors)
    skipped = bool(outcome.skipped)
    if skipped != test.skipped and not outcome.errors:
        why = f" ({outcome.skipped[0].why})" if skipped else ""
        found.append(f"{'was' if skipped else 'was not'} skipped{why}")
    if bool(outcome.findings) != test.fires:
        found.append("fired" if outcome.findings else "did not fire")
    elif outcome.findings:
        found += _differences(outcome.findings[0], outcome.headlines[rule.id], test)
    return found


def _differences(finding: Finding, headline: str, test: RuleTest) -> list[str]:
    found = []
    if test.severity is not None and finding.severity != test.severity:
        found.append(f"severity is {finding.severity}, not {test.severity}")
    if test.ranks is not None and finding.ranks != test.ranks:
        found.append(f"ranks are {finding.ranks}, not {test.ranks}")
    texts = [finding.title, headline, finding.explanation]
    for fix in finding.fixes:
        texts += [fix.title, fix.why, fix.snippet or "", fix.trade_off or ""]
    found += [f"does not say {piece!r}" for piece in test.says if not any(piece in text for text in texts)]
    return found
