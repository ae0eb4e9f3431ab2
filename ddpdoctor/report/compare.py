"""Compares two diagnoses: whether the job is faster, by how much, and which findings are resolved or new.

Jobs with different world size, batch size or device get no verdict. The confidence interval covers the scatter of steps within
each recording, not the variation between runs of the same job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddpdoctor.diagnose.diagnosis import RUNNING, Diagnosis, Finding
from ddpdoctor.measure.taxonomy import PARTS, Part
from ddpdoctor.report import words
from ddpdoctor.report.compare_settings import Change, other_changes, size_differences

COMPARISON_SCHEMA = "ddpdoctor.comparison/1"
CONFIDENCE = 0.95
BOOTSTRAP_SAMPLES = 2000
MIN_STEPS = 12
"""Minimum number of steps on each side for a bootstrap confidence interval of the median."""
SEED = 20_240_229
_MAX_NOTES = 3
"""Maximum number of notes shown of each side, as in ``analyze``."""
_WasChecked = Callable[[str], bool]
"""Returns whether the rule with an id was checked."""
_MIN_CHANGE_SHARE = 0.01
"""A finding whose cost changes by less than this share of the step counts as unchanged."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of one of the two diagnoses."""

    source: list[str]
    headline: str
    healthy: bool
    all_ranks: str
    """The name for all recorded ranks: "all ranks", "all 2 recorded"."""
    stopped: str | None
    """How a job ended that did not complete: "hung", "failed", "was killed", "was cut off", "is still running", "has no recorded
    end". None for a job that completed or was stopped by its user, and for traces."""
    running: bool
    """Whether the job was still running when it was analysed."""
    steps_measured: int
    step_source: str
    points: int
    """Number of points in the series of step times, after warm-up."""
    steps_per_point: int
    """Number of consecutive steps per point of the series; more than 1 in long runs."""
    median_ms: float | None
    """Median step time of the series: median over ranks per step, then over steps."""
    mean_ms: float | None
    p95_ms: float | None
    """Mean and p95 of the measured steps, on the critical path."""
    samples_per_s: float | None
    wall_s: float | None
    """Wall time of the whole run."""
    goodput: float | None
    """Share of the wall time that all steps would take if each took the usual time."""


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Ratio of the median step times, after / before. Below 1 is faster."""

    estimate: float
    low: float | None
    high: float | None
    """Bounds of the confidence interval (moving-block bootstrap); None with too few steps."""
    confidence: float = CONFIDENCE
    resamples: int = BOOTSTRAP_SAMPLES
    seed: int = SEED


class PartChange(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the step on the critical path; None if it was not measured."""

    part: str
    before_share: float | None
    after_share: float | None
    before_ms: float | None
    after_ms: float | None


class RunPartChange(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the wall time of the whole run."""

    part: str
    before_s: float
    after_s: float


class FindingChange(msgspec.Struct, frozen=True, kw_only=True):
    """A finding before and after."""

    rule: str
    title: str
    status: str
    """"resolved", "new", "changed" or "unchanged"; "not checked after" or "not checked before" if one side lacked data for the rule;
    "before only" or "after only" if the jobs are not comparable."""
    before_ms_per_step: float | None
    after_ms_per_step: float | None
    before_severity: str | None
    after_severity: str | None
    before_ranks: list[int] | None
    after_ranks: list[int] | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a comparison."""

    schema: str = COMPARISON_SCHEMA
    verdict: str
    judgement: str
    """"faster", "slower", "no clear difference", "not comparable" or "too few steps"."""
    before: Side
    after: Side
    ratio: Ratio | None
    differences: list[Change]
    """Differences of world size, batch size or device, which make the jobs incomparable."""
    run: list[RunPartChange]
    """The wall time of the runs by part; empty unless it is known for both."""
    breakdown: list[PartChange]
    findings: list[FindingChange]
    changes: list[Change]
    """Other differences: versions, settings, environment, command."""
    notes: list[str]

    def __repr__(self) -> str:
        return f"<Comparison: {self.verdict.removesuffix('.')}>"

    def regression_percent(self) -> float | None:
        """Increase of the median step time in per cent; 0 if it is not significant, None without a verdict."""
        if self.ratio is None or self.judgement in ("not comparable", "too few steps"):
            return None
        return max(0.0, 100 * (self.ratio.estimate - 1)) if self.judgement == "slower" else 0.0


def compare(before: Diagnosis, after: Diagnosis) -> Comparison:
    """Compare two diagnoses of the same job. The bootstrap is seeded, so the result is deterministic."""
    old, new = _step_times(before), _step_times(after)
    ratio = _ratio(old, new)
    differences, notes = size_differences(before, after)
    if before.steps.source != after.steps.source:
        notes.append(
            f"Step times come from the {before.steps.source} before and from the {after.steps.source} after, "
            "which place the boundaries between steps slightly differently."
        )
    if where := _side_with_operators(before, after):
        notes.append(
            f"Operators outside of forward, backward and optimizer were recorded only {where} (profiler window); else their time is host "
            "work. So computation and host work are compared together."
        )
    findings = _finding_changes(before, after, comparable=not differences)
    notes += _saving_sentences(before, after, findings)
    sides = _side(before, old), _side(after, new)
    notes += [
        f"The job {which} {side.stopped}: only its steps until then are compared."
        for which, side in zip(("before", "after"), sides, strict=True)
        if side.stopped
    ]
    notes += [
        f"The job {which} was restarted {'once' if count == 1 else f'{count} times'}: the steps of one attempt are compared."
        for which, side in (("before", before), ("after", after))
        if (count := words.restarts(side))
    ]
    notes += _side_notes(before, after)
    judgement = _judgement(ratio, differences)
    return Comparison(
        verdict=_verdict(judgement, ratio, sides, differences),
        judgement=judgement,
        before=sides[0],
        after=sides[1],
        ratio=ratio,
        differences=differences,
        run=_run_changes(before, after),
        breakdown=_breakdown_changes(before, after),
        findings=findings,
        changes=other_changes(before, after),
        notes=notes,
    )


def _side_notes(before: Diagnosis, after: Diagnosis) -> list[str]:
    """The notes of both diagnoses, each with its side, because data missing in a diagnosis are also missing in the comparison."""
    both = set(before.notes) & set(after.notes)
    sides = {
        "Before and after": [note for note in before.notes if note in both],
        "Before": [note for note in before.notes if note not in both],
        "After": [note for note in after.notes if note not in both],
    }
    sentences = []
    for side, notes in sides.items():
        sentences += [f"{side}: {note}" for note in notes[:_MAX_NOTES]]
        if more := len(notes[_MAX_NOTES:]):
            sentences.append(f"{side}: {words.count(more, 'more note')}, which `ddpdoctor analyze -v` shows.")
    return sentences


def _stride(diagnosis: Diagnosis) -> int:
    steps = diagnosis.series.steps
    return max(1, round(float(np.median(np.diff(steps))))) if len(steps) > 1 else 1


def _step_times(diagnosis: Diagnosis) -> NDArray[np.float64]:
    """Median step time over the ranks, in ms, [points], without the warm-up."""
    lists = diagnosis.series.step_ms
    if not lists:
        return np.empty(0)
    table = np.array([[np.nan if ms is None else ms for ms in times] for times in lists])
    table = table[:, -(-diagnosis.steps.set_aside.get("warm-up", 0) // _stride(diagnosis)) :]
    table = table[:, ~np.isnan(table).all(axis=0)]
    result: NDArray[np.float64] = np.nanmedian(table, axis=0) if table.size else np.empty(0)
    # Step times of 0 are invalid and would make the ratio infinite.
    return result[result > 0]


def _side(diagnosis: Diagnosis, times_ms: NDArray[np.float64]) -> Side:
    steps = diagnosis.steps
    return Side(
        source=diagnosis.source,
        headline=diagnosis.verdict.headline,
        healthy=diagnosis.healthy,
        all_ranks=words.all_ranks_label(diagnosis),
        stopped=words.stopped(diagnosis),
        running=diagnosis.job.end == RUNNING,
        steps_measured=steps.measured,
        step_source=steps.source,
        points=len(times_ms),
        steps_per_point=_stride(diagnosis),
        median_ms=float(np.median(times_ms)) if len(times_ms) else steps.median_ms,
        mean_ms=steps.mean_ms,
        p95_ms=steps.p95_ms,
        samples_per_s=steps.samples_per_s,
        wall_s=words.number_fact(diagnosis, "run.wall_s"),
        goodput=words.number_fact(diagnosis, "run.goodput"),
    )


def _ratio(before_ms: NDArray[np.float64], after_ms: NDArray[np.float64]) -> Ratio | None:
    if not len(before_ms) or not len(after_ms) or np.median(before_ms) <= 0:
        return None
    estimate = float(np.median(after_ms) / np.median(before_ms))
    if min(len(before_ms), len(after_ms)) < MIN_STEPS:
        return Ratio(estimate=estimate, low=None, high=None)
    random = np.random.default_rng(SEED)
    ratios = _resampled_medians(after_ms, random) / _resampled_medians(before_ms, random)
    low, high = _interval(ratios)
    return Ratio(estimate=estimate, low=low, high=high)


def _interval(samples: NDArray[np.float64]) -> tuple[float, float]:
    """Bounds of the central interval that contains the share CONFIDENCE of ``samples``."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(samples, [tail, 1 - tail])
    return float(low), float(high)


def _resampled_medians(values: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.float64]:
    """Medians of a circular moving-block bootstrap, [BOOTSTRAP_SAMPLES].

    Consecutive steps are correlated, so resampling single steps would give too narrow an interval. Blocks of n^(1/3) steps keep
    the correlation (Künsch 1989; Politis and Romano 1992).
    """
    count = len(values)
    length = max(1, round(count ** (1 / 3)))
    starts = random.integers(0, count, size=(BOOTSTRAP_SAMPLES, -(-count // length), 1))
    index = (starts + np.arange(length)).reshape(BOOTSTRAP_SAMPLES, -1)[:, :count] % count
    result: NDArray[np.float64] = np.median(values[index], axis=1)
    return result


def median_step(diagnosis: Diagnosis) -> tuple[float, tuple[float, float] | None] | None:
    """(Median step time without the warm-up in ms, its confidence interval or None with too few steps). None without step times."""
    times_ms = _step_times(diagnosis)
    if not len(times_ms):
        middle_ms = diagnosis.steps.median_ms
        return None if middle_ms is None or middle_ms <= 0 else (middle_ms, None)
    middle_ms = float(np.median(times_ms))
    if len(times_ms) < MIN_STEPS:
        return middle_ms, None
    return middle_ms, _interval(_resampled_medians(times_ms, np.random.default_rng(SEED)))


def _judgement(ratio: Ratio | None, differences: list[Change]) -> str:
    if differences:
        return "not comparable"
    if ratio is None or ratio.low is None or ratio.high is None:
        return "too few steps"
    return "faster" if ratio.high < 1 else "slower" if ratio.low > 1 else "no clear difference"


def _verdict(judgement: str, ratio: Ratio | None, sides: tuple[Side, Side], differences: list[Change]) -> str:
    before, after = (words.milliseconds(side.median_ms) for side in sides)
    if judgement == "not comparable":
        what = "; ".join(f"{d.what}: {d.before} before, {d.after} after" for d in differences)
        return f"Not comparable ({what})."
    if ratio is None or ratio.low is None or ratio.high is None:
        return f"Too few steps to decide: median step {before} before, {after} after."
    interval = f"{100 * CONFIDENCE:.0f} % interval {ratio.low:.3f} to {ratio.high:.3f}"
    times = f"the median step takes {after}, before {before} (ratio {ratio.estimate:.3f}, {interval})"
    if judgement == "faster":
        return f"Faster, {words.speedup(1 / ratio.estimate)}: {times}."
    if judgement == "slower":
        return f"Slower by {words.percent(ratio.estimate - 1)}: {times}."
    return f"No clear difference: {times}."


_COMPUTE_AND_HOST = "compute_and_host_work"


def _side_with_operators(before: Diagnosis, after: Diagnosis) -> str | None:
    """The only side on which operators outside of the phases were recorded, "before" or "after"; None if both or neither. On the
    other side their time counts as host work."""
    seen = [words.lookup(each.facts, "steps.operators_seen") is True for each in (before, after)]
    return None if seen[0] == seen[1] else "before" if seen[0] else "after"


def _breakdown_parts(diagnosis: Diagnosis, combine: bool) -> dict[str, float]:
    """The breakdown. ``combine``: with computation and host work as one part."""
    parts = dict(diagnosis.breakdown)
    if not combine or not parts:
        return parts
    whole = sum(parts.pop(part, 0.0) for part in (Part.COMPUTE, Part.HOST))
    return {_COMPUTE_AND_HOST: whole, **parts}


def _breakdown_changes(before: Diagnosis, after: Diagnosis) -> list[PartChange]:
    rows = []
    combine = _side_with_operators(before, after) is not None
    parts_by_side = [_breakdown_parts(each, combine) for each in (before, after)]
    for part in (_COMPUTE_AND_HOST, *PARTS):
        shares = [parts.get(part, 0.0) if parts else None for parts in parts_by_side]
        if not any(shares):
            continue
        ms = [
            share * d.steps.mean_ms if share is not None and d.steps.mean_ms is not None else None
            for share, d in zip(shares, (before, after), strict=True)
        ]
        rows.append(
            PartChange(
                part=part, before_share=shares[0], after_share=shares[1], before_ms=ms[0], after_ms=ms[1]
            )
        )
    return rows


def _run_changes(before: Diagnosis, after: Diagnosis) -> list[RunPartChange]:
    old, new = words.run_parts(before), words.run_parts(after)
    if not old or not new:
        return []
    return [
        RunPartChange(part=part, before_s=old.get(part, 0.0), after_s=new.get(part, 0.0))
        for part in (*words.RUN_LABELS, Part.OTHER)
        if part in old or part in new
    ]


_INCOMPARABLE_STATUS = {"resolved": "before only", "new": "after only"}


def _finding_changes(before: Diagnosis, after: Diagnosis, *, comparable: bool) -> list[FindingChange]:
    """One row per finding of either side, costliest first."""
    was_checked = _was_checked(before), _was_checked(after)
    pairs = _matched_findings(before.findings, after.findings)
    rows = [_finding_change(old, new, before, was_checked) for old, new in pairs]
    if not comparable:
        rows = [
            msgspec.structs.replace(row, status=_INCOMPARABLE_STATUS.get(row.status, row.status))
            for row in rows
        ]
    return sorted(rows, key=lambda r: -max(r.before_ms_per_step or 0.0, r.after_ms_per_step or 0.0))


def _matched_findings(
    before: Sequence[Finding], after: Sequence[Finding]
) -> list[tuple[Finding | None, Finding | None]]:
    """Pairs of findings with the same rule and, if possible, the same ranks. The partner is None without a match."""
    unmatched_by_rule: dict[str, list[Finding]] = {}
    for new in after:
        unmatched_by_rule.setdefault(new.rule, []).append(new)
    pairs: list[tuple[Finding | None, Finding | None]] = []
    for old in before:
        same_rule = unmatched_by_rule.get(old.rule, [])
        exact = next((place for place, new in enumerate(same_rule) if new.ranks == old.ranks), 0)
        pairs.append((old, same_rule.pop(exact) if same_rule else None))
    unmatched = {id(new) for findings in unmatched_by_rule.values() for new in findings}
    return [*pairs, *((None, new) for new in after if id(new) in unmatched)]


def _finding_change(
    old: Finding | None, new: Finding | None, before: Diagnosis, was_checked: tuple[_WasChecked, _WasChecked]
) -> FindingChange:
    shown = new or old
    assert shown is not None
    if new is None:
        status = "resolved" if was_checked[1](shown.rule) else "not checked after"
    elif old is None:
        status = "new" if was_checked[0](shown.rule) else "not checked before"
    else:
        status = "changed" if _cost_changed(old, new, before.steps.mean_ms or 0.0) else "unchanged"
    return FindingChange(
        rule=shown.rule,
        title=shown.title,
        status=status,
        before_ms_per_step=old.costs_ms_per_step if old else None,
        after_ms_per_step=new.costs_ms_per_step if new else None,
        before_severity=old.severity if old else None,
        after_severity=new.severity if new else None,
        before_ranks=old.ranks if old else None,
        after_ranks=new.ranks if new else None,
    )


def _was_checked(diagnosis: Diagnosis) -> _WasChecked:
    """A function that returns whether a rule was checked. If the report lists no rules, all count as checked."""
    listed = bool(diagnosis.checked or diagnosis.skipped)
    known = {finding.rule for finding in diagnosis.findings} | {rule.rule for rule in diagnosis.checked}
    return lambda rule: not listed or rule in known


def _cost_changed(old: Finding, new: Finding, step_ms: float) -> bool:
    change_ms = abs((new.costs_ms_per_step or 0.0) - (old.costs_ms_per_step or 0.0))
    has_cost_change = change_ms > _MIN_CHANGE_SHARE * step_ms and not (
        _in_range(old, new) and _in_range(new, old)
    )
    return old.severity != new.severity or old.ranks != new.ranks or has_cost_change


def _in_range(one: Finding, other: Finding) -> bool:
    """Whether the cost of ``one`` is within the cost interval of ``other``."""
    ends_ms, cost_ms = other.costs_ms_per_step_range, one.costs_ms_per_step
    return ends_ms is not None and cost_ms is not None and ends_ms[0] <= cost_ms <= ends_ms[1]


def _saving_sentences(before: Diagnosis, after: Diagnosis, rows: list[FindingChange]) -> list[str]:
    """A sentence with the estimated and the actual saving if exactly one finding with a cost is resolved; else []."""
    resolved_rules = {
        row.rule for row in rows if row.status == "resolved" and row.before_ms_per_step is not None
    }
    resolved = [f for f in before.findings if f.rule in resolved_rules and f.caused_by is None]
    old_ms, new_ms = before.steps.mean_ms, after.steps.mean_ms
    if len(resolved) != 1 or old_ms is None or new_ms is None:
        return []
    finding, saved = resolved[0], words.milliseconds(abs(old_ms - new_ms))
    cost = words.milliseconds(finding.costs_ms_per_step) + words.in_parentheses(words.cost_range(finding))
    estimate = f"{'at most ' if finding.at_most else ''}{cost}"
    return [
        f"{finding.rule} was estimated at {estimate} per step; the mean step is now {saved} {'shorter' if new_ms <= old_ms else 'longer'}."
    ]
