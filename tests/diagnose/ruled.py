"""A small pack and facts that its rules read."""

from __future__ import annotations

from typing import Any

import msgspec

from ddpdoctor.diagnose.diagnosis import Coverage
from ddpdoctor.diagnose.engine import Outcome, diagnose
from ddpdoctor.diagnose.load import RuleSet
from ddpdoctor.diagnose.rule import Common, Rule
from ddpdoctor.diagnose.selftest import with_cost_shares
from ddpdoctor.measure.facts import Facts

COMMON = msgspec.convert(
    {
        "thresholds": {
            name: {"value": value, "source": "test"}
            for name, value in {
                "critical_share": 0.2,
                "warning_share": 0.05,
                "least_share": 0.01,
                "tiny_step_ms": 2.0,
                "tiny_cost_ms": 1.0,
                "outstanding_steps": 2.0,
                "critical_steps": 2.0,
                "short_run_s": 600.0,
            }.items()
        },
        "cost_when": "cost.share >= t.least_share",
        "cost_needs": ["steps.mean_ms"],
        "close": "Either {{ cost.waiting_ms_per_step|ms }} or {{ cost.going_on_ms_per_step|ms }}.",
        "short_window": {
            "explain": "Seen in {{ cost.steps_seen }} steps only.",
            "fix": {"title": "record more", "why": "to see how often"},
        },
    },
    Common,
)
FACTS: dict[str, Any] = {
    "job": {"ranks_seen": 2},
    "steps": {"mean_ms": 100.0},
    "loader": {"num_workers": 0, "where": {"file": "train.py", "line": 5, "function": "main"}},
    "late": {"data": {"ms_per_step": 10.0, "ranks": [1]}},
    "shared": {"data": {"ms_per_step": 30.0}},
}


def rule(rule_id: str, **fields: Any) -> Rule:
    whole = {
        "id": rule_id,
        "title": "a title",
        "question": "a question?",
        "explain": "an explanation",
        "headline": "a headline",
        "limits": "never wrong",
        "fixes": [],
        "tests": [],
    }
    return msgspec.convert({**whole, **fields}, Rule)


def run(*rules: Rule, facts: dict[str, Any] = FACTS, **options: Any) -> Outcome:
    pack = RuleSet(COMMON, {entry.id: entry for entry in rules})
    given = msgspec.convert(with_cost_shares(facts), Facts)
    return diagnose(given, pack, coverage=Coverage(steps=50, ranks=2), **options)
