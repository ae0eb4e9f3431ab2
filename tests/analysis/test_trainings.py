"""A real job that trains three models, one after the other, each with a process group of its own."""

from __future__ import annotations

import pytest

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.errors import UnusableInput
from ddpdoctor.hook.profiling import can_be_read
from ddpdoctor.report.tables import trainings_table
from ddpdoctor.report.words import RUN_LABELS
from tests.hook.recording import forked
from tests.launch.launched import run_under

JOB = "several_trainings.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    recorded = run_under(tmp_path_factory.mktemp("trainings"), forked(JOB), "--no-profile", timeout_s=120)
    assert recorded.process.returncode == 0, recorded.process.stderr
    return str(recorded.run)


def test_the_longest_is_measured_alone_and_all_are_listed(run: str) -> None:
    diagnosis = analyze(run)
    first = diagnosis.findings[0]
    assert first.rule == "host/outside-work"
    assert [place.line for place in first.where[:1]] == ([22] if can_be_read() else [])
    assert 27 <= (first.costs_ms_per_step or 0) <= 33
    assert [rule.rule for rule in diagnosis.findings if rule.rule == "run/step-time-changed"] == []
    assert any("3 trainings" in note and "number 2" in note for note in diagnosis.notes)
    table = trainings_table(diagnosis)
    assert table is not None
    assert [row[0] for row in table.rows] == ["1", "→ 2", "3"]
    assert [row[3] for row in table.rows] == ["0 – 29", "30 – 69", "70 – 99"]
    assert table.rows[1][-1] == first.rule and "not diagnosed" not in [row[-1] for row in table.rows]
    run_facts = diagnosis.facts["run"]
    assert run_facts["steps"] == 40 and run_facts["other_trainings_s"] > 0
    parts_s = [run_facts[f"{part}_s"] or 0.0 for part in RUN_LABELS]
    assert sum(parts_s) == pytest.approx(run_facts["wall_s"], rel=0.01)


def test_another_one_can_be_chosen(run: str) -> None:
    diagnosis = analyze(run, Options(training=1))
    assert diagnosis.facts["run"]["steps"] == 30
    assert all(finding.rule != "host/outside-work" for finding in diagnosis.findings)
    assert [each["is_measured"] for each in diagnosis.facts["run"]["trainings"]] == [True, False, False]
    with pytest.raises(UnusableInput, match="there is no training 4: the ranks took 3 trainings"):
        analyze(run, Options(training=4))
