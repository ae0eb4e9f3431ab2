"""No verdict from numbers that contradict each other."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ddpdoctor.diagnose import facts_view
from ddpdoctor.diagnose.diagnosis import Coverage, Finding, Verdict
from ddpdoctor.diagnose.engine import Outcome
from ddpdoctor.diagnose.verdict import contradictions, verdict, without_contradictions
from ddpdoctor.measure.facts import Facts, StepFacts

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
