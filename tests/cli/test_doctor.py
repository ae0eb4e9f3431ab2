"""``ddpdoctor doctor`` on this machine, on other Pythons, and on a missing command."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil
import pytest

from ddpdoctor.launch.checkup import Interpreter, interpreter_of
from tests.commands import command

CHECKS = (
    *("Job's Python", "PyTorch", "GPUs", "Cores", "Memory", "Shared memory", "Clock", "Processes"),
    *("Run directory", "Network"),
)


def doctor(*arguments, cwd):
    return command("doctor", *arguments, cwd=cwd)


def script(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.extended
def test_the_checks_of_this_machine(tmp_path):
    pytest.importorskip("torch")
    done = doctor("--", sys.executable, "train.py", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    *lines, conclusion = done.stdout.splitlines()
    assert [line[6:].split("  ")[0] for line in lines] == list(CHECKS)
    assert "the recorder loads" in lines[0] and "gloo" in lines[1]
    assert conclusion == "A job can be recorded here: ddpdoctor run -- COMMAND"
    assert list(tmp_path.iterdir()) == [], "looking writes nothing"


@pytest.mark.extended
def test_the_python_is_from_the_launchers_shebang(tmp_path):
    wrapper = script(tmp_path / "python-of-mine", "#!/bin/sh", f'exec "{sys.executable}" "$@"')
    launcher = script(tmp_path / "launch", f"#!{wrapper}", "raise SystemExit('must not be run')")
    done = doctor("--json", "-", "--", launcher, cwd=tmp_path)
    told = json.loads(done.stdout)
    assert told["schema"] == "ddpdoctor.doctor/1" and told["ready"] == (done.returncode == 0)
    python = told["checks"][0]
    assert python["state"] == "ok" and sys.executable in python["words"]


def test_without_a_command_the_python_is_torchrun_s_else_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert interpreter_of([]) == Interpreter(sys.executable, False)
    script(tmp_path / "torchrun", "#!/opt/job/bin/python3")
    assert interpreter_of([]) == Interpreter("/opt/job/bin/python3", True)


@pytest.mark.parametrize(
    ("lines", "check", "words"),
    [
        (["#!/bin/sh", f'exec "{sys.executable}" -S "$@"'], "PyTorch", "not found"),
        (["#!/bin/sh", f'exec "{sys.executable}" -I "$@"'], "Job's Python", "does not load the recorder"),
        (["#!/bin/sh", "echo 'no licence' >&2; exit 3"], "Job's Python", "without an answer: no licence"),
    ],
)
def test_a_python_that_cannot_record(tmp_path, lines, check, words):
    done = doctor("--", script(tmp_path / "python-odd", *lines), cwd=tmp_path)
    assert done.returncode == 1
    said = next(line for line in done.stdout.splitlines() if check in line)
    assert said.startswith("no ") and words in said
    assert (
        "cannot be recorded here: see" in done.stdout.splitlines()[-1]
        and check in done.stdout.splitlines()[-1]
    )


def test_a_missing_command_is_one_sentence(tmp_path):
    done = doctor("--", "torchrum", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ddpdoctor: torchrum: no such command here.\n"


@pytest.mark.parametrize(
    "lines",
    [
        ["#!/bin/sh", "yes"],
        ["#!/bin/sh", "echo 'DDPDOCTOR-ANSWER {\"python\": 5}'"],
        ["#!/bin/sh", "printf 'DDPDOCTOR-ANSWER '; head -c 200000 /dev/zero | tr '\\0' '['"],
        ["#!/bin/sh", "sleep 300 & echo $! > left; echo 'DDPDOCTOR-ANSWER {'"],
    ],
)
def test_a_broken_python_ends_at_once_and_leaves_nothing(tmp_path, lines):
    odd = script(tmp_path / "python-odd", *lines)
    done = doctor("--", odd, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr == ""
    left = tmp_path / "left"
    assert not left.exists() or not psutil.pid_exists(int(left.read_text()))


def test_odd_commands_are_one_sentence(tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o755)
    os.chmod(tmp_path / "fifo", 0o755)
    (tmp_path / "job.py").write_text("")
    for odd, words in (
        ("./fifo", "not a regular file"),
        ("./job.py", "not executable"),
        ("", "the empty command"),
    ):
        done = doctor("--", odd, cwd=tmp_path)
        assert done.returncode == 2 and words in done.stderr


@pytest.mark.extended
def test_a_relative_python_and_an_unknown_one(tmp_path):
    script(tmp_path / "python-mine", "#!/bin/sh", f'exec "{sys.executable}" "$@"')
    assert "the recorder loads" in doctor("--", "./python-mine", cwd=tmp_path).stdout
    assert "does not say which Python" in doctor("--", "sleep", "1", cwd=tmp_path).stdout
