"""Shell completion, ``python -m``, colours, quiet and verbose."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddpdoctor.cli.main import VERBS
from tests.commands import command

ROOT = Path(__file__).parents[2]
RUN = ROOT / "fixtures" / "slow-data-one-rank"
DOCTOR = [sys.executable, "-m", "ddpdoctor"]
ESCAPE = "\x1b["


def run(command, **environment):
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def analyze(*arguments, **environment):
    done = command("analyze", *arguments, environment={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def on_path(tmp_path):
    """A ``ddpdoctor`` that a shell finds, as the installed one is."""
    program = tmp_path / "bin" / "ddpdoctor"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ddpdoctor "$@"\n')
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_is_printed_that_the_shell_can_read(shell, tmp_path):
    script = tmp_path / "script"
    script.write_text(run([*DOCTOR, "completion", shell]))
    assert "_DDPDOCTOR_COMPLETE" in script.read_text()
    if shutil.which(shell):
        run([shell, "-n", str(script)])


def test_bash_completes_commands_and_options(on_path):
    def completed(*words):
        asked = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        out = run(["ddpdoctor"], **on_path, **asked, _DDPDOCTOR_COMPLETE="bash_complete")
        return [line.partition(",")[2] for line in out.splitlines()]

    assert completed("ddpdoctor", "w") == ["watch"]
    assert "--fail-on" in completed("ddpdoctor", "analyze", "--f")
    assert {"list", "show", "test"} <= set(completed("ddpdoctor", "rules", ""))
    assert completed("ddpdoctor", "rules", "show", "dataloader/st") == ["dataloader/starved"]


def test_bash_completes_runs_the_newest_first_and_files_where_there_are_none(on_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def completed(*words):
        asked = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        return run(["ddpdoctor"], **on_path, **asked, _DDPDOCTOR_COMPLETE="bash_complete").splitlines()

    assert completed("ddpdoctor", "analyze", "x") == ["file,x"]
    for name in ("20260101T120000Z-train", "20260102T120000Z-train"):
        shutil.copytree(RUN, tmp_path / "ddpdoctor-runs" / name)
    (tmp_path / "ddpdoctor-runs" / "20260103-notes").mkdir()
    runs = [f"plain,ddpdoctor-runs/2026010{day}T120000Z-train" for day in (2, 1)]
    assert completed("ddpdoctor", "analyze", "") == runs
    assert completed("ddpdoctor", "compare", "before", "ddpdoctor-runs/20260101") == runs[1:]


def test_the_module_runs_and_help_lists_every_command():
    out = run([*DOCTOR, "--help"])
    assert [verb for verb in VERBS if not re.search(rf"^  {verb} ", out, re.MULTILINE)] == []


def test_colours_are_off_when_piped_and_by_no_color():
    assert ESCAPE not in analyze(RUN)
    assert ESCAPE in analyze(RUN, FORCE_COLOR="1", TERM="xterm-256color")
    plain = analyze(RUN, FORCE_COLOR="1", TERM="xterm-256color", NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", plain)


def test_quiet_and_verbose():
    usual, quiet, verbose = analyze(RUN), analyze("--quiet", RUN), analyze("--verbose", RUN)
    assert quiet.count("\n") == 1 and quiet.startswith("Rank 1 waits")
    coloured = analyze("--quiet", RUN, FORCE_COLOR="1", TERM="xterm-256color")
    assert ESCAPE in coloured and re.sub(r"\x1b\[[0-9;]*m", "", coloured) == quiet
    assert len(usual) < len(verbose) and "lacked data" in verbose
