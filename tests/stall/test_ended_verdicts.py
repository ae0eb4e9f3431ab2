"""Jobs and ranks that ended: what failed, what somebody ended, what only looks like a failure; ends that nobody saw, or that other
witnesses tell of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpdoctor.analysis import analyze

from .recorded import (
    NOW_NS,
    REDUCING,
    STEP,
    TRAIN,
    WAITING,
    Stopped,
    main_finding,
)
from .test_parting import Numbered
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


TIMED_OUT = "[/pytorch/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation to complete"


def timed_out(tmp_path, *, waits: bool = False, gone_s: float = 1.0, **end: int) -> Stopped:
    """Rank 0's collective timed out while rank 1 waited, too, or did not; rank 1 was gone so many seconds later."""
    error = {"type": "RuntimeError", "message": TIMED_OUT, "frames": REDUCING}
    run = Stopped(tmp_path / "run").rank(0, "backward", REDUCING, "ending", how="exception", raised=[error])
    frames = REDUCING if waits else [[TRAIN, 33, "f"], [TRAIN, 90, "main"]]
    run.rank(1, "backward" if waits else "other", frames, "progress", at_ns=NOW_NS - 10**9)
    gone_ns = NOW_NS + round(gone_s * 1e9)
    run.ended(0, code=1, in_order=True, seen_ns=gone_ns - 10**8)
    return run.ended(1, in_order=False, seen_ns=gone_ns, **(end or {"signal": 15}))


def test_a_rank_for_which_another_waits_until_its_timeout(tmp_path):
    """The one that timed out is not the one at fault, also where the hang ended before the monitor would have seen it."""
    diagnosis = diagnosed(timed_out(tmp_path))
    finding = main_finding(diagnosis)
    assert (finding.rule, finding.ranks, finding.where[0].line) == ("hang/not-reached", [1], 33)
    assert diagnosis.facts["hang"]["not_reached"]["since_s"] == pytest.approx(310)
    assert diagnosis.facts["hang"]["until"] == "it ended with exit code 1"


def reduction(turn: int, step: int, *, returned: bool) -> str:
    """A line of calls.jsonl on a backward pass."""
    return json.dumps(
        {"open": int(not returned), "call": turn, "n": turn, "step": step, "k": "bwd", "pg": "0"}
    )


@pytest.mark.parametrize(("turn", "rule"), [(43, "hang/not-reached"), (44, "hang/rank-raised")])
def test_a_rank_that_could_not_say_what_it_did_until_the_timeout(tmp_path, turn, rule):
    """As one that holds Python's lock. Its calls show whether it had begun what the others waited for."""
    run = timed_out(tmp_path)
    (run.path / "ranks/00001/progress.json").unlink()
    (run.path / "ranks/00000/calls.jsonl").write_text(reduction(44, STEP, returned=False) + "\n")
    (run.path / "ranks/00001/calls.jsonl").write_text(reduction(turn, STEP - 1, returned=True) + "\n")
    finding = main_finding(diagnosed(run))
    assert (finding.rule, finding.ranks) == (rule, [int(rule == "hang/not-reached")])


@pytest.mark.parametrize(
    ("how", "rule"),
    [
        ({"waits": True}, "hang/rank-raised"),
        ({"gone_s": -20.0, "signal": 9}, "hang/rank-died"),
        ({"gone_s": -20.0, "code": 3}, "hang/rank-died"),
    ],
)
def test_a_timeout_that_shows_no_hang(tmp_path, how, rule):
    """Both wait, or the other had died by then."""
    assert main_finding(diagnosed(timed_out(tmp_path, **how))).rule == rule


@pytest.mark.parametrize("turn", [44, 45, None])
def test_a_rank_that_went_on_after_the_timeout_was_not_missing(tmp_path, turn):
    """The network fails for both, and rank 1 catches its own error: it does something else by then, and is ended."""
    run = timed_out(tmp_path, gone_s=5.0)
    seen = json.loads((run.path / "ranks/00001/progress.json").read_text())
    if turn is None:
        seen["at_ns"] = NOW_NS + 3 * 10**9
        (run.path / "ranks/00001/progress.json").write_text(json.dumps(seen))
    else:
        for rank, call in enumerate(
            (reduction(44, STEP, returned=False), reduction(turn, STEP, returned=True))
        ):
            (run.path / f"ranks/0000{rank}/calls.jsonl").write_text(call + "\n")
    finding = main_finding(diagnosed(run))
    assert (finding.rule, finding.ranks) == ("hang/rank-raised", [0])


@pytest.mark.parametrize("late_s", [-1, 3])
def test_a_rank_whose_calls_show_that_it_was_missing(tmp_path, late_s):
    """Whenever it last said what it did."""
    run = timed_out(tmp_path, gone_s=5.0)
    frames = [[TRAIN, 33, "f"], [TRAIN, 90, "main"]]
    run.rank(1, "other", frames, "progress", at_ns=NOW_NS + late_s * 10**9)
    for rank, call in enumerate(
        (reduction(44, STEP, returned=False), reduction(43, STEP - 1, returned=True))
    ):
        (run.path / f"ranks/0000{rank}/calls.jsonl").write_text(call + "\n")
    finding = main_finding(diagnosed(run))
    assert (finding.rule, finding.ranks) == ("hang/not-reached", [1])


@pytest.mark.parametrize(
    ("exit_code", "code", "state", "rule"),
    [
        (0, 0, "ended", None),
        (0, 0, "killed", "hang/not-reached"),
        (0, 9, "ended", "hang/not-reached"),
        (1, 0, "ended", "hang/not-reached"),
    ],
)
def test_a_job_that_ended_well_with_all_ranks_did_not_hang(tmp_path, exit_code, code, state, rule):
    """Whatever the hang monitor noted last."""
    run = Stopped(tmp_path / "run", exit_code=exit_code)
    run.rank(0, "backward", REDUCING, "progress").rank(1, "other", [[TRAIN, 33, "f"]], "progress")
    run.seen(0, WAITING, waits=True, in_order=False).seen(1, WAITING, waits=False, in_order=False)
    run.ended(0, code=0, in_order=True, seen_ns=NOW_NS)
    run.ended(1, code=code, in_order=code == 0, seen_ns=NOW_NS).stall(state)
    found = [each.rule for each in diagnosed(run).findings if each.rule.startswith("hang/")]
    assert found == ([rule] if rule else [])


def test_a_job_that_somebody_ended_has_not_failed(tmp_path):
    run = Stopped(tmp_path / "run", exit_code=130)
    run.raised(0, "KeyboardInterrupt", "").raised(1, "KeyboardInterrupt", "")
    diagnosis = diagnosed(run.ended(0, signal=2).ended(1, code=130))
    assert not [finding.rule for finding in diagnosis.findings if finding.rule.startswith("hang/")]


GONE_NS = NOW_NS - 300_000_000_000
"""When the ranks' processes were found to be gone."""


def ended_by_somebody(path, asked_ns):
    """torchrun leaves with 1 after SIGTERM; one rank fell to it, the other to SIGKILL after the grace, having lost the first."""
    run = Stopped(path / "run", exit_code=1).asked(15, asked_ns)
    run.raised(1, "RuntimeError", "Connection reset by peer", at_ns=GONE_NS)
    return run.ended(0, signal=15).ended(1, signal=9)


def test_what_comes_after_the_signal_is_no_failure(tmp_path):
    diagnosis = diagnosed(ended_by_somebody(tmp_path, GONE_NS - 30_000_000_000))
    assert not [finding.rule for finding in diagnosis.findings if finding.rule.startswith("hang/")]
    assert diagnosis.verdict.headline.startswith("The job was ended by SIGTERM (exit code 1), in step ")
    assert "; last seen: " in diagnosis.verdict.headline
    assert "rank 1 at train.py:70 in parse" in diagnosis.verdict.headline
    assert {each.rank: each.state for each in diagnosis.standing}[0] == "ended by SIGTERM"


def test_what_came_before_it_is(tmp_path):
    diagnosis = diagnosed(ended_by_somebody(tmp_path, GONE_NS + 2_000_000_000))
    assert diagnosis.verdict.headline.startswith("The job failed: ")
    assert diagnosis.verdict.rule in ("hang/rank-died", "hang/rank-raised")


def test_a_job_that_ends_in_order_although_it_was_asked_to_end(tmp_path):
    diagnosis = diagnosed(Stopped(tmp_path / "run", exit_code=0).asked(15, NOW_NS))
    assert "ended by" not in diagnosis.verdict.headline and diagnosis.standing == []


LOST = "Connection closed by peer [127.0.0.1]:23424"
LATER_NS = NOW_NS + 10**9


def test_a_rank_whose_end_nobody_saw(tmp_path) -> None:
    """It was killed before it was looked at, and left no exit code."""
    run = Stopped(tmp_path / "run").raised(0, "RuntimeError", LOST)
    finding = main_finding(analyze([str(run.path)]))
    assert (finding.rule, finding.ranks, finding.title) == ("hang/rank-died", [1], "Rank 1 died")
    assert "Rank 0 then raised" in finding.explanation


def test_all_ranks_that_only_lost_each_other(tmp_path) -> None:
    run = Stopped(tmp_path / "run").raised(0, "RuntimeError", LOST).raised(1, "RuntimeError", LOST)
    finding = main_finding(analyze([str(run.path)]))
    assert (finding.rule, finding.title) == (
        "hang/rank-raised",
        "Ranks 0 and 1 lost the connection to each other",
    )


@pytest.mark.parametrize("known", [{"code": None, "signal": None}, {"code": None, "signal": 11}])
def test_faulthandler_tells_the_signal_that_the_kernel_did_not(tmp_path, known) -> None:
    """The parent of a rank of mp.spawn waits for it, and is faster."""
    run = Stopped(tmp_path / "run").ended(1, in_order=False, **known)
    text = f'Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n  File "{TRAIN}", line 33 in f\n'
    (run.path / "ranks/00001/faults.txt").write_text(text)
    finding = main_finding(analyze([str(run.path)]))
    assert (finding.rule, finding.ranks, finding.title) == ("hang/rank-died", [1], "Rank 1 died (SIGSEGV)")


def test_ranks_that_called_different_collectives_and_whose_ends_nobody_saw(tmp_path) -> None:
    run = Numbered(tmp_path / "run")
    run.order(0, ("bwd", 50), ("bwd", 50), ("coll", 57), until=63)
    run.order(1, ("bwd", 50), ("bwd", 50), ("bwd", 50), until=63)
    finding = main_finding(analyze([str(run.path)]))
    assert (finding.rule, finding.ranks) == ("hang/different-collectives", [1])


@pytest.mark.parametrize("number", [2, 15])
def test_an_interrupt_of_one_rank_that_python_left_in_order(tmp_path, number) -> None:
    """Its exit handlers ran before the signal ended it; the launcher ended the other one later, which had lost it."""
    run = Stopped(tmp_path / "run").raised(1, "KeyboardInterrupt", "").raised(0, "RuntimeError", LOST)
    run.ended(1, signal=number, in_order=True, seen_ns=NOW_NS)
    run.ended(0, signal=15, in_order=True, seen_ns=LATER_NS)
    finding = main_finding(analyze([str(run.path)]))
    assert (finding.rule, finding.ranks) == ("hang/rank-died", [1])


def test_a_rank_that_calls_more_than_those_that_are_through(tmp_path) -> None:
    """No network is suspected where the other one had ended in order."""
    run = Stopped(tmp_path / "run").raised(1, "RuntimeError", LOST)
    run.ended(0, code=0, in_order=True, step=200)
    finding = main_finding(analyze([str(run.path)]))
    assert (finding.rule, finding.ranks) == ("hang/rank-raised", [1])
    assert "Rank 0 had ended in order, in step 200" in finding.explanation
    assert "network" not in finding.explanation


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
