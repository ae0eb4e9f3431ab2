"""``ddpdoctor capture`` and ``ddpdoctor stacks`` on real ranks that train meanwhile."""

import json
import os
import re
import shutil

import pytest

from ddpdoctor.cli.capturing import _number
from ddpdoctor.telemetry import LiveRun
from tests.cli.live import live_run, steps_of
from tests.commands import ROOT, command
from tests.stall.recorded import Stopped


@pytest.fixture
def captured(once):
    return live_run(once)


@pytest.mark.torchrun
def test_all_ranks_open_the_window_in_the_same_steps(captured):
    run, (code, out, err) = captured.run, captured.said["capture"]
    assert (code, err) == (0, ""), (out, err)
    first, last = map(int, re.search(r"window 1: steps (\d+) to (\d+), on 2 ranks", out).groups())
    assert last == first + 4 and "2 traces saved; `ddpdoctor analyze" in out
    for rank in range(2):
        assert (run / "ranks" / f"{rank:05d}" / "trace.1.json.gz").stat().st_size > 1000
        assert (run / "ranks" / f"{rank:05d}" / "trace.json.gz").stat().st_size > 1000
        profiled = [line["step"] for line in steps_of(run, rank) if "profiled" in line.get("marks", [])]
        assert profiled[-5:] == list(range(first, last + 1)) and profiled[-6] < first - 10


@pytest.mark.torchrun
def test_the_window_is_analysed_and_the_first_one_as_before(captured):
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
def test_stacks_say_where_each_rank_is(captured):
    (code, out, err), (_, verbose, _) = captured.said["stacks"], captured.said["stacks -v"]
    assert (code, err) == (0, "")
    assert re.findall(r"^rank (\d) \(process \d+\) in step [\d,]+ for [\d.]+ s: \w+$", out, re.MULTILINE) == [
        "0",
        "1",
    ]
    assert "job.py:" in out and "site-packages" not in out
    assert "(trains):" in verbose and len(verbose.splitlines()) > len(out.splitlines())


def test_who_does_not_run_is_not_asked(tmp_path):
    for verb in ("stacks", "capture"):
        done = command(verb, ROOT / "fixtures" / "healthy")
        assert (done.returncode, done.stdout) == (2, "") and "has ended: `ddpdoctor analyze" in done.stderr
        done = command(verb, tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.search("no run directory|not a ddpdoctor run directory", done.stderr)


def test_a_job_that_was_killed_is_not_to_be_asked_again(tmp_path):
    run = Stopped(tmp_path / "run", ended=False).launched_here()
    for verb in ("stacks", "capture"):
        done = command(verb, run.path)
        assert (done.returncode, done.stdout) == (2, "")
        assert "is no longer running: its launcher was killed" in done.stderr
        assert "`ddpdoctor analyze" in done.stderr and "try again" not in done.stderr
    run.launched_here(os.getpid())
    for verb in ("stacks", "capture"):
        assert "ranks have not joined yet: try again" in command(verb, run.path).stderr


def test_the_same_window_ordered_on_each_host_has_one_number(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(ROOT / "fixtures" / "healthy", run)
    ranks = sorted((run / "ranks").iterdir())

    def live(*captures):
        for number, (folder, done) in enumerate(zip(ranks, captures, strict=True)):
            rank = json.loads((folder / "rank.json").read_text())
            (folder / "rank.json").write_text(json.dumps({**rank, "host": "ab"[number], "captures": done}))
        seen = LiveRun(run)
        seen.look()
        assert {each.host for each in seen.ranks.values()} == {"a", "b"}
        return seen

    first = {"number": 1, "steps": [500, 508], "state": "waiting"}
    seen = live([first], [])
    assert _number(run, seen, {"b"}, 500) == 1
    assert _number(run, seen, {"b"}, 600) == 2, "another window"
    assert _number(run, seen, {"a"}, 500) == 2, "this host's own trace would be written over"
    second = {"number": 2, "steps": [700, 708], "state": "waiting"}
    assert _number(run, live([first, second], [first]), {"b"}, 700) == 2
