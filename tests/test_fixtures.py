"""Recorded runs in ``fixtures/``: each gets the diagnosis that an engineer has verified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpdoctor.analysis import Options, analyze

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
        assert top.where[0].line == expected["line"]
        assert top.speedup_if_fixed is not None and top.speedup_if_fixed > 1.05
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
