"""Recorded runs in ``fixtures/``: each gets the diagnosis that an engineer has verified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.diagnose.facts_view import lookup

FIXTURES = Path(__file__).parent.parent / "fixtures"


@pytest.mark.parametrize(
    "fixture", sorted(FIXTURES.glob("*/expected.json")), ids=lambda path: path.parent.name
)
def test_recorded_run_gets_its_diagnosis(fixture: Path) -> None:
    expected = json.loads(fixture.read_text())
    diagnosis = analyze(str(fixture.parent), Options(cache=False, jobs=1))
    assert diagnosis.healthy == expected["healthy"]
    assert diagnosis.verdict.rule == expected["rule"]
    if expected["rule"] is not None:
        top = diagnosis.findings[0]
        assert top.ranks == expected["ranks"]
        assert (top.where[0].line if top.where else None) == expected["line"]
        assert top.speedup_if_fixed is not None and top.speedup_if_fixed > 1.05
        if (measured_ms := expected.get("measured_after_ms")) is not None:
            promised_ms = diagnosis.steps.mean_ms / top.speedup_if_fixed
            assert promised_ms == pytest.approx(measured_ms, rel=expected["within"])
    assert not {finding.rule for finding in diagnosis.findings} & set(expected.get("without", ()))
    for path, (low, high) in expected.get("facts", {}).items():
        assert low <= lookup(diagnosis.facts, path) <= high
    assert sum(diagnosis.breakdown.values()) == pytest.approx(1.0)
    steps = diagnosis.steps
    recorded = {
        json.loads(line)["step"]
        for log in fixture.parent.glob("ranks/*/steps.jsonl")
        for line in log.read_text().splitlines()
        if '"step":' in line
    }
    assert steps.measured + sum(steps.set_aside.values()) == steps.count == len(recorded)


def test_there_are_fixtures() -> None:
    assert len(list(FIXTURES.glob("*/expected.json"))) >= 3
