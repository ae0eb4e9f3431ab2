"""The text of a finding's line: shown where the file is as the run had it, and nowhere else."""

from __future__ import annotations

import json

import msgspec
import pytest

from ddpdoctor.analysis.source_text import CHANGED, with_source_text
from ddpdoctor.diagnose.diagnosis import Fix
from ddpdoctor.measure.places import CodeLine, Where
from ddpdoctor.report.markdown import render_markdown
from ddpdoctor.report.redaction import redact, without_source_text
from ddpdoctor.rundir.sources import hash_of
from tests.report import samples

TEXT = "import torch\n\n\ndef main():\n    token = 'hf_abcdefghijklmnopqrstuvwxyz012345'\n    train()\n"


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TEXT)
    return path


def recorded(tmp_path, script, text):
    """The script with this text, as a run had it."""
    script.write_text(text)
    folder = tmp_path / "run" / "hosts" / "node1"
    folder.mkdir(parents=True)
    files = {str(script): hash_of(text.encode())}
    (folder / "sources.json").write_text(json.dumps({"schema": "ddpdoctor.sources/1", "files": files}))


def told(tmp_path, script, line=5, hashed=None):
    """The first line of a diagnosis, with its text."""
    folder = tmp_path / "run" / "hosts" / "node1"
    folder.mkdir(parents=True)
    files = {str(script): hash_of(TEXT.encode()) if hashed is None else hashed}
    (folder / "sources.json").write_text(json.dumps({"schema": "ddpdoctor.sources/1", "files": files}))
    unhealthy = samples.unhealthy()
    finding = msgspec.structs.replace(unhealthy.findings[0], where=[Where(str(script), line, "main")])
    return with_source_text(msgspec.structs.replace(unhealthy, findings=[finding]), [str(tmp_path / "run")])


def where_of(diagnosis):
    return diagnosis.findings[0].where[0]


def test_a_line_is_shown_with_two_around_it_and_without_secrets(tmp_path, script):
    text = where_of(told(tmp_path, script)).text
    assert text.first_line == 3 and text.lines[1] == "def main():" and len(text.lines) == 5
    assert "hf_" not in "".join(text.lines) and text.lines[2].startswith("    token = ")


@pytest.mark.parametrize(("line", "first", "count"), [(1, 1, 3), (6, 4, 4)])
def test_at_the_ends_of_a_file_there_are_fewer_lines(tmp_path, script, line, first, count):
    text = where_of(told(tmp_path, script, line)).text
    assert (text.first_line, len(text.lines)) == (first, count)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ("    model = prepare()\n", 7),
        ("    model = own.prepare()\n", 7),
        ("    prepare()\n    prepare()\n", 5),
        ("    prepare = 3\n", 5),
        ("    make(\n", 5),
        ("    prepare('\\d')\n", 7),
    ],
)
@pytest.mark.filterwarnings("error")
def test_the_line_that_a_fix_changes_comes_first(tmp_path, script, more, line):
    """Where a framework calls the constructor, it is none of those that were recorded. Two of them are no answer."""
    recorded(tmp_path, script, TEXT + more)
    unhealthy = samples.unhealthy()
    fix = Fix(title="Set it", why="", changed_at=["strategy", "prepare"])

    def shown(through):
        where = [Where(str(script), 5, "main", through=through)]
        finding = msgspec.structs.replace(unhealthy.findings[0], where=where, fixes=[fix])
        diagnosis = msgspec.structs.replace(unhealthy, findings=[finding])
        return with_source_text(diagnosis, [str(tmp_path / "run")]).findings[0].where

    found = shown((CodeLine("/env/framework.py", 3, "fit"),))
    assert found[0].line == line and found[-1].line == 5 and found[0].function == "main"
    assert [where.line for where in shown(())] == [5], "a line that does the work itself stays the first"


@pytest.mark.parametrize(
    ("call", "written"),
    [
        ("Arguments(lr=1)", "# train.py:10\narguments = Arguments(workers=4)"),
        ("OwnArguments(lr=1)", "# train.py:10\narguments = OwnArguments(workers=4)"),
        ("Loop(lr=1)", "# train.py:10\narguments = Arguments(workers=4)      # for Loop"),
    ],
)
def test_a_fix_names_the_line_that_takes_it_and_the_class_that_is_called_there(
    tmp_path, script, call, written
):
    """Also where the finding's line is the user's own. Of two such lines, that in a function of the finding's counts."""
    text = f"{TEXT}\n\ndef work():\n    arguments = {call}\n\n\ndef other():\n    Arguments()\n    read()\n"
    text = text if call.startswith("Arguments") else text.replace("    Arguments()\n", "    print()\n")
    recorded(tmp_path, script, text)
    snippet = "arguments = Arguments(workers=4)" + ("      # for Loop" if "Loop" in call else "")
    fix = Fix(title="Set it", why="", snippet=snippet, changed_at=["Arguments", "OwnArguments", "Loop"])
    where = [Where(str(script), 15, "other.<locals>.work")]
    unhealthy = samples.unhealthy()
    finding = msgspec.structs.replace(unhealthy.findings[0], where=where, fixes=[fix])
    diagnosis = msgspec.structs.replace(unhealthy, findings=[finding])
    (found,) = with_source_text(diagnosis, [str(tmp_path / "run")]).findings
    assert found.fixes[0].snippet == written and found.where[0].line == 15


def test_a_file_that_has_changed_is_not_shown(tmp_path, script):
    script.write_text("# another\n" + TEXT)
    where = where_of(told(tmp_path, script))
    assert where.text is None and where.text_missing == CHANGED


@pytest.mark.parametrize("line", [0, 99])
def test_a_line_that_is_not_there_has_no_text(tmp_path, script, line):
    assert where_of(told(tmp_path, script, line)).text is None


def test_a_file_of_which_the_run_says_nothing_is_not_read(tmp_path, script):
    diagnosis = samples.unhealthy()
    assert with_source_text(diagnosis, [str(tmp_path)]) is diagnosis


def test_redacted_and_on_request_there_is_no_text(tmp_path, script):
    diagnosis = told(tmp_path, script)
    assert "def main" in render_markdown(diagnosis)
    for without in (redact(diagnosis), without_source_text(diagnosis)):
        assert where_of(without).text is None and "def main" not in render_markdown(without)


def with_a_fix(diagnosis):
    """``diagnosis``, whose finding advises to do the work at its line less often."""
    fix = Fix(
        title="Do it less often", why="", snippet="if step % 100 == 0:\n    ...                # this work"
    )
    finding = msgspec.structs.replace(diagnosis.findings[0], fixes=[fix])
    return msgspec.structs.replace(diagnosis, findings=[finding])


@pytest.mark.parametrize(("line", "known"), [(6, True), (4, False), (5, False)])
def test_a_fix_has_the_statement_that_calls_the_work(tmp_path, script, line, known):
    """Neither the head of a function nor an assignment, whose value is needed, can be left out of a step."""
    diagnosis = with_a_fix(told(tmp_path, script, line))
    assert ("if step % 100 == 0:\n    train()" in render_markdown(diagnosis)) is known
    assert ("# this work" in render_markdown(diagnosis)) is not known
    assert "# this work" in render_markdown(redact(diagnosis))


def test_the_statement_is_that_of_the_outermost_caller(tmp_path, script):
    where = Where(str(script), 1, "inner").called_from((CodeLine(str(script), 6, "main"),))
    unhealthy = told(tmp_path, script)
    finding = msgspec.structs.replace(unhealthy.findings[0], where=[where])
    diagnosis = msgspec.structs.replace(unhealthy, findings=[finding])
    assert where_of(with_source_text(diagnosis, [str(tmp_path / "run")])).text.call == "train()"
