"""Was the diagnosis right: the rule, the rank, the line, and nothing beside it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ddpdoctor.diagnose.diagnosis import Diagnosis, Finding

from .planting import function_of, right_lines


@dataclass(frozen=True)
class Expected:
    """The right answer. No rules: the job is healthy."""

    rules: tuple[str, ...] = ()
    ranks: list[int] | None = None
    also: tuple[str, ...] = ()
    """Rules of a second fault, one of which must be among the findings."""
    here: str | None = None
    has_line: bool = True
    any_ranks: bool = False
    """Whichever ranks are named, none is a wrong answer."""


@dataclass(frozen=True)
class Judgement:
    """How one case went."""

    got: str | None
    rule: bool
    rank: bool | None
    line: str
    """"line", "function", "no" (a wrong one), "none" (no line named), "-" (none is due)."""
    false_alarms: list[str] = field(default_factory=list)
    missed_second: bool = False
    predicted_ms: float | None = None
    headline: str = ""
    where: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return self.rule and self.rank is not False and self.line != "no" and not self.missed_second

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"right": self.right}


def judge(diagnosis: Diagnosis, expected: Expected, text: str) -> Judgement:
    """``text`` is the script that ran."""
    warned = [f for f in diagnosis.findings if f.severity != "info" and f.caused_by is None]
    top = next((f for f in warned if f.rule == diagnosis.verdict.rule), None)
    allowed = (*expected.rules, *expected.also)
    alarms = [f.rule for f in warned if f.rule not in allowed]
    if not expected.rules:
        return Judgement(
            diagnosis.verdict.rule, top is None, None, "-", alarms, headline=diagnosis.verdict.headline
        )
    right_rule = top is not None and top.rule in allowed
    found = next((f for f in warned if f.rule in expected.rules), None)
    named = found or top
    return Judgement(
        got=diagnosis.verdict.rule,
        rule=right_rule and found is not None,
        rank=None if named is None or expected.any_ranks else named.ranks == expected.ranks,
        line=_line(named, expected, text) if expected.has_line else "-",
        false_alarms=alarms,
        missed_second=bool(expected.also) and not any(f.rule in expected.also for f in warned),
        predicted_ms=None if found is None else found.costs_ms_per_step,
        headline=diagnosis.verdict.headline,
        where=[] if named is None else [f"{w.file}:{w.line} {w.function}" for w in named.where],
    )


def _line(finding: Finding | None, expected: Expected, text: str) -> str:
    if finding is None or not finding.where:
        return "none"
    first = finding.where[0]
    right = right_lines(text, expected.here)
    if first.file.endswith("train.py") and first.line in right:
        return "line"
    functions = {function_of(text, line) for line in right} - {
        "main",
        "run",
        "worker",
        "train_one_epoch",
        "train_step",
    }
    return "function" if first.function.split(".")[-1] in functions else "no"
