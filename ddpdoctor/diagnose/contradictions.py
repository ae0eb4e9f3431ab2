"""Where the measured numbers contradict each other: from those no verdict follows.

A few steps that take most of the time, for no reason that is known, contradict nothing else: they are told, and no job with such
steps is healthy, but a rank that is late in all the others is late all the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from msgspec.structs import replace

from ddpdoctor.diagnose import words
from ddpdoctor.diagnose.diagnosis import Finding, SkippedRule
from ddpdoctor.diagnose.engine import Outcome

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
        yield f"a step takes {mean:.3g} ms on average, and {median:.3g} ms at the median"
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
                f"a step takes {words.ms(mean)} on average and {words.ms(median)} at the median, so a few steps take most of the "
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
            yield f"{path} is {value:.3g}, but a share lies between 0 and 1"
    parts = facts["breakdown"]
    if parts and (
        any(not -_SUM_SLACK <= part <= 1 + _SUM_SLACK for part in parts.values())
        or abs(sum(parts.values()) - 1.0) > _SUM_SLACK
    ):
        yield "the parts of a step do not add up to it"


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, float):
        yield path, value
