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
from math import hypot
from pathlib import PurePath
from statistics import NormalDist
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
WARNING_SEVERITIES = ("warning", "critical")
SMALL_SHARE = 0.07
"""Below this share of the step a finding may have severity info: a warning needs 5 %, and prices are right within a third."""
HIGH_PRICE_SHARE = 0.08
PRICE_TOLERANCE = 1 / 3
RANGE = "costs_ms_per_step_range"
_NORMAL = NormalDist().inv_cdf(0.95)


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

    findings_by_fault = {
        fault: [each for each in findings if _reports(each, fault, case, diagnosis)] for fault in case.faults
    }
    expected_ids = {id(finding) for of_fault in findings_by_fault.values() for finding in of_fault}
    expected_faults, hidden = _faults_to_report(case)
    if hidden:
        words = (
            f"none of {' and '.join(each.kind for each in hidden)} reported: together {case.joint_ms:.2f} ms"
        )
        ask("rule", any(findings_by_fault[fault] for fault in hidden), words)
    for fault in case.faults:
        fault_findings, by_rule = (
            findings_by_fault[fault],
            [finding for finding in findings if finding["rule"] in fault.rules],
        )
        if fault in expected_faults:
            if fault.price_ms > SMALL_SHARE * case.step_ms and not fault.may_be_information:
                fault_findings, by_rule = _warnings(fault_findings), _warnings(by_rule)
            ask("rule", bool(by_rule), f"{fault.kind} not reported as {' or '.join(fault.rules)}")
            reported_ranks = [finding["ranks"] for finding in by_rule]
            if by_rule:
                ask(
                    "rank",
                    bool(fault_findings),
                    f"{fault.kind} of {fault.ranks} reported of {reported_ranks}",
                )
        elif not hidden:
            fault_findings = _high_priced(fault_findings, case) if _has_doubt(case, "cheap", fault) else []
        if fault_findings and fault.lines and (fault in expected_faults or hidden):
            said = [first_line(finding) for finding in fault_findings]
            is_right_line = any(line in fault.lines for line in said)
            ask("line", is_right_line, f"{fault.kind} at {_lines(fault.lines)}, reported at {_lines(said)}")
        if fault_findings and not _has_doubt(case, "noisy", fault):
            _ask_price(ask, fault, fault_findings, findings_by_fault, case)
    false_positives = [
        finding
        for finding in _warnings(findings)
        if not finding.get("caused_by")
        and id(finding) not in expected_ids
        and finding["rule"] not in case.tolerated
    ]
    ask("silence", not false_positives, f"also accused: {[summary(each) for each in false_positives]}")
    kinds = tuple(fault.kind for fault in case.faults) or ((case.trap,) if case.trap else ())
    said = tuple(summary(finding) for finding in findings)
    without_ms = tuple(
        (case.step_ms - fault.price_ms, case.step_ms - max(_prices(fault_findings)))
        for fault, fault_findings in findings_by_fault.items()
        if fault in expected_faults and _prices(fault_findings) and not _has_doubt(case, "noisy", fault)
    )
    fields = (*answers.as_fields(), case.doubts, said)
    return Mark(case.seed, case.half, kinds, *fields, without_ms)


def _faults_to_report(case: Case) -> tuple[tuple[Fault, ...], tuple[Fault, ...]]:
    """(Faults that must each be reported, faults of which one must be reported because they only have a joint cost)."""
    expected_faults = tuple(
        fault
        for fault in case.faults
        if not _has_doubt(case, "cheap", fault) and not _has_doubt(case, "unclear", fault)
    )
    together = case.joint_ms is not None and case.joint_ms > SMALL_SHARE * case.step_ms
    hidden = (
        not expected_faults and together and all(_has_doubt(case, "cheap", fault) for fault in case.faults)
    )
    return expected_faults, case.faults if hidden else ()


def _ask_price(
    ask: Callable[[str, bool, str], None],
    fault: Fault,
    fault_findings: list[dict[str, Any]],
    findings_by_fault: dict[Fault, list[dict[str, Any]]],
    case: Case,
) -> None:
    """Mark the price: whether it is near the fault's cost, or all prices add up to the joint cost; and the range."""
    prices = _prices(fault_findings)
    lowest_ms, highest_ms = fault.between_ms
    is_near = any(
        (1 - PRICE_TOLERANCE) * lowest_ms <= price <= (1 + PRICE_TOLERANCE) * highest_ms for price in prices
    )
    if (
        not is_near
        and case.joint_ms is not None
        and all(_prices(told) for told in findings_by_fault.values())
    ):
        cost_by_finding = {
            id(each): each["costs_ms_per_step"] or 0.0 for told in findings_by_fault.values() for each in told
        }
        is_near = abs(sum(cost_by_finding.values()) - case.joint_ms) <= PRICE_TOLERANCE * case.joint_ms
    cost = (
        f"{lowest_ms:.2f}" if fault.alone_ms is None else f"{fault.price_ms:.2f} ({fault.alone_ms:.2f} alone)"
    )
    ask("price", is_near, f"{fault.kind} costs {cost} ms, priced at {_listed(prices)}")
    ranges = [_with_error(finding, fault.error_ms) for finding in fault_findings if finding.get(RANGE)]
    if ranges:
        is_in_range = any(low <= highest_ms and lowest_ms <= high for low, high in ranges)
        spans = ", ".join(f"{low:.2f} to {high:.2f}" for low, high in ranges)
        ask("range", is_in_range, f"{fault.kind} costs {cost} ms, range {spans} with the error of the cost")


def _with_error(finding: dict[str, Any], error_ms: float) -> tuple[float, float]:
    """The interval in which nine of ten *measured* costs lie, if nine of ten true ones lie in the finding's range: the errors of both are
    independent, so the squares of their 90 % intervals add up."""
    price, (low, high) = finding["costs_ms_per_step"], finding[RANGE]
    half_ms = _NORMAL * error_ms
    return price - hypot(price - low, half_ms), price + hypot(high - price, half_ms)


def _per_step(finding: dict[str, Any], case: Case, diagnosis: dict[str, Any]) -> dict[str, Any]:
    """The finding with its price per step of the case, if the recording does not show where steps begin."""
    reported_mean_ms = diagnosis["steps"]["mean_ms"]
    if case.steps_told or not reported_mean_ms or finding["costs_ms_per_step"] is None:
        return finding
    scale = case.step_ms / reported_mean_ms
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


def _has_doubt(case: Case, doubt: str, fault: Fault) -> bool:
    return any(each.startswith(f"{doubt}: {fault.kind} ") for each in case.doubts)


def _reports(finding: dict[str, Any], fault: Fault, case: Case, diagnosis: dict[str, Any]) -> bool:
    """Whether the finding reports the fault: with a matching rule, and its ranks or those of all faults that the rule matches."""
    if finding["rule"] not in fault.rules:
        return False
    all_ranks = set(diagnosis["job"]["ranks_seen"])
    reported = all_ranks if finding["ranks"] is None else set(finding["ranks"])
    culprits = [set(fault.ranks or all_ranks) for fault in case.faults if finding["rule"] in fault.rules]
    return reported in (set(fault.ranks or all_ranks), set().union(*culprits))


def _warnings(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [finding for finding in findings if finding["severity"] in WARNING_SEVERITIES]


def _high_priced(findings: list[dict[str, Any]], case: Case) -> list[dict[str, Any]]:
    """Findings with a high price, to be marked for a fault with almost no cost."""
    return [each for each in findings if (each["costs_ms_per_step"] or 0) > HIGH_PRICE_SHARE * case.step_ms]


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
