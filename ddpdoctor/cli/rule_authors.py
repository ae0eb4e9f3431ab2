"""``ddpdoctor rules facts`` and ``rules new``, for authors of rules."""

from __future__ import annotations

import re
from pathlib import Path

import click

from ddpdoctor.cli.say import say
from ddpdoctor.errors import RuleError
from ddpdoctor.nearest import did_you_mean
from ddpdoctor.plain import plain

_ID = re.compile(r"[a-z0-9][a-z0-9-]*/[a-z0-9][a-z0-9-]*")


@click.command("facts")
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
        # All costs have the same fields, which are omitted here.
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


@click.command("new")
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
