"""``ddpdoctor capture`` and ``ddpdoctor stacks`` on real ranks that train meanwhile."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections import deque
from pathlib import Path

import pytest

from ddpdoctor.cli.rank_requests import _send_request, _window_number, is_stopped, why_no_window
from ddpdoctor.cli.stacks import command as stacks
from ddpdoctor.errors import UnusableInput
from ddpdoctor.rundir import CAPTURE_ANSWER, STALL_FILE
from ddpdoctor.rundir.host_files import keep_host_document
from ddpdoctor.rundir.liveness import boot_id, pid_namespace, started
from ddpdoctor.rundir.owned import make_private_folder
from ddpdoctor.rundir.requests import CAPTURE_SCHEMA, CaptureRequest, Present
from ddpdoctor.rundir.stops import PROGRESS_SCHEMA
from ddpdoctor.telemetry.live import FileTail, LiveRank, LiveRun, LiveStep
from tests.cli.live import DOCTOR, ENVIRONMENT, live_run, steps_of
from tests.commands import ROOT, command
from tests.hook.recording import JOBS, forked
from tests.launch.launched import descendants, kill, running, steps_taken
from tests.python import NEEDS_STACKS
from tests.stall.recorded import Stopped
from tests.waiting import until

PIPES = {"env": ENVIRONMENT, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@pytest.fixture
def captured(once):
    return live_run(once)


@pytest.mark.torchrun
def test_all_ranks_open_the_window_in_the_same_steps(captured):
    run, (code, out, err) = captured.run, captured.said["capture"]
    assert (code, err) == (0, ""), (out, err)
    first, last = map(int, re.search(r"window 1: steps (\d+) to (\d+) on 2 ranks", out).groups())
    assert last == first + 4 and "2 traces saved; `ddpdoctor analyze" in out
    for rank in range(2):
        assert (run / "ranks" / f"{rank:05d}" / "trace.1.json.gz").stat().st_size > 1000
        assert (run / "ranks" / f"{rank:05d}" / "trace.json.gz").stat().st_size > 1000
        profiled = [line["step"] for line in steps_of(run, rank) if "profiled" in line.get("marks", [])]
        assert profiled[-5:] == list(range(first, last + 1)) and profiled[-6] < first - 10


@pytest.mark.torchrun
def test_the_new_window_is_analysed_and_the_first_one_unchanged(captured):
    run = captured.run
    done = command("analyze", run, "--window", "1", "--json", "-", "-q")
    assert done.returncode == 0
    diagnosis = json.loads(done.stdout)
    assert diagnosis["findings"][0]["ranks"] == [1] and diagnosis["findings"][0]["share"]
    window = diagnosis["steps"]["window"]
    assert window["last"] - window["first"] < 20, "the first window's cost, not that up to the capture"
    done = command("analyze", run, "--window", "3")
    assert done.returncode == 2 and "there is no window 3: " in done.stderr
    assert done.stderr.rstrip().endswith("has 1.")


@pytest.mark.torchrun
@NEEDS_STACKS
def test_stacks_show_where_each_rank_is(captured):
    (code, out, err), (_, verbose, _) = captured.said["stacks"], captured.said["stacks -v"]
    assert (code, err) == (0, "")
    assert re.findall(r"^rank (\d) \(process \d+\) in step [\d,]+ for [\d.]+ s: \w+$", out, re.MULTILINE) == [
        "0",
        "1",
    ]
    assert "job.py:" in out and "site-packages" not in out
    assert "(trains):" in verbose and len(verbose.splitlines()) > len(out.splitlines())


def test_a_job_that_does_not_run_is_refused(tmp_path):
    for verb in ("stacks", "capture"):
        done = command(verb, ROOT / "fixtures" / "healthy")
        assert (done.returncode, done.stdout) == (2, "") and "has ended: `ddpdoctor analyze" in done.stderr
        done = command(verb, tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.search("no run directory|not a ddpdoctor run directory", done.stderr)


def test_a_killed_job_is_refused(tmp_path):
    run = Stopped(tmp_path / "run", ended=False).launched_here()
    for verb in ("stacks", "capture"):
        done = command(verb, run.path)
        assert (done.returncode, done.stdout) == (2, "")
        assert "is no longer running: its launcher was killed" in done.stderr
        assert "`ddpdoctor analyze" in done.stderr and "try again" not in done.stderr
    run.launched_here(os.getpid())
    for verb in ("stacks", "capture"):
        assert "ranks have not joined yet: try again" in command(verb, run.path).stderr


def standing(folder, step_s, phase=None, stall=None):
    """A rank of 30 steps of ``step_s`` each, with its phase and the monitor's state."""
    live = LiveRun(folder / "run")
    steps = deque(LiveStep(number, 0, int(step_s * 1e9)) for number in range(30))
    live.ranks[0] = LiveRank(0, "here", 1, FileTail(folder / "steps.jsonl"), steps)
    make_private_folder(str(folder / "root"))
    spool = folder / "root" / "00000-1"
    spool.mkdir(0o700)
    if phase:
        said = {"schema": PROGRESS_SCHEMA, "rank": 0, "phase": phase, "step": 30}
        (spool / "progress.json").write_text(json.dumps(said))
    if stall:
        keep_host_document(
            str(folder / "root"), STALL_FILE, {"host": "here", "state": stall, "silent_s": 301.0}
        )
    return live, [Present(0, 1, str(spool))]


@pytest.mark.parametrize(
    ("step_s", "phase", "longest_s"),
    [
        (0.02, None, 60),
        (0.02, "evaluation", 300),
        (0.02, "save", 300),
        (90.0, None, 900),
        (90.0, "backward", 900),
    ],
)
def test_the_limit_without_a_finished_step_follows_the_jobs_steps(tmp_path, step_s, phase, longest_s):
    live, ranks = standing(tmp_path, step_s, phase)
    assert why_no_window(live, ranks, 0.99 * longest_s) is None
    why = why_no_window(live, ranks, 1.01 * longest_s)
    assert (
        f"the job makes no progress in step 30: no rank has finished a step for {1.01 * longest_s:.0f} s"
        in why
    )
    assert f"`ddpdoctor stacks {tmp_path}/run`" in why


@pytest.mark.parametrize("ago_s", [1, 20])
def test_a_stall_is_the_reason_and_not_an_open_window(tmp_path, ago_s):
    live, (rank,) = standing(tmp_path, 0.02)
    live.ranks[0].steps.append(LiveStep(30, 0, time.time_ns() - ago_s * 10**9))
    said = {"schema": CAPTURE_SCHEMA, "request": 1, "step": 30, "why": "another window is under way"}
    Path(rank.spool, CAPTURE_ANSWER).write_text(json.dumps(said))
    with pytest.raises(UnusableInput) as refused:
        _send_request(live, [rank], CaptureRequest(1, 1, 40, 8))
    if ago_s == 1:
        assert str(refused.value) == "no window, because rank 0 cannot open one: another window is under way."
    else:
        stands = "windows open and close at the ends of steps, and no rank has finished a step for 20 s. `ddpdoctor stacks "
        assert stands in str(refused.value)


def test_a_suspended_rank_is_reported_as_stopped(tmp_path, monkeypatch, capsys):
    live, (rank,) = standing(tmp_path, 0.02)
    process = subprocess.Popen(["sleep", "60"])
    try:
        here = {"namespace": pid_namespace(), "boot": boot_id(), "host": socket.gethostname()}
        writer = {"pid": process.pid, "started": started(process.pid), **here}
        Path(rank.spool, "writer.json").write_text(json.dumps(writer))
        assert not is_stopped(rank)
        process.send_signal(signal.SIGSTOP)
        until(lambda: is_stopped(rank), within_s=10)
        monkeypatch.setattr("ddpdoctor.cli.rank_requests.running_ranks", lambda run: [rank])
        monkeypatch.setattr("ddpdoctor.cli.stacks.ANSWER_S", 0.1)
        monkeypatch.setattr("ddpdoctor.cli.rank_requests._ANSWER_S", 0.1)
        stacks.callback(tmp_path / "run", False)
        assert capsys.readouterr().out == "rank 0 (process 1) is stopped (SIGSTOP).\n"
        with pytest.raises(UnusableInput, match=r"^no window, because rank 0 is stopped \(SIGSTOP\)\.$"):
            _send_request(live, [rank], CaptureRequest(1, 1, 40, 8))
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("state", "hangs"), [("lasts", True), ("resumed", False), ("killed", False)])
def test_a_job_that_its_monitor_reports_as_hung_is_not_waited_for(tmp_path, state, hangs):
    live, ranks = standing(tmp_path, 90.0, stall=state)
    why = why_no_window(live, ranks, 4.0)
    assert (why is not None) == hangs
    assert not hangs or "the job hangs in step 30: no rank has finished a step for 301 s" in why


STANDS_AT = 400
"""The step in which the job stops while a later window is awaited."""


@pytest.mark.torchrun
@pytest.mark.extended
@pytest.mark.parametrize("end", ["hangs", "is killed"])
def test_a_window_that_cannot_open_is_not_waited_for(tmp_path, end):
    """In a job that already hangs, no window is requested."""
    pytest.importorskip("torch")
    at = STANDS_AT if end == "hangs" else -1
    job = forked(
        JOBS / "stopping_ddp.py",
        "--how",
        "asleep_in_a_lock",
        "--at",
        str(at),
        "--steps",
        "100000",
        "--for-s",
        "120",
    )
    with running(tmp_path, job, "--no-profile", "--hang-after", "5") as launcher:
        until(lambda: steps_taken(tmp_path / "run") > 20, launcher)
        far = ["--first", str(50 * STANDS_AT)]
        capture = subprocess.Popen([*DOCTOR, "capture", str(tmp_path / "run"), *far], **PIPES)
        assert "window 1: steps 20000" in capture.stdout.readline()
        if end == "is killed":
            time.sleep(2)  # it waits
            kill([launcher.pid, *descendants(launcher.pid)])
        out, err = capture.communicate(timeout=60)
        assert (capture.returncode, out) == (2, ""), err
        if end == "hangs":
            assert f"the window is canceled, because the job hangs in step {STANDS_AT}: no rank has" in err
            again = command("capture", tmp_path / "run")
            assert (again.returncode, again.stdout) == (2, "")
            assert "no window, because the job hangs" in again.stderr and "ddpdoctor stacks" in again.stderr
            assert "asleep_in_a_lock" in command("stacks", tmp_path / "run").stdout
        else:
            assert "the job was killed before it was saved" in err


def test_a_window_has_the_same_number_on_each_host(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(ROOT / "fixtures" / "healthy", run)
    ranks = sorted((run / "ranks").iterdir())

    def live(*captures):
        for number, (folder, done) in enumerate(zip(ranks, captures, strict=True)):
            rank = json.loads((folder / "rank.json").read_text())
            (folder / "rank.json").write_text(json.dumps({**rank, "host": "ab"[number], "captures": done}))
        seen = LiveRun(run)
        seen.update()
        assert {each.host for each in seen.ranks.values()} == {"a", "b"}
        return seen

    first = {"number": 1, "steps": [500, 508], "state": "waiting"}
    seen = live([first], [])
    assert _window_number(run, seen, {"b"}, 500) == 1
    assert _window_number(run, seen, {"b"}, 600) == 2, "another window"
    assert _window_number(run, seen, {"a"}, 500) == 2, "this host's own trace would be written over"
    second = {"number": 2, "steps": [700, 708], "state": "waiting"}
    assert _window_number(run, live([first, second], [first]), {"b"}, 700) == 2
