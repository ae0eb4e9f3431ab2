"""``ddpdoctor compare`` from paths to exit codes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from ddpdoctor.report.html import write_html
from ddpdoctor.report.json_output import write_json
from tests.commands import command
from tests.report import samples

ROOT = Path(__file__).resolve().parents[2]
TRACES = ROOT.parent / "shared" / "traces"


def run(*arguments):
    done = command("compare", *arguments, environment={**os.environ, "COLUMNS": "100"})
    return done.returncode, done.stdout, done.stderr


def scaled(diagnosis, factor):
    series = diagnosis.series
    step_ms = [[None if ms is None else ms * factor for ms in times] for times in series.step_ms]
    return msgspec.structs.replace(diagnosis, series=msgspec.structs.replace(series, step_ms=step_ms))


@pytest.fixture
def files(tmp_path):
    write_json(samples.unhealthy(), tmp_path / "before.json")
    write_html(scaled(samples.unhealthy(), 1.3), tmp_path / "after.html")
    return tmp_path / "before.json", tmp_path / "after.html"


def test_diagnoses_and_reports_are_compared_and_written(files, tmp_path):
    code, out, err = run(*files, "--json", tmp_path / "c.json", "--html", tmp_path / "c.html")
    assert (code, err) == (0, "")
    assert out.startswith("Slower by 30 %") and "dataloader/one-rank-late" in out
    data = json.loads((tmp_path / "c.json").read_bytes())
    assert data["judgement"] == "slower" and data["ratio"]["estimate"] == pytest.approx(1.3)
    assert data["ratio"]["low"] < 1.3 < data["ratio"]["high"]
    assert "Slower by" in (tmp_path / "c.html").read_text()


def test_a_regression_beyond_the_limit_exits_with_1(files):
    before, after = files
    code, _, err = run(before, after, "--fail-on-regression", "5")
    assert code == 1 and "30.0 % longer, more than 5 %" in err
    assert run(before, after, "--fail-on-regression", "40")[0] == 0
    assert run(after, before, "--fail-on-regression", "0")[0] == 0


def test_a_limit_without_a_verdict_exits_with_2(files, tmp_path):
    before, _ = files
    other = samples.unhealthy()
    other = msgspec.structs.replace(other, job=msgspec.structs.replace(other.job, world_size=8))
    write_json(other, tmp_path / "other.json")
    assert run(before, tmp_path / "other.json")[0] == 0
    code, out, err = run(before, tmp_path / "other.json", "--fail-on-regression", "5")
    assert code == 2 and "world size: 2 ranks" not in out
    assert "no result for --fail-on-regression: Not comparable (world size: 2 before, 8 after)" in err


def test_a_failed_job_does_not_pass(files, tmp_path):
    before, _ = files
    stopped = msgspec.structs.replace(samples.unhealthy(), facts={"hang": {"state": "failed"}})
    write_json(stopped, tmp_path / "stopped.json")
    code, out, err = run(before, tmp_path / "stopped.json", "--fail-on-regression", "5")
    assert code == 2 and "no result for --fail-on-regression: the job after failed" in err
    assert "Note: The job after failed: only its steps until then are compared." in out
    assert run(tmp_path / "stopped.json", before, "--fail-on-regression", "5")[0] == 0
    write_json(scaled(stopped, 1.3), tmp_path / "slower.json")
    assert run(before, tmp_path / "slower.json", "--fail-on-regression", "5")[0] == 1


def ending(diagnosis, end):
    return msgspec.structs.replace(diagnosis, job=msgspec.structs.replace(diagnosis.job, end=end))


@pytest.mark.parametrize(("end", "told"), samples.NOT_ENDED.items())
def test_a_job_that_has_not_ended_does_not_pass(files, tmp_path, end, told):
    before, _ = files
    write_json(ending(samples.unhealthy(), end), tmp_path / "after.json")
    code, out, err = run(before, tmp_path / "after.json", "--fail-on-regression", "5")
    assert code == 2 and f"no result for --fail-on-regression: the job after {told}" in err
    assert f"Note: The job after {told}: only its steps until then are compared." in out
    assert run(tmp_path / "after.json", before, "--fail-on-regression", "5")[0] == 0
    write_json(ending(scaled(samples.unhealthy(), 1.3), end), tmp_path / "slower.json")
    code = run(before, tmp_path / "slower.json", "--fail-on-regression", "5")[0]
    assert code == (2 if end == "running" else 1), "a job that runs is not judged yet"


@pytest.mark.parametrize("content", [None, "", "{}"])
def test_unreadable_input_exits_with_2_and_one_line(files, tmp_path, content):
    bad = tmp_path / "bad.json"
    if content is not None:
        bad.write_text(content)
    code, _, err = run(files[0], bad)
    assert code == 2 and "bad.json" in err and "Traceback" not in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.skipif(not TRACES.exists(), reason="the public traces are not here")
def test_folders_of_traces_are_diagnosed_first(tmp_path):
    workers_0, workers_4 = (TRACES / "kineto" / f"resnet50_workers_{n}" for n in (0, 4))
    code, _out, err = run(workers_0, workers_4, "--json", tmp_path / "c.json")
    assert (code, err) == (0, "")
    data = json.loads((tmp_path / "c.json").read_bytes())
    assert data["judgement"] == "too few steps"
    assert data["after"]["median_ms"] < data["before"]["median_ms"]
