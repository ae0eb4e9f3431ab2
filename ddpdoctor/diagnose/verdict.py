"""The first sentence of a report; the checks whether measured numbers are consistent; and the waterfall chart's bars.

If numbers are inconsistent, findings with a cost are withheld. One inconsistency is an exception: a few long steps that no
rule explains. They are reported and make the job unhealthy, but do not affect findings on the other steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from msgspec.structs import replace

from ddpdoctor.diagnose.diagnosis import Coverage, Finding, SkippedRule, Verdict, WaterfallBar
from ddpdoctor.diagnose.engine import Outcome
from ddpdoctor.diagnose.ordering import includes_zero

from . import words

_MIN_UNMATCHED_STEPS = 2
"""Least number of steps for a verdict if collectives could not be matched."""


def verdict(
    outcome: Outcome,
    *,
    coverage: Coverage,
    matched: bool = True,
    stopped: str | None = None,
    marked: bool = True,
) -> tuple[bool, Verdict]:
    """Return ``(healthy, verdict)``. Healthy: steps were measured and checked, no rule warns, and no large cost is unexplained
    because rules lacked data.

    ``matched``: whether collectives were matched across ranks. ``stopped``: headline if no steps were measured and the
    analysis of the job's end found nothing. ``marked``: whether the recording shows where steps begin.
    """
    warnings = [finding for finding in outcome.findings if finding.severity != "info"]
    top = _headline_of(warnings)
    stops = (
        top is not None and top.rule in outcome.stopping
    )  # that it stopped follows from no measured number
    if outcome.contradictions and not stops and (top is None or top.costs_ms_per_step is None):
        return False, Verdict(
            None, f"Cannot tell: the measured numbers contradict each other: {outcome.contradictions[0]}."
        )
    if top is not None:
        return False, Verdict(top.rule, outcome.headlines[top.rule])
    evaluated = len(outcome.checked) + len(outcome.findings)
    if coverage.steps == 0 and stopped is not None:
        return False, Verdict(None, stopped)
    if outcome.unexplained:
        return False, Verdict(None, f"Cannot tell: {outcome.unexplained[0]}.")
    if coverage.steps == 0 or evaluated == 0:
        return False, Verdict(
            None, "Cannot tell: no training steps were measured, so there was nothing to check."
        )
    if not matched and coverage.ranks > 1 and coverage.steps < _MIN_UNMATCHED_STEPS:
        return False, Verdict(
            None,
            f"Cannot tell: the collectives of {coverage.ranks} ranks could not be matched, and fewer than two whole steps were "
            "recorded on all ranks.",
        )
    share = outcome.thresholds["warning_share"]
    steps = f"{words.count(coverage.steps, 'step') if marked else 'one recording'} of {words.count(coverage.ranks, 'rank')}"
    lacking = sum(rule.applies for rule in outcome.skipped)
    lacked = f", {lacking} lacked data" if lacking else ""
    seen = f"{steps}; {words.count(lacking, 'check')} lacked data" if lacking else steps
    if outcome.short_window_rules:
        return True, Verdict(
            None,
            f"No lasting problem was found ({seen}), but this happened once: {outcome.headlines[outcome.short_window_rules[0]]}",
        )
    noted = next(
        (f for f in outcome.findings if (f.share or 0.0) >= share or f.rule in outcome.capped_rules), None
    )
    if noted is not None:
        # A finding below a warning can still cost much of the step, for example on a machine shared with other users.
        return True, Verdict(None, f"No warnings ({seen}), but note: {outcome.headlines[noted.rule]}")
    if lacking > evaluated:
        return True, Verdict(
            None,
            f"No {'severe ' if outcome.findings else ''}problem found, but only {evaluated} of {evaluated + lacking} checks had data "
            f"({steps}).",
        )
    found = f"{words.count(len(outcome.checked), 'check')} found nothing"
    return True, Verdict(
        None,
        f"Healthy: no cause was found that takes {share * 100:g} % of a step ({steps}; {found}{lacked}).",
    )


def _headline_of(warnings: Sequence[Finding]) -> Finding | None:
    """The first; but if it may cost nothing, the first cause that was measured to cost something, where there is one."""
    if not warnings or not includes_zero(warnings[0]):
        return next(iter(warnings), None)
    sure = (
        finding
        for finding in warnings
        if finding.caused_by is None
        and finding.costs_ms_per_step is not None
        and not (finding.at_most or finding.estimated or includes_zero(finding))
    )
    return next(sure, warnings[0])


def waterfall(mean_ms: float | None, outcome: Outcome) -> list[WaterfallBar]:
    """Bars for the measured step time, the cost of each finding, and the rest. Costs overlap, so later ones are limited to the
    rest."""
    if mean_ms is None:
        return []
    bars, left = [WaterfallBar("measured step", mean_ms)], mean_ms
    for finding in outcome.findings:
        saved = min(finding.costs_ms_per_step or 0.0, left * 0.999)
        if finding.caused_by is None and saved > 0:
            ends_ms = None if finding.at_most else finding.costs_ms_per_step_range
            bars.append(WaterfallBar(finding.title, -saved, finding.rule, ends_ms, finding.at_most))
            left -= saved
    bars.append(WaterfallBar("without these, at best", left))
    return bars


_SHARE_TOLERANCE = 0.05
"""How far a share may be below 0 or above 1, because clocks are read one after the other."""
_SUM_TOLERANCE = 0.02
_MEAN_TO_MEDIAN = 2.0
"""A mean that differs from the median by more than this factor needs an explanation."""
_MIN_EXPLAINED_SHARE = 0.5
"""Share of mean minus median that findings must explain."""
_MIN_STEPS_FOR_P95 = 20
"""With fewer steps, the 95th percentile is the longest step."""


def contradictions(
    facts: Mapping[str, Any], findings: Sequence[Finding], thresholds: Mapping[str, float]
) -> list[str]:
    """Inconsistencies of the numbers, as clauses, the clearest first. ``facts``: from
    :func:`ddpdoctor.diagnose.facts_view.tree`."""
    return [
        *_step_time_contradictions(facts["steps"]),
        *_few_long_steps(facts["steps"], findings, thresholds),
        *_share_contradictions(facts),
    ]


def without_contradictions(outcome: Outcome, facts: Mapping[str, Any]) -> Outcome:
    """``outcome`` with the inconsistencies of the numbers as errors, and without findings that have a cost, whose rules become
    skipped. If the only inconsistency is a few unexplained long steps, the findings stay."""
    found = contradictions(facts, outcome.findings, outcome.thresholds)
    if not found:
        return outcome
    if found == list(_few_long_steps(facts["steps"], outcome.findings, outcome.thresholds)):
        noted = [f"{each[0].upper()}{each[1:]}." for each in found]
        return replace(
            outcome,
            errors=[*noted, *outcome.errors],
            short_window_rules=[],
            contradictions=[*found, *outcome.contradictions],
        )
    priced = [finding for finding in outcome.findings if finding.costs_ms_per_step is not None]
    return replace(
        withheld(outcome, priced, f"the measured numbers contradict each other: {found[0]}"),
        errors=[*(f"The measured numbers contradict each other: {each}." for each in found), *outcome.errors],
        contradictions=[*found, *outcome.contradictions],
    )


def withheld(outcome: Outcome, doubtful: Sequence[Finding], why: str) -> Outcome:
    """``outcome`` without these findings and their effects, whose rules become skipped for this reason."""
    rules = {each.rule for each in doubtful}
    left_out = [each for each in outcome.findings if each in doubtful or each.caused_by in rules]
    return replace(
        outcome,
        findings=[each for each in outcome.findings if each not in left_out],
        skipped=[*outcome.skipped, *(SkippedRule(each.rule, each.question, why) for each in left_out)],
        short_window_rules=[],
    )


def _step_time_contradictions(steps: Mapping[str, Any]) -> Iterator[str]:
    if not _known(steps):
        return
    mean, median = steps["mean_ms"], steps["median_ms"]
    if mean <= 0 or median <= 0:
        yield f"a step takes {mean:.3g} ms on average and {median:.3g} ms (median)"
    elif mean * _MEAN_TO_MEDIAN < median:
        yield f"a step takes {words.ms(mean)} on average, which is impossible with a median of {words.ms(median)}"


def _few_long_steps(
    steps: Mapping[str, Any], findings: Sequence[Finding], thresholds: Mapping[str, float]
) -> Iterator[str]:
    if not _known(steps):
        return
    mean, median, most = steps["mean_ms"], steps["median_ms"], steps["p95_ms"]
    if (
        mean > _MEAN_TO_MEDIAN * median > 0
        and most is not None
        and mean > most
        and steps["measured"] >= _MIN_STEPS_FOR_P95
    ):
        beyond = mean - median
        explained = sum(finding.costs_ms_per_step or 0.0 for finding in findings)
        if explained < _MIN_EXPLAINED_SHARE * beyond and beyond >= thresholds["tiny_cost_ms"]:
            yield (
                f"a step takes {words.ms(mean)} on average and {words.ms(median)} (median), so a few steps take most of the "
                "time, and no rule explains why"
            )


def _known(steps: Mapping[str, Any]) -> bool:
    mean, median = steps["mean_ms"], steps["median_ms"]
    return bool(steps["measured"]) and all(value is not None and isfinite(value) for value in (mean, median))


def _share_contradictions(facts: Mapping[str, Any]) -> Iterator[str]:
    for path, value in _numbers(facts, ""):
        if not isfinite(value):
            yield f"{path} is not a number"
        elif (
            path.rpartition(".")[2].endswith("share")
            and not -_SHARE_TOLERANCE <= value <= 1 + _SHARE_TOLERANCE
        ):
            yield f"{path} is {value:.3g}, but a share must be between 0 and 1"
    parts = facts["breakdown"]
    if parts and (
        any(not -_SUM_TOLERANCE <= part <= 1 + _SUM_TOLERANCE for part in parts.values())
        or abs(sum(parts.values()) - 1.0) > _SUM_TOLERANCE
    ):
        yield "the parts of a step do not add up to the step"


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, float):
        yield path, value
