"""The command group: list of commands, and exit codes of errors."""

import subprocess
import sys
from pathlib import Path

import click
import pytest

import ddpdoctor
from ddpdoctor.cli import main as entry
from ddpdoctor.cli.main import cli
from ddpdoctor.errors import DdpDoctorError

ROOT = Path(__file__).resolve().parents[2]


def run_main(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["ddpdoctor", *arguments])
    with pytest.raises(SystemExit) as ended:
        entry()
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


def test_version(monkeypatch, capsys):
    assert run_main(monkeypatch, capsys, "--version") == (0, f"ddpdoctor {ddpdoctor.__version__}\n", "")


def test_every_listed_command_loads_and_shows_an_example():
    with click.Context(cli) as context:
        verbs = cli.list_commands(context)
        assert {"run", "demo"} <= set(verbs)
        for verb in verbs:
            found = cli.get_command(context, verb)
            commands = [found, *found.commands.values()] if isinstance(found, click.Group) else [found]
            assert any("Example" in (each.help or "") for each in commands), verb


def test_an_unknown_command_is_a_usage_error(monkeypatch, capsys):
    code, out, err = run_main(monkeypatch, capsys, "nonsense")
    assert (code, out) == (2, "")
    assert "No such command 'nonsense'" in err


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (DdpDoctorError("x.json is empty."), 2, "ddpdoctor: x.json is empty.\n"),
        (KeyboardInterrupt(), 130, "\n"),
    ],
)
def test_errors_become_one_line_and_a_code(monkeypatch, capsys, error, code, words):
    @click.command("run")
    def failing():
        raise error

    monkeypatch.setattr("ddpdoctor.cli.run.command", failing)
    assert run_main(monkeypatch, capsys, "run") == (code, "", words)


def test_a_closed_pipe_is_not_an_error():
    process = subprocess.Popen(
        [sys.executable, "-m", "ddpdoctor", "run", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PYTHONPATH": str(ROOT)},
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait(30)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            KeyError("x\x1b[31m"),
            "stopped by a bug in ddpdoctor (KeyError: 'x\\x1b[31m'). Please report it",
        ),
        (RecursionError("deep"), "stopped by a bug in ddpdoctor (RecursionError: deep). Please report it"),
        (AssertionError(), "stopped by a bug in ddpdoctor (AssertionError). Please report it"),
        (MemoryError(), "not enough memory"),
        (OSError("odd"), "odd."),
        (OSError(5, "Input/output error"), "input/output error."),
        (DdpDoctorError("a\n\x1b]52;c;Zm9v\x07b\u202ec"), "a �]52;c;Zm9v�b�c"),
    ],
)
def test_unexpected_errors_are_one_sentence_and_exit_with_2(monkeypatch, capsys, error, words):
    @click.command("run")
    def failing():
        raise error

    monkeypatch.setattr("ddpdoctor.cli.run.command", failing)
    code, out, err = run_main(monkeypatch, capsys, "run")
    assert (code, out) == (2, "") and err.startswith(f"ddpdoctor: {words}") and err.count("\n") == 1


def test_a_traceback_is_shown_on_request(monkeypatch, capsys):
    @click.command("run")
    def failing():
        raise KeyError("planted")

    monkeypatch.setattr("ddpdoctor.cli.run.command", failing)
    monkeypatch.setenv("DDPDOCTOR_TRACEBACK", "1")
    code, _, err = run_main(monkeypatch, capsys, "run")
    assert code == 2 and "Traceback" in err and 'raise KeyError("planted")' in err


def test_names_in_click_errors_have_no_escape_sequences(monkeypatch, capsys):
    code, _, err = run_main(monkeypatch, capsys, "no\x1b[31mnsense")
    assert code == 2 and "\x1b" not in err and "No such command" in err
