"""What a report says first: the verdict; where measured numbers contradict each other, so that no verdict follows; and the bars from
the measured step time towards what it could be.

A few steps that take most of the time, for no reason that is known, contradict nothing else: they are reported, and no job with such
steps is healthy, but a rank that is late in all the others is late all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from msgspec.structs import replace

from ddpdoctor.diagnose.diagnosis import Coverage, Finding, SkippedRule, Verdict, WaterfallBar
from ddpdoctor.diagnose.engine import Outcome

from . import words

_LEAST_STEPS = 2
"""Of ranks whose collectives could not be matched."""


def verdict(
    outcome: Outcome, *, coverage: Coverage, matched: bool = True, stopped: str | None = None
) -> tuple[bool, Verdict]:
    """Return ``(healthy, verdict)``. Healthy means that measured steps were checked, that no rule warns, and that no large part of
    the step is left for which every rule lacked data.

    ``stopped``: what to say where only the job's end could be looked at, and nothing was found there.

    ``matched``: the collectives of the ranks, where there are several, could be brought together.
    """
    top = next((finding for finding in outcome.findings if finding.severity != "info"), None)
    stops = (
        top is not None and top.rule in outcome.stopping
    )  # that it stopped follows from no measured number
    if outcome.contradictions and not stops and (top is None or top.costs_ms_per_step is None):
        return False, Verdict(
            None, f"Cannot tell: the measured numbers contradict each other: {outcome.contradictions[0]}."
        )
    if top is not None:
        return False, Verdict(top.rule, outcome.headlines[top.rule])
    looked = len(outcome.checked) + len(outcome.findings)
    if coverage.steps == 0 and stopped is not None:
        return False, Verdict(None, stopped)
    if outcome.unexplained:
        return False, Verdict(None, f"Cannot tell: {outcome.unexplained[0]}.")
    if coverage.steps == 0 or looked == 0:
        return False, Verdict(
            None, "Cannot tell: no training steps were measured, so there was nothing to check."
        )
    if not matched and coverage.ranks > 1 and coverage.steps < _LEAST_STEPS:
        return False, Verdict(
            None,
            f"Cannot tell: the collectives of {coverage.ranks} ranks could not be matched, and fewer than two whole steps were "
            "recorded on all ranks.",
        )
    share = outcome.thresholds["warning_share"]
    seen = f"{words.count(coverage.steps, 'step')} of {words.count(coverage.ranks, 'rank')}"
    if outcome.skipped:
        seen += f"; {len(outcome.skipped)} checks lacked data"
    if outcome.too_few:
        return True, Verdict(
            None,
            f"No lasting problem was found ({seen}), but this happened once: {outcome.headlines[outcome.too_few[0]]}",
        )
    told = next(
        (f for f in outcome.findings if (f.share or 0.0) >= share or f.rule in outcome.informing), None
    )
    if told is not None:
        # What is told without a warning may take much of the step all the same: a machine shared with others.
        return True, Verdict(None, f"No warnings ({seen}), but note: {outcome.headlines[told.rule]}")
    return True, Verdict(
        None, f"Healthy: {looked} checks found nothing that costs {share * 100:g} % of a step ({seen})."
    )


def waterfall(mean_ms: float | None, outcome: Outcome) -> list[WaterfallBar]:
    """Measured step time, what each finding costs, and what would be left. Savings overlap, so later ones are
    cut at what is left."""
    if mean_ms is None:
        return []
    bars, left = [WaterfallBar("measured step", mean_ms)], mean_ms
    for finding in outcome.findings:
        saved = min(finding.costs_ms_per_step or 0.0, left * 0.999)
        if finding.caused_by is None and saved > 0:
            ends_ms = None if finding.at_most else finding.costs_ms_per_step_range
            bars.append(WaterfallBar(finding.title, -saved, finding.rule, ends_ms))
            left -= saved
    bars.append(WaterfallBar("without these, at best", left))
    return bars


_SLACK = 0.05
"""By which a share may miss 0 and 1: of clocks that are read one after the other."""
_SUM_SLACK = 0.02
_FAR = 2.0
"""A mean that far from the median needs a reason."""
_EXPLAINED = 0.5
"""Of what the mean is beyond the median, by findings."""
_FEWEST_STEPS = 20
"""Of fewer a 95th percentile says nothing that the longest step does not."""


def contradictions(
    facts: Mapping[str, Any], findings: Sequence[Finding], thresholds: Mapping[str, float]
) -> list[str]:
    """What cannot be, in parts of sentences, the clearest first; empty where the numbers agree. ``facts`` as
    :func:`ddpdoctor.diagnose.facts_view.tree` gives them."""
    return [
        *_of_step_times(facts["steps"]),
        *_few_long_steps(facts["steps"], findings, thresholds),
        *_of_shares(facts),
    ]


def without_contradictions(outcome: Outcome, facts: Mapping[str, Any]) -> Outcome:
    """``outcome``, where the numbers contradict each other with what they say, and less the findings that have their price from
    them: their rules could not look. A few long steps that nothing explains are told beside the findings."""
    found = contradictions(facts, outcome.findings, outcome.thresholds)
    if not found:
        return outcome
    if found == list(_few_long_steps(facts["steps"], outcome.findings, outcome.thresholds)):
        told = [f"{each[0].upper()}{each[1:]}." for each in found]
        return replace(
            outcome,
            errors=[*told, *outcome.errors],
            too_few=[],
            contradictions=[*found, *outcome.contradictions],
        )
    priced = [finding for finding in outcome.findings if finding.costs_ms_per_step is not None]
    why = f"the measured numbers contradict each other: {found[0]}"
    return replace(
        outcome,
        findings=[finding for finding in outcome.findings if finding.costs_ms_per_step is None],
        skipped=[*outcome.skipped, *(SkippedRule(each.rule, each.title, why) for each in priced)],
        errors=[*(f"The measured numbers contradict each other: {each}." for each in found), *outcome.errors],
        too_few=[],
        contradictions=[*found, *outcome.contradictions],
    )


def _of_step_times(steps: Mapping[str, Any]) -> Iterator[str]:
    if not _known(steps):
        return
    mean, median = steps["mean_ms"], steps["median_ms"]
    if mean <= 0 or median <= 0:
        yield f"a step takes {mean:.3g} ms on average and {median:.3g} ms (median)"
    elif mean * _FAR < median:
        yield f"a step takes {words.ms(mean)} on average, which is impossible with a median of {words.ms(median)}"


def _few_long_steps(
    steps: Mapping[str, Any], findings: Sequence[Finding], thresholds: Mapping[str, float]
) -> Iterator[str]:
    if not _known(steps):
        return
    mean, median, most = steps["mean_ms"], steps["median_ms"], steps["p95_ms"]
    if mean > _FAR * median > 0 and most is not None and mean > most and steps["measured"] >= _FEWEST_STEPS:
        beyond = mean - median
        explained = sum(finding.costs_ms_per_step or 0.0 for finding in findings)
        if explained < _EXPLAINED * beyond and beyond >= thresholds["tiny_cost_ms"]:
            yield (
                f"a step takes {words.ms(mean)} on average and {words.ms(median)} (median), so a few steps take most of the "
                "time, and no rule explains why"
            )


def _known(steps: Mapping[str, Any]) -> bool:
    mean, median = steps["mean_ms"], steps["median_ms"]
    return bool(steps["measured"]) and all(value is not None and isfinite(value) for value in (mean, median))


def _of_shares(facts: Mapping[str, Any]) -> Iterator[str]:
    for path, value in _numbers(facts, ""):
        if not isfinite(value):
            yield f"{path} is not a number"
        elif path.rpartition(".")[2].endswith("share") and not -_SLACK <= value <= 1 + _SLACK:
            yield f"{path} is {value:.3g}, but a share must be between 0 and 1"
    parts = facts["breakdown"]
    if parts and (
        any(not -_SUM_SLACK <= part <= 1 + _SUM_SLACK for part in parts.values())
        or abs(sum(parts.values()) - 1.0) > _SUM_SLACK
    ):
        yield "the parts of a step do not add up to the step"


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, float):
        yield path, value
