"""How severe findings are, and in which order they stand, whatever the thresholds."""

from __future__ import annotations

import msgspec

from ddpdoctor.diagnose.diagnosis import Coverage
from ddpdoctor.diagnose.engine import diagnose
from ddpdoctor.diagnose.load import RuleSet
from ddpdoctor.diagnose.selftest import with_cost_shares
from ddpdoctor.diagnose.verdict import verdict
from ddpdoctor.measure.facts import Facts
from tests.diagnose.ruled import COMMON, FACTS, rule, run


def test_one_step_is_never_critical() -> None:
    once = RuleSet(COMMON, {"a/b": rule("a/b", costs="shared.data")})
    given = msgspec.convert(with_cost_shares(FACTS), Facts)
    found = [diagnose(given, once, coverage=Coverage(steps, 2)).findings[0].severity for steps in (1, 2)]
    assert found == ["warning", "critical"]


def test_a_price_may_be_a_ceiling_in_some_cases_only() -> None:
    for when, upper_bound in (("size(cost.where) == 0", True), ("size(cost.where) > 0", False)):
        assert run(rule("a/b", costs="shared.data", upper_bound_when=when)).findings[0].at_most is upper_bound


def test_an_estimate_is_no_upper_bound() -> None:
    for severity_most, upper_bound, bound in (
        ("warning", None, True),
        ("warning", False, False),
        (None, True, True),
    ):
        found = run(
            rule("a/b", costs="shared.data", severity_most=severity_most, upper_bound=upper_bound)
        ).findings
        assert found[0].at_most is bound and found[0].estimated is (upper_bound is False)


def test_findings_stand_by_cost_whatever_the_thresholds() -> None:
    rules = [
        rule("a/late", costs="late.data"),
        rule("a/shared", costs="shared.data"),
        rule("a/once", costs="shared.host"),
    ]
    facts = FACTS | {"shared": {**FACTS["shared"], "host": {"ms_per_step": 20.0}}}
    for thresholds in (
        {},
        {"all": {"warning_share": 0.25, "critical_share": 0.5}},
        {"a/shared": {"warning_share": 0.9, "critical_share": 0.95}},
        {"a/late": {"critical_share": 0.01}},
    ):
        found = run(*rules, facts=facts, thresholds=thresholds).findings
        assert [finding.rule for finding in found] == ["a/shared", "a/once", "a/late"], thresholds
        suppressed = run(*rules, facts=facts, thresholds=thresholds, suppressed=["a/shared"]).findings
        assert [finding.rule for finding in suppressed] == ["a/once", "a/late"], thresholds


def test_a_bound_is_never_critical_and_stands_behind_a_price_unless_it_is_many_times_as_much() -> None:
    rules = [rule("a/late", costs="late.data"), rule("a/bound", costs="shared.host", upper_bound=True)]
    for late_ms, order in ((20.0, ["a/late", "a/bound"]), (2.0, ["a/bound", "a/late"])):
        facts = FACTS | {
            "late": {"data": {"ms_per_step": late_ms}},
            "shared": {"host": {"ms_per_step": 40.0}},
        }
        found = run(*rules, facts=facts).findings
        assert [finding.rule for finding in found] == order
        assert "critical" not in [finding.severity for finding in found if finding.at_most]


def test_what_may_cost_nothing_makes_no_headline() -> None:
    rules = [rule("a/late", costs="late.data"), rule("a/shared", costs="shared.host")]
    perhaps = {"ms_per_step": 40.0, "low_ms_per_step": 0.0, "high_ms_per_step": 80.0}
    facts = FACTS | {"late": {"data": {"ms_per_step": 20.0}}, "shared": {"host": perhaps}}
    outcome = run(*rules, facts=facts)
    assert verdict(outcome, coverage=Coverage(20, 2))[1].rule == "a/late"
    alone = run(rules[1], facts=facts)
    assert verdict(alone, coverage=Coverage(20, 2))[1].rule == "a/shared"


def test_what_may_cost_nothing_in_most_steps_makes_no_headline_and_what_was_seen_in_few_steps_does() -> None:
    rules = [rule("a/late", costs="late.data"), rule("a/shared", costs="shared.host")]
    for hit, first in ((15, "a/late"), (5, "a/shared")):
        perhaps = {
            "ms_per_step": 40.0, "low_ms_per_step": 0.0, "high_ms_per_step": 80.0, "persistence": "random",
            "steps_hit": hit, "steps_seen": 20,
        }  # fmt: skip
        facts = FACTS | {"late": {"data": {"ms_per_step": 20.0}}, "shared": {"host": perhaps}}
        assert verdict(run(*rules, facts=facts), coverage=Coverage(20, 2))[1].rule == first


def test_effects_of_what_only_informs_inform_too_also_indirect_ones() -> None:
    rules = [
        rule("a/cause", costs="shared.data", severity_most="info"),
        rule("a/between", costs="late.data", effect_of=["a/cause"]),
        rule("a/effect", costs="shared.host", effect_of=["a/between"]),
    ]
    facts = FACTS | {
        "late": {"data": {"ms_per_step": 20.0}},
        "shared": {**FACTS["shared"], "host": {"ms_per_step": 20.0}},
    }
    assert {finding.severity for finding in run(*rules, facts=facts).findings} == {"info"}


def test_what_may_cost_nothing_stays_the_headline_beside_what_was_not_measured_to_cost_something() -> None:
    perhaps = {"ms_per_step": 40.0, "low_ms_per_step": 0.0, "high_ms_per_step": 80.0}
    facts = FACTS | {"late": {"data": {"ms_per_step": 20.0}}, "shared": {"host": perhaps}}
    others = (
        rule("a/other", severity="warning"),
        rule("a/other", costs="late.data", upper_bound=True),
        rule("a/other", costs="late.data", severity_most="warning", upper_bound=False),
        rule("a/other", costs="late.data", effect_of=["a/perhaps"]),
    )
    for other in others:
        outcome = run(rule("a/perhaps", costs="shared.host"), other, facts=facts)
        assert "a/other" in [finding.rule for finding in outcome.findings if finding.severity != "info"]
        assert verdict(outcome, coverage=Coverage(20, 2))[1].rule == "a/perhaps", other


def test_what_may_cost_nothing_does_not_explain_what_surely_costs_more() -> None:
    perhaps = {"ms_per_step": 10.0, "low_ms_per_step": 0.0, "high_ms_per_step": 25.0}
    rules = [rule("a/perhaps", costs="shared.host"), rule("a/b", costs="late.data", effect_of=["a/perhaps"])]
    for low_ms, order in (
        (5.0, [("a/perhaps", None), ("a/b", "a/perhaps")]),
        (15.0, [("a/b", None), ("a/perhaps", None)]),
    ):
        sure = {"ms_per_step": 18.0, "low_ms_per_step": low_ms, "high_ms_per_step": 20.0}
        outcome = run(*rules, facts=FACTS | {"late": {"data": sure}, "shared": {"host": perhaps}})
        assert [(finding.rule, finding.caused_by) for finding in outcome.findings] == order
        assert verdict(outcome, coverage=Coverage(20, 2))[1].rule == order[0][0]
