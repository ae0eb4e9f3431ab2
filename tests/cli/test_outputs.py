"""Where commands write: never over a recording or an input, never in a device's place."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddpdoctor.cli import analyze, compare, export, recorded
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.report import read_diagnosis
from ddpdoctor.report.replace import write_whole

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "fixtures"


@pytest.fixture
def run(tmp_path):
    return Path(shutil.copytree(FIXTURES / "barrier", tmp_path / "r"))


@pytest.fixture
def traces(run, tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    for rank in (0, 1):
        shutil.copy(run / f"ranks/0000{rank}/trace.json.gz", folder / f"rank{rank}.json.gz")
    return folder


def content(folder):
    return {file: file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (export.command, ["r", "--timeline", "r/ranks/00000/trace.json.gz"]),
        (export.command, ["r", "--parquet", "r/ranks/00000"]),
        (analyze.command, ["r", "--json", "r/manifest.json"]),
        (analyze.command, ["r", "--html", "r/ranks/00000/steps.jsonl"]),
        (analyze.command, ["r", "--html", "link"]),
        (analyze.command, ["r", "--html", "r/hosts/new.html"]),
        (analyze.command, ["r", "--json", "same", "--html", "same"]),
        (analyze.command, ["r", "--json", "same", "--html", "./same"]),
        (analyze.command, ["r", "--json", "-", "--markdown", "/dev/stdout"]),
        (analyze.command, ["saved", "--json", "saved/rank0.json.gz"]),
        (analyze.command, ["saved/*.json.gz", "--json", "saved/rank1.json.gz"]),
        (analyze.command, ["saved/rank0.json.gz", "--json", "saved/rank0.json.gz"]),
        (compare.command, ["r", "before.json", "--json", "before.json"]),
    ],
)
def test_recordings_and_inputs_are_not_written_over(run, traces, tmp_path, monkeypatch, command, arguments):
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to(run / "manifest.json")
    Path("before.json").write_text("{}")
    before = content(tmp_path)
    with pytest.raises(DdpDoctorError, match=r"name (another file|two files)\.$"):
        CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert content(tmp_path) == before


def test_a_run_directory_takes_its_own_reports_and_a_folder_of_traces_new_files(
    run, traces, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ["r", "--json", "r/diagnosis.json", "--html", "r/report.html"],
        ["saved", "--json", "saved/diagnosis.json", "--html", "/dev/null", "--markdown", "/dev/null"],
    ):
        for _ in range(2):
            done = CliRunner().invoke(analyze.command, arguments, catch_exceptions=False)
            assert done.exit_code == 0, done.output
    for _ in range(2):
        arguments = ["saved", "--timeline", "saved/all.json"]
        assert CliRunner().invoke(export.command, arguments, catch_exceptions=False).exit_code == 0


def test_links_are_followed_and_stay(tmp_path):
    (tmp_path / "there").mkdir()
    for name, target in (("old", "there/old.txt"), ("dangling", "there/new.txt")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "there/old.txt").write_text("old")
    write_whole(tmp_path / "old", "new")
    write_whole(tmp_path / "dangling", "new")
    assert (tmp_path / "old").is_symlink() and (tmp_path / "dangling").is_symlink()
    assert [file.read_text() for file in (tmp_path / "there").iterdir()] == ["new", "new"]
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(DdpDoctorError, match="cannot write"):
        write_whole(tmp_path / "loop", "new")


def test_a_fifo_is_written_into(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    got = []
    reader = threading.Thread(target=lambda: got.append(fifo.read_text()))
    reader.start()
    write_whole(fifo, "through")
    reader.join(timeout=20)
    assert got == ["through"] and fifo.is_fifo()


def shell(line, **environment):
    return subprocess.run(
        ["/bin/sh", "-c", line],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, **environment},
    )


def test_a_dash_is_standard_output_and_nothing_else_stands_there(run, tmp_path):
    done = shell(f'"$PYTHON" -m ddpdoctor analyze {run} --json - --html {tmp_path}/r.html')
    assert done.returncode == 0
    assert json.loads(done.stdout)["schema"] == "ddpdoctor.diagnosis/1"
    assert "median" in done.stderr and f"written: {tmp_path}/r.html" in done.stderr
    assert not (ROOT / "-").exists()
    done = shell(f'"$PYTHON" -m ddpdoctor analyze {run} -q --markdown /dev/stdout > {tmp_path}/m.md')
    assert (done.returncode, done.stdout) == (0, "") and (tmp_path / "m.md").read_text().startswith("## ")


def test_a_link_or_a_fifo_in_a_run_directory_is_replaced(run, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (run / "report.html").symlink_to(victim)
    os.mkfifo(run / "diagnosis.json")
    write_whole(run / "report.html", "new")
    write_whole(run / "diagnosis.json", "new")
    assert victim.read_text() == "mine"
    for name in ("report.html", "diagnosis.json"):
        assert (run / name).read_text() == "new" and not (run / name).is_symlink()


def test_a_linked_folder_in_a_run_directory_is_not_written_into(run, tmp_path):
    (tmp_path / "there").mkdir()
    (run / "out").symlink_to(tmp_path / "there")
    with pytest.raises(DdpDoctorError, match="out is a link inside a run directory"):
        write_whole(run / "out" / "report.html", "new")
    assert not list((tmp_path / "there").iterdir())


def test_a_run_directory_may_be_named_by_a_link(run, tmp_path):
    (tmp_path / "latest").symlink_to(run)
    write_whole(tmp_path / "latest" / "report.html", "new")
    assert (run / "report.html").read_text() == "new"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a link of another user")
def test_a_link_of_another_user_is_not_followed(tmp_path):
    victim, link = tmp_path / "victim", tmp_path / "report.html"
    victim.write_text("mine")
    link.symlink_to(victim)
    os.lchown(link, 12345, 12345)
    with pytest.raises(DdpDoctorError, match="of another user"):
        write_whole(link, "new")
    assert victim.read_text() == "mine"


def test_a_static_report_carries_no_library(run, tmp_path):
    still, whole = tmp_path / "still.html", tmp_path / "whole.html"
    for options in (["--html", str(whole)], ["--html", str(still), "--static"]):
        done = CliRunner().invoke(analyze.command, [str(run), "-q", *options])
        assert done.exit_code == 0, done.output
    assert "ddpdoctor-plotly" in whole.read_text() and "ddpdoctor-plotly" not in still.read_text()
    # What `run` writes at its end follows its own option.
    for static in (False, True):
        assert recorded._written(read_diagnosis(whole), tmp_path, recorded.Presentation(static=static)) == []
        assert ("ddpdoctor-plotly" in (tmp_path / "report.html").read_text()) != static
