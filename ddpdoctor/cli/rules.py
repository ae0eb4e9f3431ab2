"""``ddpdoctor rules``: list, show, test and create rules, and list the facts that rules can read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddpdoctor.cli.completion import rule_ids
from ddpdoctor.cli.main import Group
from ddpdoctor.cli.session import load_configuration, say
from ddpdoctor.errors import RuleError, did_you_mean
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
            _print_unwrapped(console, f"{rule.id}: no test")
        for result in run_tests(rule, pack.common):
            passed, failed = passed + (not result.failures), failed + bool(result.failures)
            for failure in result.failures:
                _print_unwrapped(console, f"{result.rule}: {result.name}: {failure}")
    console.print(f"{passed} passed, {failed} failed")
    if failed:
        raise click.exceptions.Exit(1)


def _rules(folders: tuple[Path, ...]) -> RuleSet:
    from ddpdoctor.diagnose.load import load_rules

    configured = [Path(folder) for folder in load_configuration().rules]
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
    min_share = (rule.thresholds.get("least_share") or common.thresholds["least_share"]).value
    when = " ".join(rule.when.split())
    rows = [
        (
            "fires when",
            when if when != "true" else f"the cost is at least {min_share * 100:g} % of the step",
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
    """``text`` without control characters, as a rich Text so that brackets in CEL are not interpreted as markup."""
    from rich.text import Text

    return Text(plain(text))


def _print_unwrapped(console: Console, text: str) -> None:
    console.print(_cell(text), soft_wrap=True)


_ID = re.compile(r"[a-z0-9][a-z0-9-]*/[a-z0-9][a-z0-9-]*")


@command.command("facts")
@click.argument("name", required=False)
def facts_command(name: str | None) -> None:
    """List the facts that a rule can read, with type, unit and meaning. NAME is a fact, the beginning of a path
    (late, late.data), or a word to search for.

    \b
    Examples:
      ddpdoctor rules facts
      ddpdoctor rules facts loader
      ddpdoctor rules facts late.data.share
    """
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from ddpdoctor.diagnose import facts_view

    known = facts_view.all_facts()
    costs = tuple(f"{fact.path}." for fact in known if fact.kind == "Cost")
    if name is None:
        # The fields of costs are omitted, because they are the same for all costs.
        found = [fact for fact in known if not fact.path.startswith(costs)]
    else:
        found = [fact for fact in known if fact.path == name or fact.path.startswith(f"{name}.")]
        word = name.lower()
        found = found or [
            fact
            for fact in known
            if word in fact.path.lower() or (word in fact.means.lower() and not fact.path.startswith(costs))
        ]
    if not found:
        suggestion = did_you_mean(name or "", (fact.path for fact in known))
        raise RuleError(f"there is no fact {name!r}.{suggestion} `ddpdoctor rules facts` lists all facts.")
    console = Console(highlight=False)
    for fact in found:
        kind = ", ".join(filter(None, (fact.kind, fact.unit)))
        console.print(Text.assemble((plain(fact.path), "bold"), (f"  {kind}", "dim")), soft_wrap=True)
        if fact.means:
            console.print(Padding(Text(plain(fact.means)), (0, 0, 0, 4)))
    if name is None:
        say("\nEvery Cost has the same fields: `ddpdoctor rules facts late.data` lists them.")


@command.command("new")
@click.argument("rule_id", metavar="FAMILY/NAME")
@click.option(
    *("--in", "folder"),
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("our-rules"),
    show_default=True,
    metavar="DIR",
    help="Folder of your rules; created if missing.",
)
def new_command(rule_id: str, folder: Path) -> None:
    """Write a template of a rule, complete and with tests that pass. Then change its condition and texts.

    \b
    Examples:
      ddpdoctor rules new ours/slow-steps
      ddpdoctor rules new dataloader/our-cache --in checks
    """
    if not _ID.fullmatch(rule_id):
        raise click.BadParameter(
            f"{rule_id!r} is not a rule id: lower-case letters, digits and dashes, such as ours/slow-steps",
            param_hint="FAMILY/NAME",
        )
    from ddpdoctor.diagnose.load import load_rules

    if rule_id in load_rules(entry_points=False).rules:
        raise RuleError(f"{rule_id} is a built-in rule, which yours would replace: choose another name")
    file = folder / f"{rule_id}.yaml"
    if folder.is_symlink():
        raise RuleError(f"{folder} is a symbolic link: give its target instead")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(_SKELETON.replace("FAMILY/NAME", rule_id))
    except FileExistsError:
        raise RuleError(f"{file} already exists and was not changed") from None
    say(f"written: {file}", err=True)
    say(
        f"`ddpdoctor rules test {file}` runs its tests, `ddpdoctor analyze RUN --rules {folder}` uses it.",
        err=True,
    )


_SKELETON = """\
id: FAMILY/NAME
title: A step takes {{ steps.median_ms|ms }}
question: Are steps longer than expected for this job?
# Facts without which the rule is skipped; `ddpdoctor rules facts` lists all facts.
needs: [steps.median_ms]
# CEL (https://cel.dev) over the facts. A rule about a cause of lost time has `costs: late.data` or the like instead: its finding
# then has a cost, a source line, and a severity that follows from the cost.
when: steps.median_ms > t.most_ms
severity: info
thresholds:
  most_ms:
    value: 100.0
    unit: ms
    source: Where this number comes from, or what was measured.
headline: A step takes {{ steps.median_ms|ms }}, more than {{ t.most_ms|ms }}
explain: >-
  What is wrong, what causes it, and why it costs time. Texts are Jinja2 over the facts: the median step takes
  {{ steps.median_ms|ms }}{% if job.world_size %} on {{ job.world_size|count('rank') }}{% endif %}.
evidence:
  - {fact: steps.median_ms, means: Median step time}
fixes:
  - title: What to change first
    why: Why that helps, and what it costs.
    snippet: |
      loader = DataLoader(dataset, num_workers=4)
limits: >-
  When this finding is wrong.
tests:
  - name: long steps
    facts: {steps: {median_ms: 250.0}, job: {world_size: 8}}
    fires: true
    says: ["250 ms, more than 100 ms", "on 8 ranks"]
  - name: short steps
    facts: {steps: {median_ms: 40.0}}
  - name: no step was timed
    facts: {job: {world_size: 8}}
    skipped: true
"""
