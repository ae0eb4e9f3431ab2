"""Verdicts on run directories of jobs that stopped."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import pytest

from ddpdoctor.analysis import analyze
from ddpdoctor.errors import UnusableInput
from ddpdoctor.stall.causes import shortened

from .recorded import (
    BARRIER,
    FIRST_PID,
    LOCKED,
    NOW_NS,
    REDUCING,
    TORCH,
    TRAIN,
    WAITING,
    Stopped,
    main_finding,
)
from .simulated import pipelined, write

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
    assert diagnosis.verdict.headline.startswith(
        "The job hung for 310 s until it ended with exit code 1; last seen: rank 1 "
    )
    assert [each.rank for each in diagnosis.standing if each.guilty] == [1]


@pytest.mark.parametrize(
    ("state", "until"),
    [
        ("lasts", None),
        ("killed", "--on-hang kill ended it"),
        ("ended", "SIGTERM ended it"),
        ("ended", "it ended with exit code 1"),
        ("lasts", "it was killed"),
        ("ended", "it was killed"),
    ],
)
def test_a_job_that_hangs_no_more_hung_and_what_ended_it_is_told(tmp_path, state, until):
    run = Stopped(tmp_path / "run", ended=until not in (None, "it was killed"))
    if until == "it was killed":
        run.launched_here()
    if until == "SIGTERM ended it":
        run.asked(15, NOW_NS)
    run.rank(0, "backward", REDUCING).rank(1, "other", LOCKED, at_ns=NOW_NS + 20 * 10**9)
    run.seen(0, WAITING, waits=True).seen(1, FUTEX, waits=False).stall(state)
    diagnosis = diagnosed(run)
    assert main_finding(diagnosis).rule == "hang/not-reached"
    stands = "rank 1 waits for a lock or for another thread at train.py:57 in load"
    if until is None:
        assert diagnosis.verdict.headline == f"The job hangs: {stands} (for 310 s); rank 0 waits"
        assert diagnosis.facts["hang"]["lasts"] is True
    else:
        lasted = "330 s" if until == "it was killed" else "310 s"  # the ranks' last words are newer
        ended = f"The job hung for {lasted} until {until}; last seen: {stands}; rank 0 waits"
        assert diagnosis.verdict.headline == ended
        assert (diagnosis.facts["hang"]["lasts"], diagnosis.facts["hang"]["until"]) == (False, until)


@pytest.mark.parametrize("phase", ["other", "forward"])
def test_a_rank_that_computes_may_be_in_a_long_computation(tmp_path, phase):
    """As its launcher says, whatever its training thread did in the moment of the look."""
    run = Stopped(tmp_path / "run", ended=False).rank(0, "backward", REDUCING)
    run.rank(1, phase, [[TRAIN, 57, "load"]]).seen(0, WAITING, waits=True, computes=False)
    run.seen(1, {"state": "S", "wchan": "0", "tracer": 0}, waits=False, computes=True).stall("lasts")
    headline = diagnosed(run).verdict.headline
    assert headline == (
        "The job seems to hang: rank 1 keeps computing at train.py:57 in load (for 310 s); rank 0 waits"
    )


def test_a_rank_that_keeps_the_lock_of_python_has_its_stack_from_faulthandler(tmp_path):
    run = Stopped(tmp_path / "run").rank(0, "backward", REDUCING).flight(0, [("all_reduce", 9)] * 3, True)
    run.rank(1, "other", [[TRAIN, 12, "earlier"]], "progress", groups={"0": [2, -1, 2]})
    faults = f'Stack (most recent call first):\n  File "{TRAIN}", line 58 in crunch\n'
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


@pytest.mark.parametrize(
    ("out", "rule"), [((0, 1), "hang/different-collectives"), ((1,), "hang/uneven-inputs")]
)
def test_at_the_end_of_an_epoch_nobody_has_batches_left(tmp_path, out, rule):
    """Ranks differ in the evaluation behind it; only where others have batches, running out of them is the difference."""
    run = Stopped(tmp_path / "run").rank(0, "backward", REDUCING, exhausted=0 in out)
    run.rank(1, "barrier", BARRIER, exhausted=1 in out)
    run.seen(0, WAITING, waits=True).seen(1, WAITING, waits=True).stall()
    run.flight(0, [*[("all_reduce", 300)] * 4], pending=True)
    run.flight(1, [*[("all_reduce", 300)] * 3, ("barrier", 1)], pending=True)
    finding = main_finding(diagnosed(run))
    assert (finding.rule, finding.ranks) == (rule, [1])


def test_an_exception_is_the_cause_and_lost_connections_are_effects(tmp_path):
    run = Stopped(tmp_path / "run").raised(1, "ValueError", "bad sample 17", NOW_NS - 2 * 10**9)
    run.raised(0, "RuntimeError", "Connection closed by peer [10.0.0.1]:4711", NOW_NS - 3 * 10**9, line=40)
    run.ended(0, code=1).ended(1, code=1)
    diagnosis = diagnosed(run)
    finding = main_finding(diagnosis)
    assert (finding.rule, finding.ranks, finding.where[0].line) == ("hang/rank-raised", [1], 70)
    assert diagnosis.verdict.headline.startswith("The job failed: rank 1 raised ValueError: bad sample 17")
    assert [each.rank for each in diagnosis.standing if each.where] == [0, 1]
    assert 'Rank 0 then raised "RuntimeError: Connection closed by peer' in finding.explanation


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


def silent(path) -> Stopped:
    """A run of which nobody has said that it hangs, in a step for 310 s."""
    run = Stopped(path / "run", ended=False)
    run.rank(0, "backward", REDUCING, "progress", groups={"0": [3, -1, 2]})
    return run.rank(1, "other", LOCKED, "progress", groups={"0": [2, -1, 2]})


def test_killed_whole_while_it_hung(tmp_path):
    """Nobody wrote a last word: the ranks' own last records show it, and what the other rank waited for."""
    finding = main_finding(diagnosed(silent(tmp_path).launched_here()))
    assert (finding.rule, finding.ranks, finding.where[0].line) == ("hang/not-reached", [1], 57)


@pytest.mark.parametrize(
    "run",
    [
        lambda run: run,
        lambda run: run.launched_here(os.getpid()),
        lambda run: run.launched_here().ran_here(1, os.getpid()),
    ],
    ids=["not known whether it runs", "its launcher runs", "a rank runs"],
)
def test_only_the_launcher_says_that_a_job_hangs_unless_it_is_known_to_be_killed(tmp_path, run):
    diagnosis = diagnosed(run(silent(tmp_path)))
    assert not [finding.rule for finding in diagnosis.findings if finding.rule.startswith("hang/")]
    assert "hangs" not in diagnosis.verdict.headline


@pytest.mark.parametrize(
    ("run", "recorded", "words"),
    [
        (lambda run: run, True, "The job may run and be in its first step, or was killed there"),
        (lambda run: run, False, "The job may run and not have come so far, or was killed there"),
        (
            lambda run: run.launched_here(os.getpid()),
            True,
            "its job is running, and has not finished a step yet. ",
        ),
        (
            lambda run: run.launched_here().ran_here(1, os.getpid()),
            True,
            "its job is running, and has not finished a step yet. `ddpdoctor watch {run}` shows its steps as they end, "
            "`ddpdoctor stacks {run}` where its ranks are now.",
        ),
        (
            lambda run: run.launched_here(os.getpid()),
            False,
            "its command is running, and no rank has joined a process group yet. Try again once it trains; `ddpdoctor watch {run}`",
        ),
        (lambda run: run.launched_here(), False, "no rank was recorded. Its launcher was killed before that"),
    ],
)
def test_a_job_before_the_end_of_its_first_step_has_no_verdict_yet(tmp_path, run, recorded, words):
    job = run(silent(tmp_path))
    for log in job.path.glob("ranks/*/steps.jsonl"):
        log.write_text('{"schema":"ddpdoctor.steps/2"}\n')
    if not recorded:
        shutil.rmtree(job.path / "ranks")
    with pytest.raises(UnusableInput) as told:
        diagnosed(job)
    assert words.format(run=job.path) in str(told.value)


def test_only_the_waiting_rank_was_recorded(tmp_path):
    run = Stopped(tmp_path / "run", ended=False).launched_here().rank(0, "backward", REDUCING, "progress")
    for file in sorted((run.path / "ranks/00001").iterdir()):
        file.unlink()
    (run.path / "ranks/00001").rmdir()
    diagnosis = diagnosed(run)
    assert diagnosis.verdict.rule == "hang/unexplained"
    assert main_finding(diagnosis).ranks is None


def test_a_full_stop_of_an_exception_is_not_doubled(tmp_path):
    message = "DataLoader worker (pid 7) is killed by signal: Killed."
    run = Stopped(tmp_path / "run").raised(1, "RuntimeError", message)
    explanation = main_finding(diagnosed(run.ended(1, code=1).ended(0, signal=15))).explanation
    assert "killed by signal: Killed at train.py:70" in explanation and ".." not in explanation


@pytest.mark.parametrize(
    "run",
    [
        lambda path: hung(path, LOCKED, FUTEX).stall("resumed"),
        lambda path: hung(path, LOCKED, FUTEX).stall("lasts", paused_in="evaluation"),
        lambda path: (
            Stopped(path / "run", ended=False).launched_here().rank(0, "evaluation", REDUCING, "progress")
        ),
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


def test_of_two_directories_the_second_says_that_its_command_failed(tmp_path):
    first, second = Stopped(tmp_path / "a", exit_code=0), Stopped(tmp_path / "b", exit_code=3)
    for run, gone in ((first, 1), (second, 0)):
        shutil.rmtree(run.path / f"ranks/{gone:05d}")
    diagnosis = analyze([str(first.path), str(second.path)])
    assert diagnosis.job.exit_code == 3 and "exit code 3" in diagnosis.verdict.headline


def unjoined(rank: int, waits: bool, line: int, state: str = "S") -> dict:
    """As the launcher's side sees a rank that has not joined."""
    faults = (
        'Thread 0x00007f02 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 1 in wait\n\n'
        f'Current thread 0x00007f01 (most recent call first):\n  File "{TRAIN}", line {line} in build\n'
    )
    process = {"state": state, "wchan": "ep_poll" if waits else "0", "tracer": 0}
    return {
        "rank": rank,
        "pid": FIRST_PID + rank,
        "answered": True,
        "waits": waits,
        "process": process,
    } | {
        "joined": False,
        "faults": faults,
    }


def without_ranks(tmp_path) -> Stopped:
    run = Stopped(tmp_path / "run", ended=False)
    shutil.rmtree(run.path / "ranks")
    return run


def test_a_rank_that_has_not_joined_is_named_with_its_line(tmp_path):
    run = without_ranks(tmp_path)
    run.stalled += [unjoined(0, True, 12), unjoined(1, False, 33, "R")]
    diagnosis = diagnosed(run.stall("lasts"))
    finding = main_finding(diagnosis)
    assert (finding.rule, finding.ranks, finding.where[0].line) == ("hang/not-reached", [1], 33)
    assert (
        "seems to hang: rank 1 has not called init_process_group: it keeps computing"
        in diagnosis.verdict.headline
    )
    assert diagnosis.facts["hang"]["not_reached"]["waiting_ranks"] == [0]


def test_all_that_are_there_wait_to_join(tmp_path):
    run = without_ranks(tmp_path)
    run.stalled += [unjoined(0, True, 12), unjoined(1, True, 12)]
    finding = main_finding(diagnosed(run.stall("lasts")))
    assert (finding.rule, finding.where[0].line) == ("hang/rendezvous", 12)


def test_a_group_that_is_made_again_and_that_one_rank_believes_to_have(tmp_path):
    """It read the address that the other left in the store for the first group."""
    joining = [[f"{TORCH}/distributed/distributed_c10d.py", 1800, "init_process_group"], [TRAIN, 12, "main"]]
    wrapping = [
        [f"{TORCH}/distributed/utils.py", 280, "_verify_param_shape_across_processes"],
        [f"{TORCH}/nn/parallel/distributed.py", 700, "__init__"],
        [TRAIN, 13, "main"],
    ]
    run = Stopped(tmp_path / "run")
    run.rank(0, "rendezvous", joining).seen(0, WAITING, waits=True)
    run.rank(1, "collective", wrapping).seen(1, WAITING, waits=True)
    run.stall()
    finding = main_finding(diagnosed(run))
    assert finding.rule == "hang/rendezvous" and {where.line for where in finding.where} == {12, 13}
    assert "had trained before" in finding.fixes[0].why


def test_one_that_raised_before_it_joined(tmp_path):
    run = without_ranks(tmp_path)
    error = {"type": "ValueError", "message": "no such data", "frames": [[TRAIN, 21, "open_data"]]}
    run.ended(1, code=1, step=None, raised=[error])
    finding = main_finding(diagnosed(run))
    assert (finding.rule, finding.ranks, finding.where[0].line) == ("hang/rank-raised", [1], 21)


def test_a_text_is_cut_between_words():
    assert shortened("one two three", 9) == "one two ..."
    assert shortened("one two", 9) == "one two" and shortened("x" * 20, 9) == "x" * 9 + " ..."


def test_advice_to_ask_a_process_only_while_there_is_one(tmp_path):
    for state, asked in (("lasts", True), ("ended", False)):
        run = (
            Stopped(tmp_path / state, ended=state == "ended")
            .rank(0, "backward", REDUCING)
            .rank(1, "other", LOCKED)
        )
        run.seen(0, WAITING, waits=True).seen(1, FUTEX, waits=False).stall(state)
        snippets = [fix.snippet or "" for fix in main_finding(diagnosed(run)).fixes]
        assert any("py-spy" in snippet for snippet in snippets) is asked


def test_all_stand_for_as_long_as_the_headline_says(tmp_path):
    """However long ago each was asked itself."""
    run = (
        Stopped(tmp_path / "run")
        .rank(0, "backward", REDUCING, at_ns=NOW_NS - 4 * 10**9)
        .rank(1, "other", LOCKED)
    )
    run.seen(0, WAITING, waits=True).seen(1, FUTEX, waits=False).stall("killed", looked_ns=NOW_NS)
    diagnosis = diagnosed(run)
    assert {each.since_s for each in diagnosis.standing} == {310.0}


def test_dumps_beside_a_job_that_is_over_tell_why_it_hung(tmp_path):
    run = Stopped(tmp_path / "run")
    beside = write(tmp_path / "dumps", replace(pipelined(), host_stops={8: 9}))
    assert analyze([beside]).verdict.headline.startswith("The job hung: rank 8 never entered the all_reduce")
    over = analyze([str(run.path), beside])
    assert over.verdict.headline.startswith("The job hung; last seen: rank 8 ")
    assert over.facts["hang"]["lasts"] is False


def test_bad_dumps_beside_a_run_do_not_replace_its_verdict(tmp_path):
    run = hung(tmp_path, LOCKED, FUTEX)
    beside = tmp_path / "dumps"
    beside.mkdir()
    (beside / "nccl_trace_rank_0").write_bytes(b"\x80\x02broken")
    diagnosis = analyze([str(run.path), str(beside)])
    assert main_finding(diagnosis).rule == "hang/not-reached"
    assert any("nccl_trace_rank_0" in note for note in diagnosis.notes)
