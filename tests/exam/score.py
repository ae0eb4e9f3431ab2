"""Compares a diagnosis with the planted faults.

For each fault that has a cost, these are marked: the rule (one of those whose pages describe it), the ranks, the line if there is one,
the price within a third, and whether the reported range contains it. For each case, "silence" is marked: no other warning or critical
finding. Findings of severity info, and findings reported as effects of others, do not count as false positives.

**Two faults can hide each other.** Ranks wait for the latest one. If two ranks are late at the same place, fixing either alone saves
almost nothing, and fixing both saves a lot. Four variants are measured: with all faults, without each, and without both. A finding
that names a planted rank with a matching rule is never a false positive, whatever the fault costs. Its price is right if it lies
between the fault's marginal cost (the other fault remains) and its cost alone (the other fault is removed), or if both prices add up
to the joint cost. A fault without marginal cost need not be reported, but one of several faults that only have a joint cost must be.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import PurePath
from typing import Any

from .planted import Case, Fault

ASKED = (
    "rule",
    "rank",
    "line",
    "when",
    "seconds",
    "rate",
    "price",
    "range",
    "silence",
    "account",
    "attempts",
    "cause",
    "repeated",
    "exit",
)
ACCUSING = ("warning", "critical")
SMALL_SHARE = 0.07
"""Below this share of the step a finding may have severity info: a warning needs 5 %, and prices are right within a third."""
LOUD_SHARE = 0.08
PRICE_PART = 1 / 3
RANGE = "costs_ms_per_step_range"


@dataclasses.dataclass(frozen=True)
class Mark:
    """The marks of a case: by mark, how often the answer was right and how often it was asked."""

    seed: int
    half: str
    kinds: tuple[str, ...]
    right: dict[str, int]
    asked: dict[str, int]
    misses: tuple[str, ...]
    doubts: tuple[str, ...]
    said: tuple[str, ...]
    without_ms: tuple[tuple[float, float], ...] = ()
    """(Measured, predicted) step time without the fault, for each fault with a price."""


class Answers:
    """Collects marks: how often each answer was right and how often it was asked, and texts of the misses."""

    def __init__(self) -> None:
        self.right: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.misses: list[str] = []

    def ask(self, what: str, answer: bool, words: str) -> None:
        """Count one answer. ``words``: description of a miss."""
        self.asked[what] += 1
        self.right[what] += answer
        if not answer:
            self.misses.append(f"{what}: {words}")

    def as_fields(self) -> tuple[dict[str, int], dict[str, int], tuple[str, ...]]:
        """The fields of a :class:`Mark`."""
        return dict(self.right), dict(self.asked), tuple(self.misses)


def mark(case: Case, diagnosis: dict[str, Any]) -> Mark:
    """The marks of a diagnosis. Faults with almost no cost need not be reported, and must not be reported with a high price."""
    findings = [_per_step(finding, case, diagnosis) for finding in diagnosis.get("findings", [])]
    answers = Answers()
    ask = answers.ask

    named = {
        fault: [each for each in findings if _fits(each, fault, case, diagnosis)] for fault in case.faults
    }
    explained = {id(finding) for of_fault in named.values() for finding in of_fault}
    dear, hidden = _to_be_told(case)
    if hidden:
        words = (
            f"none of {' and '.join(each.kind for each in hidden)} reported: together {case.joint_ms:.2f} ms"
        )
        ask("rule", any(named[fault] for fault in hidden), words)
    for fault in case.faults:
        whose, by_rule = named[fault], [finding for finding in findings if finding["rule"] in fault.rules]
        if fault in dear:
            if fault.price_ms > SMALL_SHARE * case.step_ms and not fault.may_be_information:
                whose, by_rule = _loud(whose), _loud(by_rule)
            ask("rule", bool(by_rule), f"{fault.kind} not reported as {' or '.join(fault.rules)}")
            told_of = [finding["ranks"] for finding in by_rule]
            if by_rule:
                ask("rank", bool(whose), f"{fault.kind} of {fault.ranks} reported of {told_of}")
        elif not hidden:
            whose = _too_dear(whose, case) if _is(case, "cheap", fault) else []
        if whose and fault.lines and (fault in dear or hidden):
            said = [first_line(finding) for finding in whose]
            carried = any(line in fault.lines for line in said)
            ask("line", carried, f"{fault.kind} at {_lines(fault.lines)}, reported at {_lines(said)}")
        if whose and not _is(case, "noisy", fault):
            _ask_price(ask, fault, whose, named, case)
    extra = [
        finding
        for finding in _loud(findings)
        if not finding.get("caused_by")
        and id(finding) not in explained
        and finding["rule"] not in case.tolerated
    ]
    ask("silence", not extra, f"also accused: {[summary(each) for each in extra]}")
    kinds = tuple(fault.kind for fault in case.faults) or ((case.trap,) if case.trap else ())
    said = tuple(summary(finding) for finding in findings)
    without_ms = tuple(
        (case.step_ms - fault.price_ms, case.step_ms - max(_prices(whose)))
        for fault, whose in named.items()
        if fault in dear and _prices(whose) and not _is(case, "noisy", fault)
    )
    fields = (*answers.as_fields(), case.doubts, said)
    return Mark(case.seed, case.half, kinds, *fields, without_ms)


def _to_be_told(case: Case) -> tuple[tuple[Fault, ...], tuple[Fault, ...]]:
    """(Faults that must each be reported, faults of which one must be reported because they only have a joint cost)."""
    dear = tuple(
        fault for fault in case.faults if not _is(case, "cheap", fault) and not _is(case, "unclear", fault)
    )
    together = case.joint_ms is not None and case.joint_ms > SMALL_SHARE * case.step_ms
    hidden = not dear and together and all(_is(case, "cheap", fault) for fault in case.faults)
    return dear, case.faults if hidden else ()


def _ask_price(
    ask: Callable[[str, bool, str], None],
    fault: Fault,
    whose: list[dict[str, Any]],
    named: dict[Fault, list[dict[str, Any]]],
    case: Case,
) -> None:
    """Mark the price: whether it is near the fault's cost, or all prices add up to the joint cost; and the range."""
    prices = _prices(whose)
    least, most = fault.between_ms
    near = any((1 - PRICE_PART) * least <= price <= (1 + PRICE_PART) * most for price in prices)
    if not near and case.joint_ms is not None and all(_prices(told) for told in named.values()):
        both = {id(each): each["costs_ms_per_step"] or 0.0 for told in named.values() for each in told}
        near = abs(sum(both.values()) - case.joint_ms) <= PRICE_PART * case.joint_ms
    cost = f"{least:.2f}" if fault.alone_ms is None else f"{fault.price_ms:.2f} ({fault.alone_ms:.2f} alone)"
    ask("price", near, f"{fault.kind} costs {cost} ms, priced at {_listed(prices)}")
    ranges = [finding[RANGE] for finding in whose if finding.get(RANGE)]
    if ranges:
        held = any(low <= most and least <= high for low, high in ranges)
        spans = ", ".join(f"{low:.2f} to {high:.2f}" for low, high in ranges)
        ask("range", held, f"{fault.kind} costs {cost} ms, range {spans}")


def _per_step(finding: dict[str, Any], case: Case, diagnosis: dict[str, Any]) -> dict[str, Any]:
    """The finding with its price per step of the case, if the recording does not show where steps begin."""
    told_ms = diagnosis["steps"]["mean_ms"]
    if case.steps_told or not told_ms or finding["costs_ms_per_step"] is None:
        return finding
    scale = case.step_ms / told_ms
    scaled = {**finding, "costs_ms_per_step": finding["costs_ms_per_step"] * scale}
    if finding.get(RANGE):
        scaled[RANGE] = [scale * bound for bound in finding[RANGE]]
    return scaled


def summary(finding: dict[str, Any]) -> str:
    """A finding as one line of text."""
    price, line = finding["costs_ms_per_step"], first_line(finding)
    cost = "no price" if price is None else f"{price:.2f} ms"
    at = f" at {line[0]}:{line[1]}" if line else ""
    effect = f" (effect of {finding['caused_by']})" if finding.get("caused_by") else ""
    return f"{finding['severity']} {finding['rule']} {finding['ranks']} {cost}{at}{effect}"


def totals(marks: Iterable[Mark]) -> dict[str, dict[str, tuple[int, int]]]:
    """(Number of right answers, number of questions) by kind of case and by mark."""
    right: dict[str, Counter[str]] = {}
    asked: dict[str, Counter[str]] = {}
    for each in marks:
        for kind in ("all", " + ".join(each.kinds) if len(each.kinds) < 2 else "two faults"):
            kind = kind or "healthy"
            right.setdefault(kind, Counter()).update(each.right)
            asked.setdefault(kind, Counter()).update(each.asked)
    return {kind: {what: (right[kind][what], asked[kind][what]) for what in ASKED} for kind in sorted(asked)}


def asked_in(rows: dict[str, dict[str, tuple[int, int]]]) -> list[str]:
    """The marks that were asked in these totals, in order."""
    return [what for what in ASKED if any(row[what][1] for row in rows.values())]


def _is(case: Case, doubt: str, fault: Fault) -> bool:
    return any(each.startswith(f"{doubt}: {fault.kind} ") for each in case.doubts)


def _fits(finding: dict[str, Any], fault: Fault, case: Case, diagnosis: dict[str, Any]) -> bool:
    """Whether the finding reports the fault: with a matching rule, and its ranks or those of all faults that the rule matches."""
    if finding["rule"] not in fault.rules:
        return False
    every = set(diagnosis["job"]["ranks_seen"])
    told = every if finding["ranks"] is None else set(finding["ranks"])
    culprits = [set(fault.ranks or every) for fault in case.faults if finding["rule"] in fault.rules]
    return told in (set(fault.ranks or every), set().union(*culprits))


def _loud(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [finding for finding in findings if finding["severity"] in ACCUSING]


def _too_dear(findings: list[dict[str, Any]], case: Case) -> list[dict[str, Any]]:
    """Findings with a high price, to be marked for a fault with almost no cost."""
    return [each for each in findings if (each["costs_ms_per_step"] or 0) > LOUD_SHARE * case.step_ms]


def _prices(findings: list[dict[str, Any]]) -> list[float]:
    return [each["costs_ms_per_step"] for each in findings if each["costs_ms_per_step"] is not None]


def first_line(finding: dict[str, Any]) -> tuple[str, int] | None:
    """(File name, line number) of the finding's first source line."""
    where = finding.get("where") or []
    return (PurePath(where[0]["file"]).name, where[0]["line"]) if where else None


def _listed(prices: Iterable[float]) -> str:
    return ", ".join(f"{price:.2f}" for price in prices) or "nothing"


def _lines(lines: Iterable[tuple[str, int] | None]) -> str:
    return ", ".join(f"{line[0]}:{line[1]}" for line in lines if line) or "no line"
