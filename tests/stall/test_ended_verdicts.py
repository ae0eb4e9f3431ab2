"""Jobs and ranks that ended: what failed, what somebody ended, and what only looks like a failure."""

from __future__ import annotations

import json

import pytest

from .recorded import (
    REDUCING,
    STEP,
    TRAIN,
    WAITING,
    Stopped,
    main_finding,
)
from .test_run_verdicts import diagnosed


@pytest.mark.parametrize(
    ("exit_code", "closed", "rule"),
    [
        (0, (True, True), None),
        (0, (True, False), None),
        (1, (False, True), "hang/unexplained"),
        (1, (True, True), "hang/unexplained"),
    ],
)
def test_a_controller_that_ends_its_workers(tmp_path, exit_code, closed, rule):
    """Ray does so with code 1, after a training that went well and after one that failed."""
    run = Stopped(tmp_path / "run", exit_code=exit_code)
    for rank, in_order in enumerate(closed):
        run.ended(rank, code=1, in_order=in_order)
    diagnosis = diagnosed(run)
    found = [finding.rule for finding in diagnosis.findings if finding.rule.startswith("hang/")]
    assert found == ([rule] if rule else [])
    noted = any("without closing the process group" in note for note in diagnosis.notes)
    assert noted is (exit_code == 0 and not all(closed))
    if rule and not all(closed):
        assert "only rank 1 had ended the process group" in main_finding(diagnosis).explanation


def test_a_launcher_that_crashes(tmp_path):
    run = Stopped(tmp_path / "run", exit_code=0)
    manifest = json.loads((run.path / "manifest.json").read_text()) | {"exit_code": None, "signal": 11}
    (run.path / "manifest.json").write_text(json.dumps(manifest))
    assert diagnosed(run).verdict.headline.startswith("The job failed with SIGSEGV")


def test_a_killed_rank_and_the_others_in_its_wake(tmp_path):
    run = (
        Stopped(tmp_path / "run")
        .rank(0, "backward", REDUCING)
        .rank(1, "other", [[TRAIN, 33, "f"]], "progress")
    )
    run.ended(1, code=None, signal=9).seen(0, WAITING, waits=True).stall()
    finding = main_finding(diagnosed(run))
    assert (finding.rule, finding.ranks, finding.where[0].line) == ("hang/rank-died", [1], 33)
    assert "SIGKILL" in finding.title


@pytest.mark.parametrize("name", ["progress", "standing"])
def test_a_killed_rank_is_not_where_it_was_in_a_step_that_is_over(tmp_path, name):
    """It went on, and whoever keeps Python's lock, or is killed, takes nothing back."""
    run = Stopped(tmp_path / "run").rank(0, "backward", REDUCING)
    run.rank(1, "collective", [[TRAIN, 24, "main"]], name, step=0, groups={"0": [1, -1, -1]})
    diagnosis = diagnosed(run.ended(1, code=None, signal=9).seen(0, WAITING, waits=True).stall())
    finding, row = main_finding(diagnosis), diagnosis.standing[1]
    assert (finding.rule, finding.ranks, finding.where) == ("hang/rank-died", [1], [])
    assert (row.phase, row.where, row.step, row.stack) == (None, None, STEP, [])


def test_a_rank_that_the_kernel_killed_for_memory(tmp_path):
    run = Stopped(tmp_path / "run").rank(1, "data", [[TRAIN, 33, "f"]], "progress")
    diagnosis = diagnosed(run.ended(1, signal=9, oom_kills=1))
    assert diagnosis.facts["hang"]["died"]["kind"] == "memory"
    assert "OOM-killed" in diagnosis.verdict.headline


def test_an_exit_code_without_a_reason_is_told_first(tmp_path):
    diagnosis = diagnosed(Stopped(tmp_path / "run", exit_code=3))
    assert diagnosis.verdict.rule == "hang/unexplained"
    assert diagnosis.verdict.headline.startswith("The job failed with exit code 3; last seen in step ")
    assert [each.step is not None for each in diagnosis.standing] == [True, True]


def test_a_job_that_somebody_ended_has_not_failed(tmp_path):
    run = Stopped(tmp_path / "run", exit_code=130)
    run.raised(0, "KeyboardInterrupt", "").raised(1, "KeyboardInterrupt", "")
    diagnosis = diagnosed(run.ended(0, signal=2).ended(1, code=130))
    assert not [finding.rule for finding in diagnosis.findings if finding.rule.startswith("hang/")]
