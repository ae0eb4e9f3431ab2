"""The project's configuration in all commands that diagnose, and the progress line."""

import contextlib
import json
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ddpdoctor.analysis import analyze
from ddpdoctor.cli.session import configured, diagnosis_at
from ddpdoctor.diagnose.load import packaged_folder
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.report.json_output import write_json
from ddpdoctor.stages import Stage
from tests.commands import command

ROOT = Path(__file__).parents[2]
RUN = ROOT / "fixtures" / "slow-data-one-rank"


def test_the_nearest_configuration_is_used(tmp_path, monkeypatch):
    (tmp_path / "ddpdoctor.toml").write_text('suppress = ["dataloader/*"]\n')
    inside = tmp_path / "scripts"
    inside.mkdir()
    monkeypatch.chdir(inside)
    options = configured(jobs=1)
    assert list(options.suppressed) == ["dataloader/*"] and options.jobs == 1


def test_a_rule_that_does_not_exist_is_named(tmp_path, monkeypatch):
    (tmp_path / "ddpdoctor.toml").write_text('suppress = ["dataloader/stared"]\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DdpDoctorError, match="dataloader/stared"):
        configured()


@pytest.mark.parametrize("verb", [["analyze", "-q"], ["watch", "--once"], ["compare", RUN]])
def test_every_command_uses_the_configuration(tmp_path, verb):
    (tmp_path / "ddpdoctor.toml").write_text('suppress = ["dataloader/*"]\n')
    done = command(*verb, RUN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown, _, notes = done.stdout.partition("Note: ")  # where `compare` says which rules are suppressed
    assert "dataloader/one-rank-late" not in shown and "for data at" not in shown
    assert verb[0] != "compare" or "suppressed by" in notes


def test_an_existing_diagnosis_is_shown_with_any_configuration(tmp_path, monkeypatch):
    """Nothing is analysed, so no rule and no threshold is needed."""
    made = tmp_path / "diagnosis.json"
    write_json(analyze(str(RUN), configured(jobs=1, cache=False)), made)
    (tmp_path / "ddpdoctor.toml").write_text("suppress = 3\n")
    monkeypatch.chdir(tmp_path)
    assert diagnosis_at(str(made)).verdict.rule == "dataloader/one-rank-late"
    with pytest.raises(DdpDoctorError, match=r"ddpdoctor\.toml"):
        diagnosis_at(str(RUN))


def test_suppressed_rules_are_noted(tmp_path, monkeypatch):
    file = tmp_path / "ddpdoctor.toml"
    file.write_text('suppress = ["dataloader/one-rank-late", "gpu/*"]\n')
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    found = analyze(str(RUN), configured(jobs=1, cache=False))
    told = found.notes[0]
    named = {"dataloader/one-rank-late"} | {
        f"gpu/{file.stem}" for file in (packaged_folder() / "gpu").iterdir()
    }
    assert told.startswith(f"{len(named)} rules suppressed by ") and all(rule in told for rule in named)
    assert str(file.resolve()) in told
    assert not {rule.rule for rule in found.skipped} & named


def test_a_rule_that_replaces_one_of_the_pack_is_named(tmp_path):
    own = tmp_path / "gpu" / "memory-full.yaml"
    own.parent.mkdir()
    text = (packaged_folder() / "gpu" / "memory-full.yaml").read_text(encoding="utf-8")
    own.write_text(text.replace("severity: info", "severity: warning"), encoding="utf-8")
    found = analyze(str(RUN), configured(rules=[tmp_path], jobs=1, cache=False))
    assert found.notes[0] == "1 rule of ddpdoctor's own replaced by another of the same id: gpu/memory-full."


def read_all(terminal: int, shown: list[bytes]) -> None:
    """Read until the other side is closed."""
    with contextlib.suppress(OSError):
        while data := os.read(terminal, 65536):
            shown.append(data)


def on_terminal(*arguments: object) -> tuple[subprocess.CompletedProcess[str], str]:
    """A command with a terminal as stderr, and what that showed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    ours, theirs = pty.openpty()
    shown: list[bytes] = []
    reader = threading.Thread(target=read_all, args=(ours, shown))
    reader.start()  # a terminal that nobody reads fills up, and whoever writes to it waits
    command = [sys.executable, "-m", "ddpdoctor", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=environment)
    os.close(theirs)
    reader.join()
    os.close(ours)
    return done, b"".join(shown).decode()


def test_progress_goes_to_a_terminal_on_stderr_and_nowhere_else(tmp_path):
    done, shown = on_terminal("analyze", "-q", RUN, "--json", tmp_path / "diagnosis.json")
    assert done.returncode == 0 and done.stdout.startswith("Rank 1 waits") and done.stdout.count("\n") == 1
    stages = [f"{number}/{len(Stage)} {stage}" for number, stage in enumerate(Stage, 1)]
    places = [shown.find(stage) for stage in ("starting", *stages)]
    assert -1 not in places and places == sorted(places)
    assert f"{stages[0]}, 0 %" in shown
    assert command("analyze", "-q", RUN).stderr == ""


def test_a_report_on_standard_output_has_no_other_output():
    done, shown = on_terminal("analyze", RUN, "--json", "-")
    assert done.returncode == 0 and json.loads(done.stdout)["source"] == [str(RUN)]
    assert Stage.RULES in shown and Stage.REPORT not in shown


def test_an_export_shows_progress(tmp_path):
    file = tmp_path / "t.json.gz"
    done, shown = on_terminal("export", RUN, "--timeline", file)
    assert done.returncode == 0 and file.exists() and done.stdout.startswith(f"written: {file}")
    assert f"{len(Stage)}/{len(Stage)} {Stage.REPORT}, 0 %" in shown
