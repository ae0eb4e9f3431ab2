"""Orders findings and relates effects to causes, checks that the measured numbers are consistent, and makes the first sentence of a report
and the bars of the waterfall chart.

If numbers are inconsistent, findings with a cost are withheld. One inconsistency is an exception: a few long steps that no
rule explains. They are reported and make the job unhealthy, but do not affect findings on the other steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from ddpdoctor.diagnose import facts_view
from ddpdoctor.diagnose.conditions import evaluate
from ddpdoctor.diagnose.diagnosis import Coverage, Finding, SkippedRule, Verdict, WaterfallBar
from ddpdoctor.diagnose.rule import Effect, Rule

from . import rule_texts

if TYPE_CHECKING:
    from ddpdoctor.diagnose.engine import Outcome


ANY = "*"
"""As an effect's rule: any finding that has a cost. An info finding explains only info findings."""

BOUND_DISCOUNT = 4.0
"""A bound precedes a measured cost if it is more than this multiple of it."""

MOST_STEPS = 0.5
"""Share of the steps from which a cost is one of most steps, not of some."""


def is_from_short_window(cost: Mapping[str, Any] | None) -> bool:
    """Whether a cost is based on single outlier steps of a short window."""
    return bool(cost and cost["stands_out_in"])


class RuleHit(msgspec.Struct, frozen=True):
    """A finding with its rule and its cost."""

    finding: Finding
    rule: Rule
    cost: dict[str, Any] | None
    thresholds: Mapping[str, float]
    """By name: those of the rule and the common ones."""
    informs: bool = False
    """Whether the rule's ``informs_when`` holds."""

    @property
    def from_short_window(self) -> bool:
        return is_from_short_window(self.cost)

    @property
    def is_in_ordinary_steps(self) -> bool:
        """Whether the finding has a cost per step that is not that of single or periodic steps, or of a change during the run."""
        return self.finding.costs_ms_per_step is not None and self.rule.event is None

    @property
    def severity_capped(self) -> bool:
        """Whether the severity has an upper bound regardless of the cost."""
        return self.rule.severity_most is not None or self.informs or self.from_short_window

    @property
    def capped_to_info(self) -> bool:
        """Whether that upper bound, not the cost, may be why the severity is info."""
        return self.finding.severity == "info" and self.severity_capped


def order_findings(
    hits: list[RuleHit], context: Mapping[str, Any], thresholds: Mapping[str, float], errors: list[str]
) -> list[Finding]:
    """Return causes by cost, then effects by cost with ``caused_by``. Invalid conditions are added to ``errors``."""
    weights = _weights(hits, context, thresholds)
    by_cost = sorted(hits, key=lambda hit: (weights[hit.rule.id], not hit.severity_capped), reverse=True)
    causes: dict[str, str] = {}
    # Rules that any finding can explain come last, because they get the root cause.
    for entry in sorted(by_cost, key=lambda hit: any(effect.rule == ANY for effect in hit.rule.effects)):
        for other in by_cost:
            if other is not entry and not _is_effect_of(other.rule.id, entry.rule.id, causes):
                try:
                    explained = any(_explains(effect, other, entry, context) for effect in entry.rule.effects)
                except Exception as error:  # if its condition is invalid, the finding has no cause
                    errors.append(f"{entry.rule.id}: effect_of: {' '.join(str(error).split())[:300]}")
                    break
                if explained:
                    anything = any(effect.rule == ANY for effect in entry.rule.effects)
                    causes[entry.rule.id] = _root(other.rule.id, causes) if anything else other.rule.id
                    break
    capped = {entry.rule.id for entry in hits if entry.capped_to_info}
    findings = []
    for entry in by_cost:
        cause = causes.get(entry.rule.id)
        # Effects, direct and indirect, of a finding that is capped to info are info too.
        is_capped = any(_is_effect_of(entry.rule.id, rule, causes) for rule in capped)
        severity = "info" if is_capped else entry.finding.severity
        findings.append(msgspec.structs.replace(entry.finding, caused_by=cause, severity=severity))
    return [f for f in findings if f.caused_by is None] + [f for f in findings if f.caused_by is not None]


def _weights(
    hits: Sequence[RuleHit], context: Mapping[str, Any], thresholds: Mapping[str, float]
) -> dict[str, float]:
    """Rule id → sort key of its finding: its loss. A finding with a capped severity ranks below all findings of higher severities."""
    floor = {"critical": thresholds["critical_share"], "warning": thresholds["warning_share"]}

    def own(hit: RuleHit) -> float:
        if hit.rule.stops:
            return inf
        # A finding without a cost ranks like the smallest cost of its severity.
        least = floor.get(hit.finding.severity, 0.0) if hit.rule.severity else 0.0
        return max(_loss(hit.finding, context["run"], thresholds) / _discount(hit.finding), least)

    weights = {hit.rule.id: own(hit) for hit in hits}
    for severity, above in (("warning", ("critical",)), ("info", ("warning", "critical"))):
        severer = [own(hit) for hit in hits if hit.finding.severity in above]
        most = min([floor[above[0]], *severer])
        for hit in hits:
            if hit.severity_capped and hit.finding.severity == severity:
                weights[hit.rule.id] = min(weights[hit.rule.id], most)
    return weights


def _discount(finding: Finding) -> float:
    """Divisor of a finding's loss in the sort order: larger for an upper bound or an estimate, and for a cost that may be zero."""
    is_bound = finding.at_most or finding.estimated
    return BOUND_DISCOUNT**is_bound * BOUND_DISCOUNT ** includes_zero(finding)


def includes_zero(finding: Finding) -> bool:
    """Whether the interval of a cost in most steps includes 0. The interval of a rare cost reflects how often it occurs; that it did occur
    was recorded."""
    ends_ms = finding.costs_ms_per_step_range
    seen, hit = finding.coverage.steps, finding.coverage.steps_hit
    in_most = finding.persistence in (None, "always") or (hit is not None and hit >= MOST_STEPS * seen)
    return ends_ms is not None and ends_ms[0] <= 0.0 and in_most


def _loss(finding: Finding, run: Mapping[str, Any], thresholds: Mapping[str, float]) -> float:
    """Share used as sort key: of the step, or of the run for losses outside of ordinary steps. For a one-time loss in a short run it is 0,
    because it does not apply to longer runs."""
    if finding.costs_ms_per_step is not None or not finding.happens_once:
        return finding.share or finding.share_of_run or 0.0
    is_long = run["wall_s"] is not None and run["wall_s"] >= thresholds["short_run_s"]
    return (finding.share_of_run or 0.0) if is_long else 0.0


def _explains(effect: Effect, cause: RuleHit, entry: RuleHit, context: Mapping[str, Any]) -> bool:
    if effect.rule == ANY:
        is_weaker = cause.finding.severity == "info" and entry.finding.severity != "info"
        if is_weaker or cause.finding.costs_ms_per_step is None:
            return False
    elif effect.rule != cause.rule.id:
        return False
    elif cause.capped_to_info and cause.from_short_window and entry.finding.severity != "info":
        # Outlier steps of a short window do not explain a cost in all its steps.
        return False
    elif includes_zero(cause.finding) and _is_surely_costlier(entry.finding, cause.finding):
        return False
    if effect.when is None:
        return True
    names = dict(context) | {"cost": facts_view.as_cel(entry.cost), "cause": facts_view.as_cel(cause.cost)}
    names["t"] = facts_view.as_cel(entry.thresholds)
    return evaluate(effect.when, names) is True


def _is_surely_costlier(finding: Finding, other: Finding) -> bool:
    """Whether the whole interval of a cost is above the other's cost per step."""
    ends_ms, other_ms = finding.costs_ms_per_step_range, other.costs_ms_per_step
    return ends_ms is not None and other_ms is not None and ends_ms[0] > other_ms


def _root(rule_id: str, causes: Mapping[str, str]) -> str:
    """Return the root cause of ``rule_id``, or itself if it has no cause."""
    while rule_id in causes:
        rule_id = causes[rule_id]
    return rule_id


def _is_effect_of(rule_id: str, other_id: str, causes: Mapping[str, str]) -> bool:
    """Whether ``rule_id`` is a direct or indirect effect of ``other_id``."""
    seen: str | None = rule_id
    while seen is not None:
        seen = causes.get(seen)
        if seen == other_id:
            return True
    return False


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
    # The fact that a job stopped does not depend on measured numbers.
    stops = top is not None and top.rule in outcome.stopping
    if outcome.contradictions and not stops and (top is None or top.costs_ms_per_step is None):
        why = f"Cannot tell: the measured numbers contradict each other: {outcome.contradictions[0]}."
        return False, Verdict(None, why)
    if top is not None:
        return False, Verdict(top.rule, outcome.headlines[top.rule])
    unknown = _why_unknown(outcome, coverage, matched, stopped)
    return unknown is None, Verdict(None, unknown or _healthy(outcome, coverage, marked))


def _why_unknown(outcome: Outcome, coverage: Coverage, matched: bool, stopped: str | None) -> str | None:
    """The headline of a job without warnings if too little was measured to call it healthy; else None."""
    if coverage.steps == 0 and stopped is not None:
        return stopped
    if outcome.unexplained:
        return f"Cannot tell: {outcome.unexplained[0]}."
    if coverage.steps == 0 or not (outcome.checked or outcome.findings):
        return "Cannot tell: no training steps were measured, so there was nothing to check."
    if not matched and coverage.ranks > 1:
        return (
            f"Cannot tell: the collectives of {coverage.ranks} ranks could not be matched, so late ranks cannot be found. Record the same "
            "steps on all ranks."
        )
    return None


def _healthy(outcome: Outcome, coverage: Coverage, marked: bool) -> str:
    """The headline of a job without warnings if enough was measured."""
    share = outcome.thresholds["warning_share"]
    steps = f"{rule_texts.count(coverage.steps, 'step') if marked else 'one recording'} of {rule_texts.count(coverage.ranks, 'rank')}"
    evaluated = len(outcome.checked) + len(outcome.findings)
    lacking = sum(rule.applies for rule in outcome.skipped)
    seen = f"{steps}; {rule_texts.count(lacking, 'check')} lacked data" if lacking else steps
    if outcome.short_window_rules:
        once = outcome.headlines[outcome.short_window_rules[0]]
        return f"No lasting problem was found ({seen}), but this happened once: {once}"
    for finding in outcome.findings:
        # A finding below a warning can still cost much of the step, for example on a machine shared with other users.
        if (finding.share or 0.0) >= share or finding.rule in outcome.capped_rules:
            return f"No warnings ({seen}), but note: {outcome.headlines[finding.rule]}"
    if lacking > evaluated:
        severe = "severe " if outcome.findings else ""
        return f"No {severe}problem found, but only {evaluated} of {evaluated + lacking} checks had data ({steps})."
    found = f"{rule_texts.count(len(outcome.checked), 'check')} found nothing{f', {lacking} lacked data' if lacking else ''}"
    return f"Healthy: no cause was found that takes {share * 100:g} % of a step ({steps}; {found})."


def _headline_of(warnings: Sequence[Finding]) -> Finding | None:
    """The first finding; if its cost may be zero, the first cause with a measured, non-zero cost, if there is one."""
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
    """Bars for the measured step time, the cost of each finding, and the remaining time. Costs overlap, so each is limited to the
    remaining time."""
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
    """``outcome`` with the inconsistencies of the numbers as errors and without findings that have a cost; their rules become
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
    """``outcome`` without these findings and their effects; their rules become skipped with the reason ``why``."""
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
        yield f"a step takes {rule_texts.ms(mean)} on average, which is impossible with a median of {rule_texts.ms(median)}"


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
                f"a step takes {rule_texts.ms(mean)} on average and {rule_texts.ms(median)} (median), so a few steps take most of the "
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
