"""Compares what a diagnosis says with what was planted."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from .planted import Case, Fault

ASKED = ("rule", "rank", "line", "price", "range", "silence")
ACCUSING = ("warning", "critical")
SMALL_SHARE = 0.07
"""Below this share of the step a finding may be an information: 5 % make a warning, and prices are right to a third."""
LOUD_SHARE = 0.08
PRICE_PART = 1 / 3
RANGE = "costs_ms_per_step_range"


@dataclasses.dataclass(frozen=True)
class Mark:
    """How one case was answered: of each thing asked, how often right and how often it was asked."""

    seed: int
    half: str
    kinds: tuple[str, ...]
    right: Counter[str]
    asked: Counter[str]
    misses: tuple[str, ...]
    doubts: tuple[str, ...]
    said: tuple[str, ...]


def mark(case: Case, diagnosis: dict[str, Any]) -> Mark:
    """Marks one diagnosis. Faults that cost next to nothing are not asked for, and must not be told as dear."""
    findings = [_per_step(finding, case, diagnosis) for finding in diagnosis.get("findings", [])]
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    misses: list[str] = []

    def ask(what: str, answer: bool, words: str) -> None:
        asked[what] += 1
        right[what] += answer
        if not answer:
            misses.append(f"{what}: {words}")

    explained: list[int] = []
    for fault in case.faults:
        named = [finding for finding in findings if finding["rule"] in fault.rules]
        if _is(case, "cheap", fault) or _is(case, "unclear", fault):
            most = LOUD_SHARE * case.step_ms if _is(case, "cheap", fault) else float("inf")
            explained += [id(each) for each in named if (each["costs_ms_per_step"] or 0) <= most]
            continue
        if fault.price_ms > SMALL_SHARE * case.step_ms and not fault.may_be_information:
            named = [finding for finding in named if finding["severity"] in ACCUSING]
        whose = [finding for finding in named if _same_ranks(finding, fault, diagnosis)]
        explained += [id(finding) for finding in whose]
        ask("rule", bool(named), f"{fault.kind} not told as {' or '.join(fault.rules)}")
        if not named:
            continue
        ask("rank", bool(whose), f"{fault.kind} of {fault.ranks} told of {[each['ranks'] for each in named]}")
        if not whose:
            continue
        if fault.lines:
            said = [_first_line(finding) for finding in whose]
            ask(
                "line",
                any(line in fault.lines for line in said),
                f"{fault.kind} at {fault.lines}, told at {said}",
            )
        if not _is(case, "noisy", fault):
            prices = [
                finding["costs_ms_per_step"] for finding in whose if finding["costs_ms_per_step"] is not None
            ]
            near = any(abs(price - fault.price_ms) <= PRICE_PART * fault.price_ms for price in prices)
            ask("price", near, f"{fault.kind} costs {fault.price_ms:.2f} ms, told {_rounded(prices)}")
            ranges = [finding[RANGE] for finding in whose if finding.get(RANGE)]
            if ranges:
                held = any(low <= fault.price_ms <= high for low, high in ranges)
                ask("range", held, f"{fault.kind} costs {fault.price_ms:.2f} ms, range {ranges}")
    extra = [
        finding
        for finding in findings
        if finding["severity"] in ACCUSING
        and not finding.get("caused_by")
        and id(finding) not in explained
        and finding["rule"] not in case.tolerated
    ]
    ask("silence", not extra, f"also accused: {[summary(each) for each in extra]}")
    kinds = tuple(fault.kind for fault in case.faults)
    said = tuple(summary(finding) for finding in findings)
    return Mark(case.seed, case.half, kinds, right, asked, tuple(misses), case.doubts, said)


def _per_step(finding: dict[str, Any], case: Case, diagnosis: dict[str, Any]) -> dict[str, Any]:
    """The finding with its price for one of the case's steps, where the recording had none of its own."""
    told_ms = diagnosis["steps"]["mean_ms"]
    if case.steps_told or not told_ms or finding["costs_ms_per_step"] is None:
        return finding
    scale = case.step_ms / told_ms
    scaled = {**finding, "costs_ms_per_step": finding["costs_ms_per_step"] * scale}
    if finding.get(RANGE):
        scaled[RANGE] = [scale * bound for bound in finding[RANGE]]
    return scaled


def summary(finding: dict[str, Any]) -> str:
    """One finding in a line."""
    price, line = finding["costs_ms_per_step"], _first_line(finding)
    cost = "no price" if price is None else f"{price:.2f} ms"
    at = f" at {line[0]}:{line[1]}" if line else ""
    effect = f" (effect of {finding['caused_by']})" if finding.get("caused_by") else ""
    return f"{finding['severity']} {finding['rule']} {finding['ranks']} {cost}{at}{effect}"


def totals(marks: Iterable[Mark]) -> dict[str, dict[str, tuple[int, int]]]:
    """Of each kind of case and thing asked: how often right, how often asked."""
    right: dict[str, Counter[str]] = {}
    asked: dict[str, Counter[str]] = {}
    for each in marks:
        for kind in ("all", " + ".join(each.kinds) if len(each.kinds) < 2 else "two faults"):
            kind = kind or "healthy"
            right.setdefault(kind, Counter()).update(each.right)
            asked.setdefault(kind, Counter()).update(each.asked)
    return {kind: {what: (right[kind][what], asked[kind][what]) for what in ASKED} for kind in sorted(asked)}


def _is(case: Case, doubt: str, fault: Fault) -> bool:
    return any(each.startswith(f"{doubt}: {fault.kind} ") for each in case.doubts)


def _same_ranks(finding: dict[str, Any], fault: Fault, diagnosis: dict[str, Any]) -> bool:
    every = set(diagnosis["job"]["ranks_seen"])
    told = every if finding["ranks"] is None else set(finding["ranks"])
    return told == (every if fault.ranks is None else set(fault.ranks))


def _first_line(finding: dict[str, Any]) -> tuple[str, int] | None:
    where = finding.get("where") or []
    return (PurePath(where[0]["file"]).name, where[0]["line"]) if where else None


def _rounded(prices: list[float]) -> list[float]:
    return [round(price, 2) for price in prices]
