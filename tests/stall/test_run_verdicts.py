"""Verdicts on run directories of jobs that stopped."""

from __future__ import annotations

import pytest

from ddpdoctor.analysis import analyze

from .recorded import BARRIER, LOCKED, NOW_NS, REDUCING, TORCH, TRAIN, WAITING, Stopped, main_finding

FUTEX = {"state": "S", "wchan": "futex_wait_queue", "tracer": 0}


def diagnosed(run: Stopped):
    return analyze([str(run.path)])


def hung(tmp_path, frames, process, phase="other", **more) -> Stopped:
    """Rank 1 stands at ``frames``, rank 0 waits in backward for it."""
    run = Stopped(tmp_path / "run").rank(0, "backward", REDUCING).rank(1, phase, frames, **more)
    return run.seen(0, WAITING, waits=True).seen(1, process, waits=False).stall()


@pytest.mark.parametrize(
    ("frames", "process", "phase", "doing"),
    [
        (LOCKED, FUTEX, "other", "lock"),
        ([[TRAIN, 57, "load"]], {"state": "S", "wchan": "hrtimer_nanosleep"}, "other", "sleep"),
        ([[TRAIN, 57, "load"]], {"state": "D", "wchan": "nfs_wait_bit_killable"}, "other", "storage"),
        ([[TRAIN, 57, "load"]], {"state": "R", "wchan": "0"}, "other", "loop"),
        (
            [["/usr/lib/python3.11/socket.py", 700, "readinto"], [TRAIN, 57, "load"]],
            WAITING,
            "other",
            "network",
        ),
        (
            [[f"{TORCH}/utils/data/dataloader.py", 1, "_try_get_data"], [TRAIN, 57, "load"]],
            FUTEX,
            "data",
            "loader",
        ),
        ([[TRAIN, 57, "load"]], FUTEX, "save", "checkpoint"),
        ([[TRAIN, 57, "load"]], {"state": "T", "wchan": "do_signal_stop", "tracer": 0}, "other", "stopped"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_rank_that_does_not_come_and_what_it_does(tmp_path, frames, process, phase, doing):
    diagnosis = diagnosed(hung(tmp_path, frames, process, phase))
    finding = main_finding(diagnosis)
    assert finding.rule == "hang/not-reached"
    assert finding.ranks == [1]
    assert (finding.where[0].file, finding.where[0].line) == (TRAIN, 57)
    assert diagnosis.facts["hang"]["not_reached"]["doing"] == doing
    assert diagnosis.facts["hang"]["not_reached"]["since_s"] == 310.0
    assert diagnosis.verdict.headline.startswith("The job hangs: rank 1 ")
    assert [each.rank for each in diagnosis.standing if each.guilty] == [1]


def test_a_rank_that_keeps_the_lock_of_python_has_its_stack_from_faulthandler(tmp_path):
    run = Stopped(tmp_path / "run").rank(0, "backward", REDUCING).flight(0, [("all_reduce", 9)] * 3, True)
    run.rank(1, "other", [[TRAIN, 12, "earlier"]], "progress", groups={"0": [2, -1, 2]})
    faults = f'Timeout (0:00:30)!\nThread 0x00007f01 (most recent call first):\n  File "{TRAIN}", line 58 in crunch\n'
    (run.path / "ranks/00001/faults.txt").write_text(faults)
    run.seen(0, WAITING, waits=True).seen(1, {"state": "S", "wchan": "do_wait"}, answered=False).stall()
    diagnosis = diagnosed(run)
    finding = main_finding(diagnosis)
    assert (finding.rule, finding.ranks, finding.where[0].line) == ("hang/not-reached", [1], 58)
    assert diagnosis.facts["hang"]["not_reached"]["doing"] == "native"
    assert diagnosis.facts["hang"]["not_reached"]["sequence"] == 3


def test_a_barrier_on_one_rank(tmp_path):
    usual = [("all_reduce", 100)] * 5
    run = Stopped(tmp_path / "run").rank(0, "backward", REDUCING).rank(1, "barrier", BARRIER)
    run.flight(0, [*usual, ("all_reduce", 100)], True).flight(1, [*usual, ("barrier", 1)], True)
    finding = main_finding(diagnosed(run.seen(0, WAITING, waits=True).seen(1, WAITING, waits=True).stall()))
    assert (finding.rule, finding.ranks, finding.where[0].line) == ("hang/different-collectives", [1], 61)


def test_the_same_without_flight_recorders(tmp_path):
    run = Stopped(tmp_path / "run").rank(0, "backward", REDUCING).rank(1, "barrier", BARRIER)
    finding = main_finding(diagnosed(run.seen(0, WAITING, waits=True).seen(1, WAITING, waits=True).stall()))
    assert (finding.rule, finding.ranks, finding.where[0].line) == ("hang/different-collectives", [1], 61)


def test_a_rank_that_is_out_of_batches(tmp_path):
    run = hung(
        tmp_path, [[TRAIN, 95, "summary"]], {"state": "S", "wchan": "hrtimer_nanosleep"}, exhausted=True
    )
    finding = main_finding(diagnosed(run))
    assert (finding.rule, finding.ranks, finding.where[0].line) == ("hang/uneven-inputs", [1], 95)


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


def test_a_rank_that_the_kernel_killed_for_memory(tmp_path):
    run = Stopped(tmp_path / "run").rank(1, "data", [[TRAIN, 33, "f"]], "progress")
    diagnosis = diagnosed(run.ended(1, signal=9, oom_kills=1))
    assert diagnosis.facts["hang"]["died"]["kind"] == "memory"
    assert "want of memory" in diagnosis.verdict.headline


def test_an_exception_is_the_cause_and_lost_connections_are_effects(tmp_path):
    run = Stopped(tmp_path / "run").raised(1, "ValueError", "bad sample 17", NOW_NS - 2 * 10**9)
    run.raised(0, "RuntimeError", "Connection closed by peer [10.0.0.1]:4711", NOW_NS - 3 * 10**9, line=40)
    run.ended(0, code=1).ended(1, code=1)
    diagnosis = diagnosed(run)
    finding = main_finding(diagnosis)
    assert (finding.rule, finding.ranks, finding.where[0].line) == ("hang/rank-raised", [1], 70)
    assert diagnosis.verdict.headline.startswith("The job failed: rank 1 raised ValueError: bad sample 17")
    assert "Rank 0 then raised RuntimeError: Connection closed by peer" in finding.explanation


def test_what_follows_a_hang_is_no_cause_of_it(tmp_path):
    """The watchdog ends the rank that waited, long after the standstill was seen."""
    run = hung(tmp_path, LOCKED, FUTEX).ended(0, signal=6, seen_ns=NOW_NS + 10**12)
    finding = main_finding(diagnosed(run))
    assert (finding.rule, finding.ranks) == ("hang/not-reached", [1])


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        (
            "Expected to have finished reduction in the prior iteration before starting a new one.",
            "hang/unused-parameter",
        ),
        ("CUDA error: an illegal memory access was encountered", "hang/device-error"),
        ("DataLoader worker (pid 4300) is killed by signal: Bus error.", "hang/loader-worker-killed"),
    ],
)
def test_exceptions_that_say_what_it_was(tmp_path, message, rule):
    finding = main_finding(
        diagnosed(Stopped(tmp_path / "run").raised(1, "RuntimeError", message).ended(1, code=1))
    )
    assert (finding.rule, finding.ranks) == (rule, [1])


def test_an_exit_code_without_a_reason_is_told_first(tmp_path):
    diagnosis = diagnosed(Stopped(tmp_path / "run", exit_code=3))
    assert diagnosis.verdict.rule == "hang/unexplained"
    assert diagnosis.verdict.headline.startswith("The job failed with exit code 3; last seen in step ")
    assert [each.step is not None for each in diagnosis.standing] == [True, True]


def test_killed_whole_while_it_hung(tmp_path):
    """Nobody wrote a last word: the ranks' own last records show it, and what the other rank waited for."""
    run = Stopped(tmp_path / "run", ended=False)
    run.rank(0, "backward", REDUCING, "progress", groups={"0": [3, -1, 2]})
    run.rank(1, "other", LOCKED, "progress", groups={"0": [2, -1, 2]})
    finding = main_finding(diagnosed(run))
    assert (finding.rule, finding.ranks, finding.where[0].line) == ("hang/not-reached", [1], 57)


def test_only_the_waiting_rank_was_recorded(tmp_path):
    run = Stopped(tmp_path / "run", ended=False).rank(0, "backward", REDUCING, "progress")
    for file in sorted((run.path / "ranks/00001").iterdir()):
        file.unlink()
    (run.path / "ranks/00001").rmdir()
    diagnosis = diagnosed(run)
    assert diagnosis.verdict.rule == "hang/unexplained"
    assert main_finding(diagnosis).ranks is None


def test_a_job_that_somebody_ended_has_not_failed(tmp_path):
    run = Stopped(tmp_path / "run", exit_code=130)
    run.raised(0, "KeyboardInterrupt", "").raised(1, "KeyboardInterrupt", "")
    diagnosis = diagnosed(run.ended(0, signal=2).ended(1, code=130))
    assert not [finding.rule for finding in diagnosis.findings if finding.rule.startswith("hang/")]


@pytest.mark.parametrize(
    "run",
    [
        lambda path: hung(path, LOCKED, FUTEX).stall("resumed"),
        lambda path: hung(path, LOCKED, FUTEX).stall("lasts", paused_in="evaluation"),
        lambda path: Stopped(path / "run", ended=False).rank(0, "evaluation", REDUCING, "progress"),
        lambda path: Stopped(path / "run").ended(0, code=0).ended(1, code=0, in_order=True),
    ],
    ids=["resumed", "paused", "evaluates", "ended"],
)
def test_healthy_and_paused_jobs_hear_nothing_of_a_hang(tmp_path, run):
    made = run(tmp_path)
    if made.gone:
        text = (made.path / "manifest.json").read_text()
        (made.path / "manifest.json").write_text(text.replace('"exit_code": 1', '"exit_code": 0'))
    if made.stalled:
        text = (made.path / "manifest.json").read_text()
        (made.path / "manifest.json").write_text(text.replace('"exit_code": 1', '"exit_code": 0'))
    diagnosis = diagnosed(made)
    assert not [finding.rule for finding in diagnosis.findings if finding.rule.startswith("hang/")]
    assert diagnosis.standing == []


def test_two_hosts_of_which_each_wrote_its_own_directory(tmp_path):
    first, second = Stopped(tmp_path / "a", ended=False), Stopped(tmp_path / "b", ended=False)
    for run, gone in ((first, 1), (second, 0)):
        folder = run.path / f"ranks/{gone:05d}"
        for file in sorted(folder.iterdir()):
            file.unlink()
        folder.rmdir()
    first.rank(0, "backward", REDUCING).seen(0, WAITING, waits=True).stall("lasts")
    second.rank(1, "other", LOCKED).seen(1, FUTEX, waits=False).stall("lasts")
    diagnosis = analyze([str(tmp_path / "a"), str(tmp_path / "b")])
    finding = main_finding(diagnosis)
    assert (finding.rule, finding.ranks, finding.where[0].line) == ("hang/not-reached", [1], 57)
