"""Findings that the recorded steps do not bear are withheld, and said to be."""

from __future__ import annotations

from typing import Any

import pytest

from ddpdoctor.diagnose.diagnosis import Coverage
from ddpdoctor.diagnose.load import load_rules
from ddpdoctor.diagnose.selftest import outcome_of
from ddpdoctor.diagnose.verdict import verdict

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
