"""Profiler traces do not show whether a job stopped."""

from __future__ import annotations

from pathlib import Path

from ddpdoctor.analysis import analyze

HEALTHY = Path(__file__).parents[2] / "fixtures" / "healthy"


def test_of_traces_alone_nothing_is_said_of_a_stop():
    diagnosis = analyze([str(file) for file in sorted(HEALTHY.glob("ranks/*/trace.json.gz"))])
    told = {rule.rule for rule in diagnosis.skipped if rule.rule.startswith("hang/")}
    assert "hang/not-reached" in told
    assert diagnosis.facts["hang"]["looked"] is None
    assert not any("flight recorder" in note for note in diagnosis.notes)


def test_a_healthy_run_was_looked_at():
    diagnosis = analyze([str(HEALTHY)])
    assert diagnosis.healthy
    assert {"hang/not-reached", "hang/rank-died"} <= {rule.rule for rule in diagnosis.checked}
    assert diagnosis.standing == []
