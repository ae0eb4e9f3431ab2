"""``ddpdoctor history`` over folders of runs and reports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from click.testing import CliRunner

from ddpdoctor.cli.history import command
from ddpdoctor.cli.main import cli

FIXTURES = Path(__file__).parents[2] / "fixtures"


def ran(*arguments):
    return CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)


def test_runs_and_reports_at_any_depth_are_found(tmp_path):
    shutil.copytree(FIXTURES / "barrier", tmp_path / "nightly" / "1")
    (tmp_path / "nightly" / "reports").mkdir()
    report = tmp_path / "nightly" / "reports" / "d.json"
    done = CliRunner().invoke(cli, ["analyze", str(FIXTURES / "barrier"), "--json", str(report), "-q"])
    assert done.exit_code == 0
    (tmp_path / "nightly" / "reports" / "other.json").write_text("{}")
    (tmp_path / "nightly" / "reports" / "cut.html").write_text(
        '<html><meta name="generator" content="ddpdoctor 1">'
    )
    for page, text in (("figures", '<meta name="generator" content="ddpdoctor">'), ("notes", "<p>mine</p>")):
        (tmp_path / "nightly" / "reports" / f"{page}.html").write_text(text)
    done = ran(tmp_path / "nightly", "--json", "-")
    told = json.loads(done.stdout)
    assert done.exit_code == 0
    assert [run["source"] for job in told["jobs"] for run in job["runs"]] == [
        str(tmp_path / "nightly" / "1"),
    ], "its report is the same run"
    assert len(told["notes"]) == 1 and "cut.html" in told["notes"][0]
    moved = json.loads(report.read_bytes())
    moved["job"]["started_ns"] += 10**9
    report.write_text(json.dumps(moved))
    told = json.loads(ran(tmp_path / "nightly", "--json", "-").stdout)
    assert [run["source"] for job in told["jobs"] for run in job["runs"]] == [
        str(tmp_path / "nightly" / "1"),
        str(report),
    ]
    assert ran(tmp_path / "nightly", "--fail-on-regression", 5).exit_code == 0


def test_no_report_that_is_read_is_written_over_but_the_page_of_an_earlier_call_is(tmp_path):
    nightly = tmp_path / "nightly"
    shutil.copytree(FIXTURES / "barrier", nightly / "1")
    report = nightly / "1" / "diagnosis.json"
    other = tmp_path / "nightly" / "other.html"
    arguments = [str(FIXTURES / "barrier"), "--json", str(report), "--html", str(other), "-q"]
    assert CliRunner().invoke(cli, ["analyze", *arguments]).exit_code == 0
    for option, file in (("--json", report), ("--html", other), ("--html", report)):
        before = file.read_bytes()
        done = CliRunner().invoke(command, [str(nightly), option, str(file)])
        assert f"{option} {file} would overwrite an input" in str(done.exception)
        assert file.read_bytes() == before
    page = nightly / "history.html"
    for _ in range(2):
        done = ran(nightly, "--html", page)
        assert done.exit_code == 0 and "left out" not in done.output
    assert "Run after run" in page.read_text(encoding="utf-8")


def test_nothing_to_read_is_one_sentence(tmp_path):
    done = CliRunner().invoke(command, [str(tmp_path)])
    assert "no run and no report could be read" in str(done.exception)
    done = CliRunner().invoke(command, [str(tmp_path / "nowhere")])
    assert "no such file or directory" in str(done.exception)


def test_a_gate_does_not_pass_where_the_newest_run_has_no_step_time(tmp_path):
    report = tmp_path / "1.json"
    assert (
        CliRunner().invoke(cli, ["analyze", str(FIXTURES / "barrier"), "--json", str(report)]).exit_code == 0
    )
    told = json.loads(report.read_bytes())
    for number in (2, 3):
        told["job"]["started_ns"] += 10**12
        if number == 3:
            told["steps"]["median_ms"], told["series"] = (
                None,
                {"ranks": [], "steps": [], "step_ms": [], "late_ms": []},
            )
        (tmp_path / f"{number}.json").write_text(json.dumps(told))
    done = CliRunner().invoke(cli, ["history", str(tmp_path), "--fail-on-regression", "5"])
    assert "the newest run has no step time" in str(done.exception)


def test_a_gate_does_not_pass_where_the_newest_run_hung(tmp_path):
    report = tmp_path / "1.json"
    done = CliRunner().invoke(cli, ["analyze", str(FIXTURES / "barrier"), "--json", str(report)])
    assert done.exit_code == 0
    told = json.loads(report.read_bytes())
    told["job"]["started_ns"] += 10**12
    told["facts"]["hang"]["state"] = "hangs"
    (tmp_path / "2.json").write_text(json.dumps(told))
    done = CliRunner().invoke(cli, ["history", str(tmp_path), "--fail-on-regression", "5"])
    assert "the newest run hung: a regression cannot be detected" in str(done.exception)


def test_the_configuration_is_read_once_for_all_recordings(tmp_path, monkeypatch):
    for name in ("barrier", "healthy"):
        shutil.copytree(FIXTURES / name, tmp_path / "runs" / name)
    (tmp_path / "ddpdoctor.toml").write_text("")
    (tmp_path / "ddpdoctor.toml").chmod(0o666)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["history", "runs"])
    assert done.exit_code == 0 and done.output.count("ddpdoctor.toml is not used") == 1
