"""A job that somebody ended: the first sentence says so, before any price."""

from __future__ import annotations

import json
import os

import pytest

from ddpdoctor.analysis import Options, analyze
from tests.stall.recorded import HEALTHY, NOW_NS, Stopped


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
