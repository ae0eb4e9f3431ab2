"""Text in a recording cannot send escape sequences, fake a sentence, or become markup."""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from ddpdoctor.cli import main as entry
from ddpdoctor.plain import plain, plain_lines
from tests.commands import command

ROOT = Path(__file__).resolve().parents[2]
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")
EVIL = (
    "a\x1b[2J\x1b]52;c;Zm9v\x07\x1b]8;;http://evil.example\x1b\\click\x9b31m [red]x[/red] [link=http://evil.example]y[/link] "
    "\u202egnp.exe\u2066\ntotally: healthy @team #12 <img src=http://evil.example/b.png> ![b](http://evil.example/b.png) a|b"
)


@pytest.fixture
def run(tmp_path):
    run = Path(shutil.copytree(ROOT / "fixtures" / "barrier", tmp_path / "run"))
    for name in ("manifest.json", "ranks/00000/rank.json", "ranks/00001/rank.json"):
        document = json.loads((run / name).read_text())
        document |= {"notes": [EVIL], "host": EVIL, "backend": EVIL, "device_name": EVIL, "command": [EVIL]}
        (run / name).write_text(json.dumps(document))
    log = run / "ranks/00000/steps.jsonl"
    log.write_text(log.read_text().replace("demo/job.py", json.dumps(f"/x/{EVIL}.py")[1:-1]))
    return run


def output(monkeypatch, capfd, *arguments):
    monkeypatch.setattr(sys, "argv", ["ddpdoctor", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        entry()
    shown = capfd.readouterr()
    return ended.value.code, shown.out + shown.err


@pytest.mark.parametrize("verb", ["analyze", "watch", "export", "compare"])
def test_no_command_prints_escape_sequences(run, tmp_path, monkeypatch, capfd, verb):
    arguments = {
        "analyze": ["analyze", run, "--no-cache", "--verbose"],
        "watch": ["watch", run, "--once"],
        "export": ["export", run, "--timeline", tmp_path / "t.json"],
        "compare": ["compare", run, run],
    }[verb]
    code, shown = output(monkeypatch, capfd, *arguments)
    assert code == 0 and not OBEYED.search(shown)
    assert "[red]x[/red]" in shown or verb in ("export", "compare", "watch")
    assert not any(line.startswith("totally: healthy") for line in shown.splitlines())


def test_errors_and_file_names_have_no_escape_sequences(tmp_path, monkeypatch, capfd):
    code, shown = output(monkeypatch, capfd, "analyze", tmp_path / EVIL.replace("/", "_"))
    assert code == 2 and not OBEYED.search(shown) and shown.count("\n") == 1


def test_reports_for_code_hosts_have_no_mentions_and_images(run, tmp_path, monkeypatch, capfd):
    code, _ = output(
        monkeypatch,
        capfd,
        "analyze",
        run,
        "--no-cache",
        "--markdown",
        tmp_path / "m.md",
        "--html",
        tmp_path / "h.html",
    )
    text = (tmp_path / "m.md").read_text()
    outside_code = re.sub(r"```.*?```|(`+).*?\1", "", text, flags=re.DOTALL)
    assert code == 0 and "@" in outside_code and not OBEYED.search(text)
    assert not re.search(r"@\w|#\d|https?://|<img|!\[b\]", outside_code)
    page = (tmp_path / "h.html").read_text()
    assert "<img" not in page and not OBEYED.search(re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL))


def test_a_foreign_rule_is_shown_without_markup(tmp_path):
    (tmp_path / "sync").mkdir()
    rule = (
        (ROOT / "rules/sync/explicit-barrier.yaml").read_text().replace("sync/explicit-barrier", "sync/ours")
    )
    question = 'question: "[link=http://evil.example]x[/link] \\e[31m \\u202e"'
    rule = re.sub(r"^question: .*$", lambda _: question, rule, flags=re.MULTILINE)
    (tmp_path / "sync/ours.yaml").write_text(rule)
    for arguments in (["list"], ["show", "sync/ours"]):
        done = command("rules", *arguments, "--rules", tmp_path)
        assert done.returncode == 0 and "[link=http://evil.example]x[/link]" in done.stdout.replace("\n", "")
        assert not OBEYED.search(done.stdout)


def test_endless_aliases_and_nesting_in_rules_are_refused(tmp_path):
    (tmp_path / "sync").mkdir()
    rule = (
        (ROOT / "rules/sync/explicit-barrier.yaml").read_text().replace("sync/explicit-barrier", "sync/ours")
    )
    for facts, words in (
        ("&a [*a]", "aliases followed"),
        ("&a [[&b [[&c [1, *b]]]]]", "aliases followed"),
        ("[" * 100_000, "nested too deep"),
        ("- " * 100_000, ""),
    ):
        (tmp_path / "sync/ours.yaml").write_text(rule.replace("{world_size: 4}", facts, 1))
        done = command("rules", "test", tmp_path)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and words in done.stderr


def test_all_sentences_are_printed_by_say():
    """``demo`` and ``completion`` print what ddpdoctor itself wrote; ``recorded`` stands beside a job."""
    own = {"session.py", "main.py", "demo.py", "completion.py", "recorded.py"}
    for file in sorted((ROOT / "ddpdoctor" / "cli").glob("*.py")):
        calls = [node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        printed = [ast.unparse(call) for call in calls if ast.unparse(call) in ("click.echo", "print")]
        assert not printed or file.name in own, file


def test_ordinary_text_is_unchanged():
    assert (
        plain("Ränge 0–3: 7.1× 60\u00a0ms ↳ 日本 \U0001f600")
        == "Ränge 0–3: 7.1× 60\u00a0ms ↳ 日本 \U0001f600"
    )
    assert plain("a\r\nb\tc\rd\x00\ud800") == "a b c�d��"
    assert plain_lines("a\r\nb\x1b") == "a\nb�"
