"""Formats findings as text for all outputs."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TypeVar

import msgspec

from ddpdoctor.diagnose.diagnosis import Evidence, Finding, Fix
from ddpdoctor.diagnose.rule_texts import THIS_WORK
from ddpdoctor.measure.places import CodeLine, Where, function_name, is_own_process
from ddpdoctor.report import words
from ddpdoctor.rundir.sources import parsed_python

_Row = TypeVar("_Row")

MAX_LISTED = 500
"""Maximum number of findings, notes and rules that a report lists; its data has all."""
_IDENTIFYING_FIELDS = ("step", "sequence")
"""Last parts of the paths of facts that identify a step or a collective by its number."""
_MAX_PER_FINDING = 100
"""Maximum number of source lines, evidence rows and fixes shown of a finding."""
MAX_MARKED_RANKS = 64
"""Maximum number of ranks of a finding that charts mark; more could not be distinguished."""
NOT_QUANTIFIED = "not quantified"
SEVERITY_WORDS = {"critical": "Critical", "warning": "Warning", "info": "Info"}


class TextLine(msgspec.Struct, frozen=True):
    """A line of a source file."""

    number: int
    text: str
    is_target: bool
    """Whether it is the finding's line, not a neighbouring one."""


class Place(msgspec.Struct, frozen=True):
    """A source line of the user's program, as text."""

    short: str
    """``train.py:57``."""
    full: str
    """The same with its whole path."""
    function: str
    share: str
    """Share of the time; empty if it was not recorded or is 100 %."""
    callers: list[Place] = []
    """The lines that called it, innermost first; last the process, if it is that of a worker."""
    more: str = ""
    """Number of further callers, as text; empty if there are none."""
    text: list[TextLine] = []
    text_missing: str = ""
    """Why there is no text; empty if there is text or it was not requested."""
    samples: str = ""
    """Number of stack samples; empty if unknown."""
    inside: str = ""
    """The library function in which most of the time was spent, such as ``functional.py:465 resize``; empty if there is none."""
    rank: str = ""
    """The only named rank that runs it, as "rank 1: "; empty if all do."""

    @property
    def call_path(self) -> str:
        """The line and its callers: ``metrics.py:18 to_numpy ← trainer.py:133 Trainer.log and 2 more places``."""
        path = f"{self.short} {self.function}".rstrip()
        path = f"{self.inside} ← {path}" if self.inside else path
        return self.rank + " ← ".join(filter(None, (path, self.called_at)))

    @property
    def called_at(self) -> str:
        """The callers: ``trainer.py:133 Trainer.log and 2 more places``; "" if none was recorded."""
        path = " ← ".join(f"{each.short} {each.function}".rstrip() for each in self.callers)
        return f"{path} {self.more}".strip()


def finding_views(findings: Sequence[Finding], main: str | None, all_ranks: str) -> list[SimpleNamespace]:
    """The first :data:`MAX_LISTED` findings, numbered, as texts for the templates. Unknown values are empty.

    ``main``: the verdict's rule. ``all_ranks``: the name for all recorded ranks.
    """
    shown = list(enumerate(findings[:MAX_LISTED], 1))
    anchors = {finding.rule: f"finding-{index}" for index, finding in reversed(shown)}
    titles = {finding.rule: finding.title for finding in reversed(findings)}

    def cause_of(finding: Finding) -> tuple[str, str] | None:
        """(Title, anchor) of the finding that causes ``finding``. The anchor is empty if that finding is not shown."""
        rule = finding.caused_by
        return (titles.get(rule, rule), anchors.get(rule, "")) if rule else None

    return [_view(finding, index, cause_of(finding), main, all_ranks) for index, finding in shown]


def _view(
    finding: Finding, number: int, cause: tuple[str, str] | None, main: str | None, all_ranks: str
) -> SimpleNamespace:
    prefix = words.cost_prefix(finding)
    return SimpleNamespace(
        anchor=f"finding-{number}",
        number=number,
        rule=finding.rule,
        severity=finding.severity if finding.severity in SEVERITY_WORDS else "info",
        severity_word=SEVERITY_WORDS.get(finding.severity, finding.severity),
        title=words.split_code(finding.title),
        ranks=words.rank_names(finding.ranks, all_ranks),
        cost=_cost_text(finding, prefix),
        cost_label="Cost" if words.cost_in_total(finding) else "Cost per step",
        cost_range=words.cost_range(finding),
        share="" if finding.share is None else words.percent(finding.share),
        # Width of a bar, 0 to 100.
        share_percent=round(100 * min(max(finding.share or 0.0, 0.0), 1.0), 1),
        speedup=words.speedup_text(finding, prefix),
        speedup_range=words.speedup_range(finding),
        facts=_facts(finding),
        steps=_chart_marks(finding, number, all_ranks),
        explanation=words.paragraphs(finding.explanation),
        evidence=[
            SimpleNamespace(means=evidence_words(e), value=evidence_value(e), fact=e.fact)
            for e in finding.evidence[:_MAX_PER_FINDING]
        ],
        places=[place(where) for where in finding.where[:_MAX_PER_FINDING]],
        # At the top: the first line, or that of each rank.
        spots=[
            (place(where), where.process if len(lines_of_ranks(finding)) > 1 else "")
            for where in lines_of_ranks(finding)[:_MAX_RANK_LINES]
        ],
        fixes=[_fix(finding, fix) for fix in finding.fixes[:_MAX_PER_FINDING]],
        cause=cause,
        limits=words.paragraphs(finding.limits),
        # Whether evidence and fixes are folded.
        folded=cause is not None and finding.rule != main,
    )


def _cost_text(finding: Finding, prefix: str) -> str:
    if finding.costs_ms_per_step is not None:
        return prefix + words.milliseconds(finding.costs_ms_per_step)
    if total := words.cost_in_total(finding):
        return total
    if finding.caused_by:
        return "no cost of its own"
    # Findings about hangs have no cost per step.
    return NOT_QUANTIFIED if finding.coverage.steps and not finding.rule.startswith("hang/") else ""


def first_rows(rows: Sequence[_Row], noun: str) -> tuple[Sequence[_Row], str]:
    """The first :data:`MAX_LISTED` of ``rows``, and a sentence with the number of further rows; "" if there are none."""
    omitted = len(rows) - MAX_LISTED
    return rows[
        :MAX_LISTED
    ], f"{words.count(omitted, f'more {noun}')} in the report's data." if omitted > 0 else ""


def order_words(findings: Sequence[Finding]) -> str:
    """A phrase on the order of ``findings`` if it is not that of their costs; "" if it is."""
    rows = [each for each in findings if not each.caused_by and (each.share or each.share_of_run)]
    costs = [each.share or each.share_of_run or 0.0 for each in rows]
    return (
        ""
        if costs == sorted(costs, reverse=True)
        else "order: by cost; uncertain and one-time costs rank lower"
    )


def evidence_words(evidence: Evidence) -> str:
    """The description of a number behind a finding."""
    return (evidence.means or words.fact(evidence.fact)).rstrip(".")


def filled_columns(table: Sequence[Sequence[str]]) -> list[list[str]]:
    """``table`` without empty columns. The first row is the head."""
    empty = ("", words.NO_COST)
    kept = [n for n in range(len(table[0])) if any(row[n] not in empty for row in table[1:])]
    return [[row[n] for n in kept] for row in table]


def evidence_value(evidence: Evidence) -> str:
    """The value with its unit, without "per step" if the description has it. Numbers of steps and collectives have no thousands
    separators."""
    if isinstance(evidence.value, int) and evidence.fact.rpartition(".")[2] in _IDENTIFYING_FIELDS:
        return str(evidence.value)
    value = words.quantity(evidence.value, evidence.unit)
    return value.removesuffix(" per step") if " per step" in evidence_words(evidence) else value


def location(finding: Finding) -> str:
    """The finding's source line for a table, ``train.py:57``. Without a line, the annotation or operator; else ""."""
    if finding.where:
        return place(finding.where[0]).short
    operations = (e.value for e in finding.evidence if e.fact.endswith(".operation"))
    return next((operation for operation in operations if isinstance(operation, str)), "")


def _facts(finding: Finding) -> list[tuple[str, str]]:
    rows = []
    if finding.persistence and finding.coverage.steps > 1:
        rows.append(("When", words.PERSISTENCE.get(finding.persistence, finding.persistence)))
    if finding.steps:
        rows.append(("Steps", _span(finding.steps)))
    steps, ranks = words.count(finding.coverage.steps, "step"), words.count(finding.coverage.ranks, "rank")
    return [*rows, ("Based on", f"{steps} on {ranks}" if finding.coverage.steps else ranks)]


def _span(steps: Sequence[int]) -> str:
    first, last = steps[0], steps[-1]
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _chart_marks(finding: Finding, number: int, all_ranks: str) -> SimpleNamespace | None:
    """The steps and ranks that the charts over the run mark for a finding; None if it concerns all ranks in all steps."""
    if not finding.steps and not finding.ranks:
        return None
    first, last, span = "", "", "the whole run"
    if finding.steps:
        first, last = str(finding.steps[0]), str(finding.steps[-1])
        span = f"{'step' if first == last else 'steps'} {_span(finding.steps)}"
    caption = f"Finding {number}, {words.rank_names(finding.ranks, all_ranks)}: {span}"
    label = "Show its steps in the charts" if finding.steps else "Show its ranks in the charts"
    ranks = ",".join(map(str, (finding.ranks or [])[:MAX_MARKED_RANKS]))
    return SimpleNamespace(first=first, last=last, ranks=ranks, label=label, caption=caption)


def place(where: CodeLine) -> Place:
    """``where`` as text."""
    name = where.file.replace("\\", "/").rpartition("/")[2] or where.file
    suffix = f":{where.line}" if where.line > 0 else ""
    short, full = f"{name}{suffix}", f"{where.file}{suffix}"
    function = function_name(where.function)
    if not isinstance(where, Where):
        return Place(short, full, function, "")
    # A share of 100 % is not shown.
    share = "" if where.share is None or where.share > 0.995 else words.percent(where.share)
    lines = list(enumerate(where.text.lines, where.text.first_line)) if where.text else []
    while lines and not lines[-1][1].strip():
        lines.pop()
    seen, callers = (short, function), []
    for caller in map(place, where.callers):
        if (caller.short, caller.function) != seen:  # not a comprehension's own frame
            callers.append(caller)
        seen = caller.short, caller.function
    rank = f"{where.process}: " if is_own_process(where.process) else ""
    if where.process and not rank:
        callers.append(Place(where.process, where.process, "", ""))
    inside = (
        ""
        if where.inside is None or where.follows
        else f"{place(where.inside).short} {function_name(where.inside.function)}".rstrip()
    )
    samples = "" if where.samples is None else words.count(where.samples, "sample")
    return Place(
        short,
        full,
        function,
        share,
        callers,
        f"and {words.count(where.more_callers, 'more place')}"
        if where.callers and where.more_callers
        else "",
        [TextLine(number, text, number == where.line) for number, text in lines],
        where.text_missing or "",
        f"{samples} just before this line"
        if where.follows
        else f"{samples}, mostly in {inside}"
        if samples and inside
        else samples,
        inside,
        rank,
    )


def lines_of_ranks(finding: Finding) -> list[Where]:
    """The finding's lines if they are of several ranks, one each; else the first one."""
    of_ranks = [where for where in finding.where if is_own_process(where.process)]
    return of_ranks if len(of_ranks) > 1 else finding.where[:1]


def who_and_where(finding: Finding, ranks: str) -> str:
    """The ranks (``ranks`` as text) and the line, or each rank with its own: "rank 0 at a.py:1 in f; rank 1 at b.py:2 in g"."""
    shown = lines_of_ranks(finding)
    places = [" in ".join(filter(None, (each.short, each.function))) for each in map(place, shown)]
    if len(shown) < 2:
        return ", at ".join([ranks, *places])
    pairs = [f"{where.process} at {text}" for where, text in zip(shown, places, strict=True)]
    return "; ".join(pairs[:_MAX_RANK_LINES]) + (
        f" and {len(pairs) - _MAX_RANK_LINES} more" if len(pairs) > _MAX_RANK_LINES else ""
    )


_MAX_RANK_LINES = 4


def snippet(finding: Finding, fix: Fix) -> str:
    """The code of a fix, with the finding's own call in it if the source text is known; "" without code."""
    text = finding.where[0].text if finding.where else None
    call = None if text is None else text.call
    code = (fix.snippet or "").strip("\n")
    return code.replace(THIS_WORK, call) if call and _is_call_statement(call) else code


def _is_call_statement(line: str) -> bool:
    """Whether ``line`` is a complete statement that is a call."""
    tree = parsed_python(line)
    body = [] if tree is None else tree.body
    return len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Call)


def _fix(finding: Finding, fix: Fix) -> SimpleNamespace:
    return SimpleNamespace(
        label=words.fix_label(fix, "What to change"),
        title=words.split_code(fix.title),
        why=words.paragraphs(fix.why),
        snippet=snippet(finding, fix),
        trade_off=words.paragraphs(fix.trade_off or ""),
        # https addresses as (address, its text split where a line may break); ``sources`` has all others.
        links=[
            (link, re.findall(r"[^/#]*[/#]?", link.removeprefix("https://"))[:-1])
            for link in fix.docs
            if _is_linkable(link)
        ],
        sources=[link for link in fix.docs if not _is_linkable(link)],
    )


def _is_linkable(link: str) -> bool:
    return link.startswith("https://") and not any(letter.isspace() or letter in "\"'<>" for letter in link)
