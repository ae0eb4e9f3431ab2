"""Outputs of commands: recordings, inputs and devices are never overwritten."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import webbrowser
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ddpdoctor.cli import (
    analyze,
    bundle,
    compare,
    doctor,
    export,
    history,
    options,
    rules,
    run_and_present,
    trials,
)
from ddpdoctor.cli.main import cli
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.report.read import read_diagnosis
from ddpdoctor.written import MARKDOWN, REPORT, write_file

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
        (export.command, ["r", "--csv", "tables", "--timeline", "./tables/steps.csv"]),
        (analyze.command, ["saved", "--json", "saved/rank0.json.gz"]),
        (analyze.command, ["saved/*.json.gz", "--json", "saved/rank1.json.gz"]),
        (analyze.command, ["saved/rank0.json.gz", "--json", "saved/rank0.json.gz"]),
        (compare.command, ["r", "before.json", "--json", "before.json"]),
    ],
)
def test_recordings_and_inputs_are_not_overwritten(run, traces, tmp_path, monkeypatch, command, arguments):
    monkeypatch.chdir(tmp_path)
    Path("tables").mkdir()
    Path("link").symlink_to(run / "manifest.json")
    Path("before.json").write_text("{}")
    before = content(tmp_path)
    with pytest.raises(DdpDoctorError, match=r"name (another file|another folder|two files)\.$"):
        CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert content(tmp_path) == before


def test_a_pipe_in_a_folder_of_traces_is_not_an_input(traces, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("saved/pipe")
    options.check_outputs(["saved"], {"--html": (Path("saved/pipe"), REPORT)})


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
    (tmp_path / "there/old.txt").touch()
    for text in ("first", "new"):
        write_file(tmp_path / "old", text, MARKDOWN)
        write_file(tmp_path / "dangling", text, MARKDOWN)
    assert (tmp_path / "old").is_symlink() and (tmp_path / "dangling").is_symlink()
    assert [file.read_text().splitlines()[0] for file in (tmp_path / "there").iterdir()] == ["new", "new"]
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(DdpDoctorError, match="cannot write"):
        write_file(tmp_path / "loop", "new", MARKDOWN)


def test_a_fifo_is_written_into(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    got = []
    reader = threading.Thread(target=lambda: got.append(fifo.read_text()))
    reader.start()
    write_file(fifo, "through", MARKDOWN)
    reader.join(timeout=20)
    assert got[0].startswith("through\n") and fifo.is_fifo()


def shell(line, **environment):
    return subprocess.run(
        ["/bin/sh", "-c", line],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, **environment},
    )


def test_a_dash_is_standard_output_without_other_output(run, tmp_path):
    done = shell(f'"$PYTHON" -m ddpdoctor analyze {run} --json - --html {tmp_path}/r.html')
    assert done.returncode == 0
    assert json.loads(done.stdout)["schema"] == "ddpdoctor.diagnosis/1"
    assert "median" in done.stderr and f"written: {tmp_path}/r.html" in done.stderr
    assert not (ROOT / "-").exists()
    done = shell(f'"$PYTHON" -m ddpdoctor analyze {run} -q --markdown /dev/stdout > {tmp_path}/m.md')
    assert (done.returncode, done.stdout) == (0, "") and (tmp_path / "m.md").read_text().startswith("## ")


def test_a_link_or_a_fifo_in_a_run_directory_is_refused(run, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("")
    (run / "report.html").symlink_to(victim)
    os.mkfifo(run / "diagnosis.json")
    for name in ("report.html", "diagnosis.json"):
        with pytest.raises(DdpDoctorError, match="inside a run directory"):
            write_file(run / name, "new", MARKDOWN)
    assert victim.read_text() == "" and (run / "report.html").is_symlink()


def test_a_linked_folder_in_a_run_directory_is_refused(run, tmp_path):
    (tmp_path / "there").mkdir()
    (run / "out").symlink_to(tmp_path / "there")
    with pytest.raises(DdpDoctorError, match="out is a link inside a run directory"):
        write_file(run / "out" / "report.html", "new", MARKDOWN)
    assert not list((tmp_path / "there").iterdir())


def test_a_run_directory_can_be_given_as_a_link(run, tmp_path):
    (tmp_path / "latest").symlink_to(run)
    write_file(tmp_path / "latest" / "report.html", "new", MARKDOWN)
    assert (run / "report.html").read_text().startswith("new\n")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a link of another user")
def test_a_link_of_another_user_is_not_followed(tmp_path):
    victim, link = tmp_path / "victim", tmp_path / "report.html"
    victim.write_text("mine")
    link.symlink_to(victim)
    os.lchown(link, 12345, 12345)
    with pytest.raises(DdpDoctorError, match="of another user"):
        write_file(link, "new", MARKDOWN)
    assert victim.read_text() == "mine"


def test_a_static_report_has_no_library(run, tmp_path):
    still, whole = tmp_path / "still.html", tmp_path / "whole.html"
    for also in (["--html", str(whole)], ["--html", str(still), "--static"]):
        done = CliRunner().invoke(analyze.command, [str(run), "-q", *also])
        assert done.exit_code == 0, done.output
    assert "ddpdoctor-plotly" in whole.read_text() and "ddpdoctor-plotly" not in still.read_text()
    # What `run` writes at its end follows its own option.
    for static in (False, True):
        assert (
            run_and_present._write_outputs(
                read_diagnosis(whole), tmp_path, run_and_present.ReportOptions(static=static)
            )
            == []
        )
        assert ("ddpdoctor-plotly" in (tmp_path / "report.html").read_text()) != static


MINE = "the user's own\n"
COMMANDS = {
    "analyze --html": (analyze.command, ["r", "-q", "--html", "F"]),
    "analyze --json": (analyze.command, ["r", "-q", "--json", "F"]),
    "analyze --markdown": (analyze.command, ["r", "-q", "--markdown", "F"]),
    "analyze --sarif": (analyze.command, ["r", "-q", "--sarif", "F"]),
    "analyze --junit": (analyze.command, ["r", "-q", "--junit", "F"]),
    "compare --html": (compare.command, ["r", "r", "--html", "F"]),
    "compare --json": (compare.command, ["r", "r", "--json", "F"]),
    "history --html": (history.command, ["r", "--html", "F"]),
    "history --json": (history.command, ["r", "--json", "F"]),
    "export --timeline": (export.command, ["r", "--timeline", "F"]),
    "doctor --json": (doctor.command, ["--json", "F"]),
    "bundle --out": (bundle.command, ["--out", "F"]),
    "export --csv": (export.command, ["r", "--csv", "D"]),
    "export --parquet": (export.command, ["r", "--parquet", "D"]),
    "export --figures": (export.command, ["r", "--figures", "D"]),
    "export --speedscope": (export.command, ["r", "--speedscope", "D"]),
    "bundle --out DIR": (bundle.command, ["--out", "D"]),
}
"""Each option that writes, with F a file and D a folder; docs/writes.md has a row for each."""
IN_FOLDER = {
    "export --csv": "collectives.csv",
    "export --parquet": "events.parquet",
    "export --figures": "figures.html",
    "export --speedscope": "rank-00001.speedscope.json",
    "bundle --out DIR": "ddpdoctor/plain.py",
}


@pytest.fixture
def analysed_once(monkeypatch):
    """Each recording is analysed once for all commands."""
    _diagnosed_by(monkeypatch, _kept)


def _diagnosed_by(monkeypatch, work):
    for module in (analyze, export):
        monkeypatch.setattr(module, "diagnosis_at", work)
    for module in (compare, history):
        monkeypatch.setattr(module, "diagnosing", lambda **named: nullcontext(partial(work, **named)))


_AT = analyze.diagnosis_at
_ANALYSED = {}


def _kept(path, *given, **named):
    key = path, repr(given), repr(named)
    if key not in _ANALYSED:
        _ANALYSED[key] = _AT(path, *given, **named)
    return _ANALYSED[key]


def done_by(name: str):
    command, arguments = COMMANDS[name]
    file = "out.pyz" if name == "bundle --out" else "out"
    named = [{"F": file, "D": "out"}.get(word, word) for word in arguments]
    return CliRunner().invoke(command, named, catch_exceptions=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_own_outputs_are_replaced_and_edited_ones_are_kept(run, analysed_once, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert done_by(name).exit_code in (0, 1)
    written = tmp_path / ("out.pyz" if name == "bundle --out" else "out") / IN_FOLDER.get(name, "")
    written.write_text(MINE)
    before = content(tmp_path)
    with pytest.raises(DdpDoctorError, match=r"name another (file|folder)\.$"):
        done_by(name)
    assert content(tmp_path) == before


@pytest.mark.parametrize("name", COMMANDS)
def test_the_users_own_file_is_refused_before_the_work(run, tmp_path, monkeypatch, name):
    def work(*given, **named):
        raise AssertionError("it has begun")

    monkeypatch.chdir(tmp_path)
    _diagnosed_by(monkeypatch, work)
    if name == "export --speedscope":  # which ranks have samples is not known before
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
    place = tmp_path / ("out.pyz" if name == "bundle --out" else "out") / IN_FOLDER.get(name, "")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(MINE)
    before = content(tmp_path)
    with pytest.raises(DdpDoctorError, match=r"name another (file|folder)\.$"):
        done_by(name)
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    "name", [name for name in COMMANDS if name not in IN_FOLDER and name != "bundle --out"]
)
def test_a_missing_output_folder_is_refused_before_the_work(run, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    _diagnosed_by(monkeypatch, None)
    command, arguments = COMMANDS[name]
    with pytest.raises(DdpDoctorError, match=r"cannot write missing/out: No such file or directory"):
        CliRunner().invoke(
            command, [{"F": "missing/out"}.get(word, word) for word in arguments], catch_exceptions=False
        )


def test_every_option_that_writes_is_on_the_page_for_users():
    page = (ROOT / "docs/writes.md").read_text()
    context = click.Context(cli)
    commands = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    commands |= {f"rules {name}": each for name, each in rules.command.commands.items()}
    written = [
        f"`{name} {option.opts[0]}`"
        for name, command in commands.items()
        for option in command.params
        if option.metavar in ("F", "DIR", "RUN", "DIR|URI") and option.opts[0] not in ("--rules", "folders")
        if isinstance(option, click.Option)
    ]
    assert len(written) >= 23 and not [option for option in written if option not in page]
    for name in COMMANDS:
        assert f"`{' '.join(name.split()[:2])}`" in page


def test_trials_replace_neither_foreign_results_nor_foreign_patches(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for option in ("--json", "--patch"):
        Path("mine").write_text(MINE)
        with pytest.raises(DdpDoctorError, match=r"name another file\.$"):
            CliRunner().invoke(
                trials.command,
                ["--set", "loader.num_workers=1", option, "mine", "--", "true"],
                catch_exceptions=False,
            )
        assert Path("mine").read_text() == MINE


def test_a_failed_analysis_leaves_no_folder_for_its_page(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = CliRunner().invoke(cli, ["analyze", str(tmp_path / "nothing-here"), "--open"])
    assert done.exit_code and not list(tmp_path.iterdir())


@pytest.mark.parametrize("screen", [True, False])
def test_the_report_is_opened_where_there_is_a_browser(tmp_path, monkeypatch, screen):
    """Without a screen a text browser would take over the terminal."""
    shown = []
    monkeypatch.setattr(webbrowser, "open", lambda url: shown.append(url) or True)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    if screen:
        monkeypatch.setenv("DISPLAY", ":0")
    page = tmp_path / "report.html"
    done = CliRunner().invoke(cli, ["analyze", str(FIXTURES / "healthy"), "--html", str(page), "--open"])
    assert done.exit_code == 0 and page.exists()
    assert shown == ([page.as_uri()] if screen else [])
    assert ("no browser was found here" in done.output) is not screen
