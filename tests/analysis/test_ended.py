"""A job that somebody ended: the first sentence says so, before any price."""

from __future__ import annotations

import json
import os

import pytest

from ddpdoctor.analysis import Options, analyze
from tests.commands import command
from tests.stall.recorded import HEALTHY, LOCKED, NOW_NS, REDUCING, WAITING, Stopped


@pytest.mark.parametrize(
    ("manifest", "name"),
    [
        ({"exit_code": 143}, "SIGTERM"),
        ({"exit_code": 130}, "SIGINT"),
        ({"exit_code": -15}, "SIGTERM"),
        ({"exit_code": 0, "signal": 15}, "SIGTERM"),
        ({"exit_code": 0, "signal": None}, None),
    ],
)
def test_who_was_ended_from_outside_says_so_first(tmp_path, manifest, name):
    run = Stopped(tmp_path / "run", exit_code=0)
    file = run.path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | manifest))
    headline = analyze(str(run.path), Options(cache=False, jobs=1)).verdict.headline
    told = headline.startswith(f"The job was ended by {name}") and ". In the steps before that: " in headline
    assert told if name else headline.startswith("Healthy: ")


def test_a_failure_has_its_own_sentence(tmp_path):
    run = Stopped(tmp_path / "run", exit_code=1)
    assert analyze(str(run.path), Options(cache=False, jobs=1)).verdict.rule == "hang/unexplained"


def test_what_is_known_of_the_end_is_told_apart(tmp_path):
    def end_of(run):
        return analyze(str(run), Options(cache=False, jobs=1)).job.end

    assert end_of(Stopped(tmp_path / "ended", exit_code=0).path) == "ended"
    assert end_of(Stopped(tmp_path / "elsewhere", ended=False).path) == "unknown"
    gone = Stopped(tmp_path / "gone", ended=False).launched_here()
    for record in gone.path.glob("hosts/*/launch-*.json"):
        record.unlink()
    for rank in range(2):
        gone.ran_here(rank, pid=2**22 + 2 + rank)
    assert end_of(gone.path) == "cut off"
    assert end_of(gone.asked(15, NOW_NS).path) == "ended", "somebody ended it, by a signal that was noted"
    assert end_of(gone.ran_here(0, os.getpid()).path) == "running"
    assert end_of(HEALTHY / "ranks" / "00000") is None, "a trace"
    unnamed = Stopped(tmp_path / "unnamed", exit_code=0).path
    (unnamed / "manifest.json").unlink()
    assert end_of(unnamed) == "ended", "its launcher's own record says so"


@pytest.mark.parametrize(
    ("manifest", "asked", "end"),
    [
        ({"exit_code": None, "signal": 9}, None, "killed"),
        ({"exit_code": 137}, None, "killed"),
        ({"exit_code": -9}, None, "killed"),
        ({"exit_code": None, "signal": 15}, None, "killed"),
        ({"exit_code": 143}, None, "killed"),
        ({"exit_code": None, "signal": 15}, 15, "ended"),
        ({"exit_code": None, "signal": 9}, 15, "ended"),
        ({"exit_code": 1}, 15, "ended"),
    ],
)
def test_a_job_that_was_killed_was_not_asked_to_end(tmp_path, manifest, asked, end):
    run = Stopped(tmp_path / "run", exit_code=0)
    file = run.path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | manifest))
    if asked is not None:
        run.asked(asked, NOW_NS)
    assert analyze(str(run.path), Options(cache=False, jobs=1)).job.end == end


STILL_RUNS = "The job still runs (100 steps so far): what is said here may change until it ends."


@pytest.mark.parametrize(
    ("run", "note"),
    [
        (lambda run: run.launched_here(os.getpid()), STILL_RUNS),
        (lambda run: run.launched_here().ran_here(1, os.getpid()), STILL_RUNS),
        (lambda run: run, "The job's end was not recorded (100 steps so far): it may still run."),
        (lambda run: run.launched_here(), None),
        (lambda run: run.launched_here().ran_here(0, 2**22 + 1).ran_here(1, 2**22 + 1), None),
    ],
    ids=["its launcher runs", "a rank runs", "not known", "its launcher was killed", "all of it was killed"],
)
def test_the_verdict_on_a_job_that_runs_is_provisional(tmp_path, run, note):
    found = analyze(str(run(Stopped(tmp_path / "run", ended=False)).path), Options(cache=False, jobs=1))
    provisional = [each for each in found.notes if "steps so far)" in each]
    assert provisional == ([] if note is None else [note])
    assert note is None or found.notes[0] == note


def test_all_outputs_say_that_it_is_provisional(tmp_path):
    run = Stopped(tmp_path / "run", ended=False).launched_here(os.getpid())
    outputs = ["--html", tmp_path / "report.html", "--json", tmp_path / "report.json"]
    done = command("analyze", run.path, *outputs)
    assert done.returncode == 0, done.stderr
    assert STILL_RUNS in " ".join(done.stdout.split())
    assert STILL_RUNS in " ".join((tmp_path / "report.html").read_text().split())
    assert STILL_RUNS in json.loads((tmp_path / "report.json").read_text())["notes"]


def test_of_a_job_that_hangs_the_verdict_itself_says_that_it_lasts(tmp_path):
    run = Stopped(tmp_path / "run", ended=False).launched_here(os.getpid())
    run.rank(0, "backward", REDUCING).rank(1, "other", LOCKED)
    run.seen(0, WAITING, waits=True).seen(1, WAITING, waits=False).stall("lasts")
    found = analyze(str(run.path), Options(cache=False, jobs=1))
    assert found.verdict.headline.startswith("The job hangs: ")
    assert not [note for note in found.notes if "so far" in note]
