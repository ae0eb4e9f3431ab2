"""Facts by path, with units and documentation from facts.py."""

from __future__ import annotations

import re

import pytest

from ddpdoctor.diagnose import facts_view
from ddpdoctor.diagnose.load import load_rules
from ddpdoctor.measure.facts import Facts, JobFacts


def test_cel_gets_floats_and_keeps_truth_values() -> None:
    given = {"a": 1, "b": True, "c": [1, None], "d": {"e": "x"}}
    assert facts_view.as_cel(given) == {"a": 1.0, "b": True, "c": [1.0, None], "d": {"e": "x"}}
    assert isinstance(facts_view.as_cel(given)["a"], float)
    assert facts_view.as_cel(given)["b"] is True


def test_paths_stop_at_what_is_absent() -> None:
    tree = facts_view.tree(Facts(job=JobFacts(world_size=2)))
    assert facts_view.lookup(tree, "job.world_size") == 2
    assert facts_view.lookup(tree, "late.data.ms_per_step") is None


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("late.data.ms_per_step", True),
        ("loader.where.line", True),
        ("breakdown.compute", True),
        ("late.date", False),
        ("job.world_size.x", False),
    ],
)
def test_known_paths(path: str, known: bool) -> None:
    assert facts_view.is_fact(path) is known


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        ("late.data.ms_per_step", "ms per step"),
        ("late.data.share", "share"),
        ("communication.bus_gb_per_s", "GB/s"),
        ("communication.latency_us", "µs"),
        ("host.swap_bytes_per_s", "bytes/s"),
        ("host.cpu_percent", "%"),
        ("buckets.tail_ms", "ms"),
        ("job.backend", ""),
    ],
)
def test_units_stand_in_the_names(path: str, unit: str) -> None:
    assert facts_view.unit_of(path) == unit


def test_documentation_comes_from_the_attribute() -> None:
    assert facts_view.doc_of("late.data.speedup").startswith("Mean step time /")
    assert "``" not in facts_view.doc_of("late.data.share")
    assert facts_view.doc_of("job.torch") == ""


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("communication.latency_us", "Fixed cost of one message"),
        (
            "steps.input_most",
            "Work of the rank with the largest inputs, relative to the median of the others (1.0: even)",
        ),
        (
            "communication.slow_link_ranks",
            "Ranks of process groups whose transfers are persistently slower than those of comparable groups",
        ),
        ("late.checkpoint", "torch.save and distributed checkpoints"),
        ("late.data.first_step", "First step in which it happens"),
        ("job.torch", ""),
    ],
)
def test_a_label_is_the_first_clause(path: str, label: str) -> None:
    assert facts_view.short_label(path) == label


def test_labels_of_evidence_say_nothing_about_null() -> None:
    rules = load_rules(entry_points=False).rules.values()
    labels = {
        line.fact: line.means or facts_view.short_label(_a_cost(line.fact))
        for rule in rules
        for line in rule.evidence
    }
    assert len(labels) > 50
    assert [fact for fact, label in labels.items() if re.search(r"[Nn]ull|None|[;:.]$|`", label)] == []
    assert [fact for fact, label in labels.items() if len(label) > 120] == []


def _a_cost(fact: str) -> str:
    """The fact itself, of any cause for one of "this finding's cost"."""
    return "late.data." + fact[5:] if fact.startswith("cost.") else fact
