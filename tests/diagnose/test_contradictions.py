"""No verdict from numbers that contradict each other, and no finding that the recorded steps do not bear; but a failure of the job is told
whatever the numbers are worth."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from ddpdoctor.diagnose import facts_view
from ddpdoctor.diagnose.diagnosis import Coverage, Finding, Verdict
from ddpdoctor.diagnose.engine import Outcome
from ddpdoctor.diagnose.load import load_rules
from ddpdoctor.diagnose.selftest import outcome_of
from ddpdoctor.diagnose.verdict import contradictions, verdict, without_contradictions
from ddpdoctor.measure.facts import Facts, StepFacts
from ddpdoctor.measure.taxonomy import LATE_COMPONENTS, LateCause
from tests.diagnose.ruled import rule, run

LIMITS = {"tiny_cost_ms": 1.0, "warning_share": 0.05}


def facts(
    mean: float = 30.0, median: float = 29.0, p95: float = 33.0, measured: int = 100, **more: Any
) -> Facts:
    steps = StepFacts(measured=measured, seen=measured, mean_ms=mean, median_ms=median, p95_ms=p95)
    return Facts(steps=steps, breakdown=more.pop("breakdown", {"compute": 0.7, "host": 0.3}), **more)


def finding(cost: float | None) -> Finding:
    return Finding(
        rule="a/b", severity="critical", title="t", coverage=Coverage(9, 2), costs_ms_per_step=cost
    )


def found(of: Facts, *findings: Finding) -> list[str]:
    return contradictions(facts_view.tree(of), findings, LIMITS)


def test_numbers_that_agree() -> None:
    assert found(facts()) == []
    assert found(Facts()) == [], "nothing measured"
    assert found(facts(mean=90, median=30, p95=300)) == [], "every tenth step is slow: no contradiction"


@pytest.mark.parametrize(
    ("of", "says"),
    [
        (facts(mean=-50.0), "-50 ms on average"),
        (facts(mean=0.0), "0 ms on average"),
        (facts(median=-1.0), "-1 ms (median)"),
        (facts(mean=9.0), "is impossible"),
        (facts(mean=1400.0), "a few steps take most of the time"),
        (facts(mean=float("nan")), "steps.mean_ms is not a number"),
        (facts(mean=float("inf")), "steps.mean_ms is not a number"),
        (facts(breakdown={"compute": 1.4, "host": -0.4}), "do not add up"),
        (facts(breakdown={"compute": 0.4, "host": 0.4}), "do not add up"),
    ],
)
def test_numbers_that_contradict_each_other(of: Facts, says: str) -> None:
    assert says in found(of)[0]


def test_a_share_beyond_the_step() -> None:
    of = facts()
    gpu = msgspec.structs.replace(of.gpu, busy_share=1.4)
    assert "gpu.busy_share is 1.4" in found(msgspec.structs.replace(of, gpu=gpu))[0]


def test_a_finding_explains_a_mean_beyond_the_median() -> None:
    of = facts(mean=130.0)
    assert found(of, finding(90.0)) == []
    assert found(of, finding(10.0), finding(None))


def test_the_verdict_is_that_nothing_can_be_told() -> None:
    outcome = Outcome(
        findings=[finding(10.0), finding(None)],
        headlines={"a/b": "bad"},
        thresholds=LIMITS,
        short_window_rules=["a/b"],
    )
    of = facts(mean=9.0)
    left = without_contradictions(outcome, facts_view.tree(of))
    assert [each.costs_ms_per_step for each in left.findings] == [None]
    assert [(each.rule, "contradict" in each.why) for each in left.skipped] == [("a/b", True)]
    healthy, sentence = verdict(left, coverage=Coverage(100, 2))
    assert not healthy and sentence.rule is None
    assert sentence.headline.startswith(
        "Cannot tell: the measured numbers contradict each other: a step takes 9"
    )
    assert without_contradictions(outcome, facts_view.tree(facts())) is outcome


def test_a_few_long_steps_that_nothing_explains_do_not_hide_a_lasting_fault() -> None:
    lasting = finding(10.0)
    outcome = Outcome(findings=[lasting], headlines={"a/b": "Rank 1 is late"}, thresholds=LIMITS)
    left = without_contradictions(outcome, facts_view.tree(facts(mean=1400.0)))
    assert left.findings == [lasting] and not left.skipped
    assert left.errors[0].startswith("A step takes 1") and "no rule explains why" in left.errors[0]
    assert verdict(left, coverage=Coverage(100, 2)) == (False, Verdict("a/b", "Rank 1 is late"))
    nothing = without_contradictions(Outcome(thresholds=LIMITS), facts_view.tree(facts(mean=1400.0)))
    healthy, sentence = verdict(nothing, coverage=Coverage(100, 2))
    assert not healthy and sentence.headline.startswith("Cannot tell") and "a few steps" in sentence.headline


PACK = load_rules()
COMPUTE = "rank-imbalance/slow-compute"


def outcome(cause: str, rule: str = COMPUTE, **cost: Any):
    whole = {"ms_per_step": 12.0, "ranks": [0], "steps_hit": 100, "steps_seen": 100, "late_ms": 12.0, **cost}
    facts = {"job": {"ranks_seen": 2}, "steps": {"mean_ms": 60.0}, "late": {cause: whole}}
    return outcome_of(PACK.rules[rule], PACK.common, facts)


@pytest.mark.parametrize("drawn", [11.0, 6.1, 30.0, None])
def test_what_the_steps_bear_is_told(drawn: float | None) -> None:
    told = outcome("compute", drawn_ms=drawn)
    assert [finding.rule for finding in told.findings] == [COMPUTE]
    assert told.skipped == [] and told.contradictions == []


@pytest.mark.parametrize("drawn", [5.0, 0.1, 0.0, -3.0])
def test_what_they_do_not_bear_is_withheld(drawn: float) -> None:
    told = outcome("compute", drawn_ms=drawn, drawn_as="host")
    assert told.findings == [] and told.checked == []
    (skipped,) = told.skipped
    assert "contradict" in skipped.why and "rank 0 a delay of 12 ms" in skipped.why
    assert "most of it outside forward, backward and optimizer" in skipped.why
    assert told.errors == [f"{COMPUTE} was withheld: {told.contradictions[0]}."]
    healthy, sentence = verdict(told, coverage=Coverage(100, 2))
    assert not healthy and sentence.rule is None
    assert sentence.headline.startswith(
        "Cannot tell: the measured numbers contradict each other: attribution"
    )


@pytest.mark.parametrize("drawn_as", [cause for cause in LATE_COMPONENTS if cause != LateCause.UNKNOWN])
def test_it_says_where_the_steps_show_the_time(drawn_as: LateCause) -> None:
    said = ("host", "rank-imbalance/host-work") if drawn_as == LateCause.COMPUTE else ("compute", COMPUTE)
    (skipped,) = outcome(*said, drawn_ms=1.0, drawn_as=str(drawn_as)).skipped
    assert "they show most of it" in skipped.why


def test_a_small_one_leaves_the_verdict() -> None:
    told = outcome("compute", ms_per_step=2.0, late_ms=2.0, drawn_ms=0.0)
    assert told.findings == [] and told.contradictions == [] and told.skipped


def test_all_ranks_and_other_causes() -> None:
    assert outcome("compute", ranks=None, drawn_ms=0.0).findings
    assert outcome("host", "rank-imbalance/host-work", drawn_ms=12.0).findings
    assert not outcome("host", "rank-imbalance/host-work", drawn_ms=1.0, drawn_as="compute").findings


def test_a_rule_of_two_costs_tells_the_one_that_is_borne() -> None:
    facts = {
        "job": {"ranks_seen": 2},
        "steps": {"mean_ms": 60.0},
        "late": {
            "compute": {"ms_per_step": 12.0, "ranks": [0], "late_ms": 12.0, "drawn_ms": 0.0},
            "optimizer": {"ms_per_step": 6.0, "ranks": [1], "late_ms": 6.0, "drawn_ms": 6.0},
        },
    }
    told = outcome_of(PACK.rules[COMPUTE], PACK.common, facts)
    assert [finding.ranks for finding in told.findings] == [[1]]


def test_numbers_that_contradict_each_other_hide_no_failure() -> None:
    """A few steps took most of the time: a pause before the failure is enough for that."""
    for stops in (True, False):
        outcome = run(rule("hang/died", when="steps.mean_ms > 0.0", severity="critical", stops=stops))
        unsure = replace(outcome, contradictions=["a few steps take most of the time"])
        healthy, sentence = verdict(unsure, coverage=Coverage(50, 2))
        told = sentence == Verdict("hang/died", "a headline")
        assert not healthy and told is stops, sentence
