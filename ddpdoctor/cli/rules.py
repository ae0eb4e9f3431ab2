"""``ddpdoctor rules``: list, show, test and create rules, and list the facts that they read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddpdoctor.cli.groups import Group
from ddpdoctor.cli.project_config import own_config
from ddpdoctor.cli.rule_authors import facts_command, new_command
from ddpdoctor.cli.shell_completion import rule_ids
from ddpdoctor.errors import RuleError
from ddpdoctor.nearest import did_you_mean
from ddpdoctor.plain import plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ddpdoctor.diagnose.load import RuleSet
    from ddpdoctor.diagnose.rule import Common, Rule

_folders = click.option(
    *("--rules", "folders"),
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    multiple=True,
    metavar="DIR",
    help="Additional folder of rules (<family>/<name>.yaml); can be repeated.",
)


@click.group("rules", cls=Group)
def command() -> None:
    """List, show, test and create rules, which make the findings: one file per rule.

    \b
    Examples:
      ddpdoctor rules list
      ddpdoctor rules show dataloader/starved
      ddpdoctor rules facts loader
      ddpdoctor rules new ours/slow-steps
      ddpdoctor rules test our-rules
    """


command.add_command(facts_command)
command.add_command(new_command)


@command.command("list")
@_folders
def list_command(folders: tuple[Path, ...]) -> None:
    """List all rules.

    \b
    Example:
      ddpdoctor rules list --rules our-rules
    """
    from rich.console import Console
    from rich.table import Table

    table = Table("rule", "question", box=None)
    for rule in _rules(folders).rules.values():
        table.add_row(_cell(rule.id), _cell(rule.question))
    Console().print(table)


@command.command("show")
@click.argument("rule_id", metavar="ID", shell_complete=rule_ids)
@_folders
def show_command(rule_id: str, folders: tuple[Path, ...]) -> None:
    """Show what a rule reads, when it fires, and when it may be wrong.

    \b
    Example:
      ddpdoctor rules show allreduce/small-buckets
    """
    from rich.console import Console

    rules = _rules(folders)
    rule = rules.rules.get(rule_id)
    if rule is None:
        suggestion = did_you_mean(rule_id, rules.rules)
        raise RuleError(f"there is no rule {rule_id!r}; `ddpdoctor rules list` lists all rules.{suggestion}")
    _show(rule, rules.common, Console(highlight=False))


@command.command("test")
@click.argument("path", required=False, type=click.Path(path_type=Path, exists=True))
def test_command(path: Path | None) -> None:
    """Run the tests in rule files: those of the built-in rules, or of a folder or file. Exit code 1 if a test fails or
    a rule has no test.

    \b
    Examples:
      ddpdoctor rules test
      ddpdoctor rules test our-rules/dataloader/our-cache.yaml
    """
    from rich.console import Console

    from ddpdoctor.diagnose.load import load_rules
    from ddpdoctor.diagnose.selftest import run_tests

    pack = load_rules(entry_points=path is None)
    console = Console(highlight=False)
    passed = failed = 0
    for rule in (pack.rules if path is None else _rules_at(path)).values():
        if not rule.tests:
            failed += 1
            _line(console, f"{rule.id}: no test")
        for result in run_tests(rule, pack.common):
            passed, failed = passed + (not result.failures), failed + bool(result.failures)
            for failure in result.failures:
                _line(console, f"{result.rule}: {result.name}: {failure}")
    console.print(f"{passed} passed, {failed} failed")
    if failed:
        raise click.exceptions.Exit(1)


def _rules(folders: tuple[Path, ...]) -> RuleSet:
    from ddpdoctor.diagnose.load import load_rules

    configured = [Path(folder) for folder in own_config().rules]
    return load_rules([*configured, *folders])


def _rules_at(path: Path) -> dict[str, Rule]:
    from ddpdoctor.diagnose.load import read_folder
    from ddpdoctor.diagnose.rule import read_rule

    if path.is_dir():
        return read_folder(path)
    rule_id = f"{path.resolve().parent.name}/{path.stem}"
    return {rule_id: read_rule(path, rule_id)}


def _show(rule: Rule, common: Common, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(Text(plain(rule.id), style="bold"))
    console.print(_cell(rule.question))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    least_share = (rule.thresholds.get("least_share") or common.thresholds["least_share"]).value
    when = " ".join(rule.when.split())
    rows = [
        (
            "fires when",
            when if when != "true" else f"the cost is at least {least_share * 100:g} % of the step",
        ),
        (
            "costs",
            ", ".join(rule.cost_paths)
            or rule.costs_ms
            or (f"{rule.costs_s} s of the run" if rule.costs_s else "-"),
        ),
    ]
    rows += [("needs", ", ".join([*rule.needs, *rule.cost_needs]) or "-")]
    rows += [
        (f"t.{name}", f"{entry.value:g} {entry.unit}: {entry.source}")
        for name, entry in rule.thresholds.items()
    ]
    causes = ("any finding with a cost" if effect.rule == "*" else effect.rule for effect in rule.effects)
    rows += [("effect of", ", ".join(causes))] if rule.effects else []
    rows += [("limits", " ".join(rule.limits.split()))]
    for name, text in rows:
        table.add_row(_cell(name), _cell(text))
    console.print(table)


def _cell(text: str) -> Text:
    """``text`` for rich without markup, because CEL has brackets, and without control characters."""
    from rich.text import Text

    return Text(plain(text))


def _line(console: Console, text: str) -> None:
    console.print(_cell(text), soft_wrap=True)
