"""A job that somebody ended: the first sentence says so, before any price."""

from __future__ import annotations

import json

import pytest

from ddpdoctor.analysis import Options, analyze
from tests.stall.recorded import Stopped


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
