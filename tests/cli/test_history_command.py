"""``ddpdoctor history`` over folders of runs and reports."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddpdoctor.cli.history import command
from ddpdoctor.cli.main import cli
from tests.privileges import as_anybody
from tests.stall.recorded import Stopped

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
    done = CliRunner().invoke(command, [str(tmp_path / "nightly"), "--fail-on-regression", "5"])
    assert "a run that may be newer and of this job cannot be compared" in str(done.exception)
    (tmp_path / "nightly" / "reports" / "cut.html").unlink()
    assert ran(tmp_path / "nightly", "--fail-on-regression", 5).exit_code == 0


def test_inputs_are_not_overwritten_but_an_earlier_history_is(tmp_path):
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
        assert done.exit_code == 0 and "skipped" not in done.output
    assert "History of runs" in page.read_text(encoding="utf-8")


def test_nothing_to_read_is_one_sentence(tmp_path):
    done = CliRunner().invoke(command, [str(tmp_path)])
    assert "no run and no report could be read" in str(done.exception)
    assert "`ddpdoctor analyze TRACES --json diagnosis.json`" in str(done.exception)
    done = CliRunner().invoke(command, [str(tmp_path / "nowhere")])
    assert "no such file or directory" in str(done.exception)


def test_a_newest_run_without_a_step_time_does_not_pass(tmp_path):
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
    assert f"the newest run, {tmp_path / '3.json'}, has no step time" in str(done.exception)


def test_a_newest_run_that_hung_does_not_pass(tmp_path):
    report = tmp_path / "1.json"
    done = CliRunner().invoke(cli, ["analyze", str(FIXTURES / "barrier"), "--json", str(report)])
    assert done.exit_code == 0
    told = json.loads(report.read_bytes())
    told["job"]["started_ns"] += 10**12
    told["facts"]["hang"]["state"] = "hangs"
    (tmp_path / "2.json").write_text(json.dumps(told))
    done = CliRunner().invoke(cli, ["history", str(tmp_path), "--fail-on-regression", "5"])
    assert f"a regression cannot be detected: the newest run, {tmp_path / '2.json'}, hung" in str(
        done.exception
    )


def recorded(folder, fixture="healthy", day=0):
    """A copy of a recorded run, of ten days ago or ``day`` days later."""
    shutil.copytree(FIXTURES / fixture, folder)
    started_ns = json.loads((folder / "manifest.json").read_bytes())["started_ns"]
    later_ns = time.time_ns() - started_ns + (day - 10) * 86_400 * 10**9
    for file in (folder / "manifest.json", *folder.glob("hosts/*/launch-*.json")):
        document = json.loads(file.read_bytes())
        for name in ("started_ns", "ended_ns"):
            document[name] += later_ns
        file.write_text(json.dumps(document))
    return folder


def without_steps(run):
    for file in run.glob("ranks/*/steps.jsonl"):
        file.write_text("")
    for file in run.glob("ranks/*/trace.json.gz"):
        file.unlink()


def without_manifest(run):
    (run / "manifest.json").unlink()


def without_ranks_documents(run):
    for file in run.glob("ranks/*/rank.json"):
        file.write_text('{"rank": 0, "wor')
    for file in run.glob("ranks/*/trace.json.gz"):
        file.unlink()  # it would tell the device


def cut_off(run):
    for file in (run / "manifest.json", *run.glob("hosts/*/launch-*.json")):
        file.write_text(json.dumps({**json.loads(file.read_bytes()), "ended_ns": None, "exit_code": None}))


def with_a_diagnosis_that_is_cut(run):
    without_steps(run)
    (run / "diagnosis.json").write_text('{"schema":"ddpdoctor.diagnosis/1"')


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (without_steps, "2: no rank recorded a step"),
        (with_a_diagnosis_that_is_cut, "2: no rank recorded a step"),
        (without_ranks_documents, "2 does not identify its job"),
        (cut_off, "2, has no recorded end"),
        (without_manifest, None),
        (lambda run: None, None),
    ],
)
def test_a_damaged_newest_run_does_not_pass(tmp_path, damage, says):
    recorded(tmp_path / "1")
    newest = recorded(tmp_path / "2", day=1)
    damage(newest)
    done = CliRunner().invoke(cli, ["history", str(tmp_path), "--fail-on-regression", "50"])
    if says is None:
        assert done.exit_code == 0
    else:
        assert "a regression cannot be detected: " in str(done.exception) and says in str(done.exception)
        recorded(tmp_path / "3", day=2)
        assert (
            CliRunner().invoke(cli, ["history", str(tmp_path), "--fail-on-regression", "50"]).exit_code == 0
        )


def test_a_run_without_a_manifest_is_identified_by_its_launch_record(tmp_path):
    recorded(tmp_path / "1")
    without_manifest(recorded(tmp_path / "2", "barrier", day=1))
    done = ran(tmp_path, "--json", "-", "--fail-on-regression", 5)
    (job,) = json.loads(done.stdout)["jobs"]
    assert done.exit_code == 1 and [Path(run["source"]).name for run in job["runs"]] == ["1", "2"]


def test_an_unreadable_folder_does_not_pass(tmp_path):
    recorded(tmp_path / "1")
    bad = recorded(tmp_path / "2", day=1)
    shutil.rmtree(bad / "ranks")
    (bad / "ranks").write_text("")
    done = CliRunner().invoke(cli, ["history", str(tmp_path), "--fail-on-regression", "50"])
    assert f"cannot be compared: {bad}: " in str(done.exception)
    shutil.rmtree(bad)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    with as_anybody():
        done = CliRunner().invoke(cli, ["history", str(tmp_path), "--fail-on-regression", "50"])
    assert f"cannot be compared: The folder {closed} cannot be read" in str(done.exception)


def test_a_run_dated_in_the_future_does_not_pass(tmp_path):
    for day, name in enumerate("123"):
        recorded(tmp_path / name, day=day)
    recorded(tmp_path / "wrong", "barrier", day=100)
    told = " ".join(ran(tmp_path).output.split())
    assert f"Note: {tmp_path / 'wrong'} is dated" in told.replace("- ", "-")
    done = CliRunner().invoke(cli, ["history", str(tmp_path), "--fail-on-regression", "50"])
    assert f"{tmp_path / 'wrong'} is dated" in str(done.exception)
    shutil.rmtree(tmp_path / "2")
    recorded(tmp_path / "4", "barrier", day=5)
    assert ran(tmp_path, "--fail-on-regression", 5).exit_code == 1, "it does not hide a regression"


def test_a_run_that_is_still_running_gets_no_verdict(tmp_path):
    recorded(tmp_path / "1")
    newest = Stopped(tmp_path / "2", ended=False).launched_here(os.getpid()).path
    done = CliRunner().invoke(cli, ["history", str(tmp_path), "--fail-on-regression", "50"])
    assert f"a regression cannot be detected: the newest run, {newest}, is still running" in str(
        done.exception
    )


def test_a_diagnosis_of_a_running_job_is_repeated(tmp_path):
    run = recorded(tmp_path / "1")
    assert (
        CliRunner().invoke(cli, ["analyze", str(run), "--json", str(run / "diagnosis.json")]).exit_code == 0
    )
    made = json.loads((run / "diagnosis.json").read_bytes())
    made["job"]["end"], made["verdict"]["headline"] = "running", "made while it ran"
    (run / "diagnosis.json").write_text(json.dumps(made))
    (job,) = json.loads(ran(tmp_path, "--json", "-").stdout)["jobs"]
    assert job["runs"][0]["stopped"] is None and job["runs"][0]["headline"] != "made while it ran"


def test_the_configuration_is_read_once_for_all_recordings(tmp_path, monkeypatch):
    for name in ("barrier", "healthy"):
        shutil.copytree(FIXTURES / name, tmp_path / "runs" / name)
    (tmp_path / "ddpdoctor.toml").write_text("")
    (tmp_path / "ddpdoctor.toml").chmod(0o666)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["history", "runs"])
    assert done.exit_code == 0 and done.output.count("ddpdoctor.toml is not used") == 1


def healthy_report(file, day=0):
    file.parent.mkdir(parents=True, exist_ok=True)
    run = recorded(file.parent / f".{file.name}", day=day)
    option = "--html" if file.suffix == ".html" else "--json"
    assert CliRunner().invoke(cli, ["analyze", str(run), option, str(file), "-q"]).exit_code == 0
    return file


@pytest.mark.parametrize("name", ["report.html", "diagnosis.json"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        bytes(2000),
        b"\x8f\x13 no text \xff" * 50,
        b'<!doctype html><html lang="en"',
        b'{"name": 1}',
        b"[1]",
    ],
    ids=["empty", "zeros", "garbage", "cut", "foreign", "list"],
)
def test_a_report_without_a_diagnosis_does_not_pass(tmp_path, name, content):
    for day in (0, 1):
        healthy_report(tmp_path / str(day) / "diagnosis.json", day)
    gate = ["history", str(tmp_path), "--fail-on-regression", "50"]
    for other in ("settings.json", "page.html", "manifest.json"):
        (tmp_path / other).write_bytes(b'{"name": 1}')
    done = CliRunner().invoke(cli, gate)
    (tmp_path / "report.html").write_text("<!doctype html><title>pytest-html</title>" + "<p>passed" * 600)
    done = CliRunner().invoke(cli, gate)
    assert done.exit_code == 0 and "skipped" not in done.output, "what others wrote is nobody's run"
    newest = tmp_path / "2" / name
    newest.parent.mkdir()
    newest.write_bytes(content)
    done = CliRunner().invoke(cli, gate)
    assert f"cannot be compared: {newest}: " in str(done.exception)
    assert "Note: skipped: " in " ".join(done.output.split())


def test_a_given_file_that_is_not_a_report_does_not_pass(tmp_path):
    good = [str(healthy_report(tmp_path / f"{day}.json", day)) for day in (0, 1)]
    bad = tmp_path / "2.html"
    bad.write_text("")
    done = CliRunner().invoke(cli, ["history", *good, str(bad), "--fail-on-regression", "50"])
    assert f"cannot be compared: {bad}: the file is empty" in str(done.exception)
    (tmp_path / "log.txt").write_text("")
    done = CliRunner().invoke(
        cli, ["history", *good, str(tmp_path / "log.txt"), "--fail-on-regression", "50"]
    )
    assert done.exit_code == 0


def without_steps_but_traces(run):
    for file in run.glob("ranks/*/steps.jsonl"):
        file.unlink()


def without_launch(run):
    for file in run.glob("hosts/*/launch-*.json"):
        file.unlink()


def without_documents(run):
    for file in (*run.glob("ranks/*/rank.json"), *run.glob("ranks/*/steps.jsonl")):
        file.unlink()
    without_manifest(run)


def with_nothing_but_an_empty_manifest(run):
    for folder in ("ranks", "hosts"):
        shutil.rmtree(run / folder)
    (run / "manifest.json").write_text("")


def without_ranks(run):
    without_manifest(run)
    shutil.rmtree(run / "ranks")


@pytest.mark.parametrize(
    "damage",
    [
        without_documents,
        lambda run: [without_documents(run), without_launch(run)],
        with_nothing_but_an_empty_manifest,
        without_ranks,
    ],
)
def test_the_rest_of_a_run_does_not_pass(tmp_path, damage):
    for day, name in enumerate("12"):
        recorded(tmp_path / name, day=day)
    newest = recorded(tmp_path / "3", day=2)
    damage(newest)
    done = CliRunner().invoke(cli, ["history", str(tmp_path), "--fail-on-regression", "50"])
    assert f"cannot be compared: {newest} is a run, but" in str(done.exception)
    done = CliRunner().invoke(
        cli, ["history", *sorted(map(str, tmp_path.iterdir())), "--fail-on-regression", "50"]
    )
    assert f"cannot be compared: {newest} is a run, but" in str(done.exception)
    healthy_report(newest / "diagnosis.json", day=3)
    assert ran(tmp_path, "--fail-on-regression", 50).exit_code == 0


@pytest.mark.parametrize(
    "damage", [without_steps_but_traces, lambda run: [without_manifest(run), without_launch(run)]]
)
def test_a_newest_run_of_an_unknown_job_does_not_pass(tmp_path, damage):
    recorded(tmp_path / "1")
    newest = recorded(tmp_path / "2", day=1)
    damage(newest)
    done = CliRunner().invoke(cli, ["history", str(tmp_path), "--fail-on-regression", "50"])
    assert "2 does not identify its job" in str(done.exception)
