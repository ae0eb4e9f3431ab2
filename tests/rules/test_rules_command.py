"""``ddpdoctor rules``, as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from ddpdoctor.cli.rules import command
from ddpdoctor.diagnose.load import packaged_folder
from ddpdoctor.errors import RuleError


@pytest.fixture
def own_rule(tmp_path: Path) -> Path:
    """A team's folder with a copy of one rule under another id, one of whose tests fails."""
    text = (packaged_folder() / "gpu" / "memory-full.yaml").read_text(encoding="utf-8")
    file = tmp_path / "ours" / "memory.yaml"
    file.parent.mkdir()
    text = text.replace("id: gpu/memory-full", "id: ours/memory")
    file.write_text(text.replace("{memory_used_share: 0.5}", "{memory_used_share: 0.99}"), encoding="utf-8")
    return file


def test_list_shows_all_rules_with_further_folders(own_rule: Path) -> None:
    result = CliRunner().invoke(command, ["list", "--rules", str(own_rule.parents[1])])
    assert result.exit_code == 0
    assert "dataloader/one-rank-late" in result.output
    assert "ours/memory" in result.output


def test_show_prints_brackets_of_a_condition_as_they_are(own_rule: Path) -> None:
    text = own_rule.read_text(encoding="utf-8")
    own_rule.write_text(text.replace("\nwhen: ", "\nwhen: size([gpu, host]) == 2 && ", 1), encoding="utf-8")
    folder = ["--rules", str(own_rule.parents[1])]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(command, ["show", "ours/memory", *folder])
    assert result.exit_code == 0
    assert "size([gpu, host])" in result.output
    assert "Wrong if" in result.output


def test_show_of_an_unknown_rule_says_what_to_do() -> None:
    result = CliRunner().invoke(command, ["show", "nope/nothing"])
    assert isinstance(result.exception, RuleError)
    assert "rules list" in str(result.exception)


def test_the_pack_passes() -> None:
    result = CliRunner().invoke(command, ["test"])
    assert result.exit_code == 0
    assert " 0 failed" in result.output


@pytest.mark.parametrize("whole_folder", [True, False])
def test_a_failing_test_is_named_and_the_exit_code_is_1(own_rule: Path, whole_folder: bool) -> None:
    path = own_rule.parents[1] if whole_folder else own_rule
    result = CliRunner().invoke(command, ["test", str(path)])
    assert result.exit_code == 1
    assert "ours/memory: half: fired" in result.output


def test_a_rule_without_a_test_fails(own_rule: Path) -> None:
    text = own_rule.read_text(encoding="utf-8")
    own_rule.write_text(text.partition("tests:")[0] + "tests: []\n", encoding="utf-8")
    result = CliRunner().invoke(command, ["test", str(own_rule)])
    assert result.exit_code == 1 and "ours/memory: no test" in result.output
