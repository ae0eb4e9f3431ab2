"""Two diagnoses side by side: is the job faster now, by how much, and which findings came and went.

Nothing here judges what cannot be judged: jobs of another size, or on other devices, are shown, not ranked.
The interval tells how well the two recordings know their own medians; it knows nothing of how much the same
job varies from one start to the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddpdoctor.diagnose.diagnosis import RUNNING, Diagnosis, Finding
from ddpdoctor.measure.taxonomy import PARTS
from ddpdoctor.report import words
from ddpdoctor.report.compare_settings import Change, other_changes, sizes

COMPARISON_SCHEMA = "ddpdoctor.comparison/1"
CONFIDENCE = 0.95
RESAMPLES = 2000
FEWEST_POINTS = 12
"""Below this many steps on either side a bootstrap of a median says little, and no interval is given."""
SEED = 20_240_229
_MOST_NOTES = 3
"""Of each side, as many as the analysis shows."""
_Looked = Callable[[str], bool]
"""Whether a rule could look."""
_MOVED_SHARE = 0.01
"""A finding whose cost moved by less than this share of the step has not changed."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two diagnoses, in short."""

    source: list[str]
    headline: str
    healthy: bool
    everybody: str
    """What all recorded ranks are called."""
    stopped: str | None
    """What became of a job that did not end well, in words: hung, failed, was cut off, is still running, has no recorded end; null of
    one that ended, or was asked to, and of traces."""
    running: bool
    """Whether it ran when it was analysed."""
    steps_measured: int
    step_source: str
    points: int
    """Step times in the series, after warm-up."""
    steps_per_point: int
    """1, or how many neighbouring steps are one point of a long run's series."""
    median_ms: float | None
    """Median of the series: over the ranks of each step, then over the steps."""
    mean_ms: float | None
    p95_ms: float | None
    """Mean and p95 of the measured steps, on the critical path."""
    samples_per_s: float | None


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Median step time after / before: below 1 is faster."""

    estimate: float
    low: float | None
    high: float | None
    """Bounds of the confidence interval (moving-block bootstrap); None with too few steps."""
    confidence: float = CONFIDENCE
    resamples: int = RESAMPLES
    seed: int = SEED


class PartChange(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the step on the critical path; None where it was not measured."""

    part: str
    before_share: float | None
    after_share: float | None
    before_ms: float | None
    after_ms: float | None


class FindingChange(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a finding."""

    rule: str
    title: str
    status: str
    """resolved, new, changed, unchanged; "not checked after" or "not checked before" where one side could not
    look; "before only" and "after only" where the two are not comparable, so that nothing was resolved.
    """
    before_ms_per_step: float | None
    after_ms_per_step: float | None
    before_severity: str | None
    after_severity: str | None
    before_ranks: list[int] | None
    after_ranks: list[int] | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a comparison shows."""

    schema: str = COMPARISON_SCHEMA
    verdict: str
    judgement: str
    """faster, slower, no clear difference, not comparable, or too few steps."""
    before: Side
    after: Side
    ratio: Ratio | None
    differences: list[Change]
    """What forbids a judgement: world size, batch size or device differ."""
    breakdown: list[PartChange]
    findings: list[FindingChange]
    changes: list[Change]
    """What else differs: versions, settings, environment, command."""
    notes: list[str]

    def __repr__(self) -> str:
        return f"<Comparison: {self.verdict.removesuffix('.')}>"

    def regression_percent(self) -> float | None:
        """By how many per cent the median step got longer, 0 where the difference may be chance; None where
        the two cannot be judged.
        """
        if self.ratio is None or self.judgement in ("not comparable", "too few steps"):
            return None
        return max(0.0, 100 * (self.ratio.estimate - 1)) if self.judgement == "slower" else 0.0


def compare(before: Diagnosis, after: Diagnosis) -> Comparison:
    """Compare two diagnoses of the same job. Deterministic: the bootstrap is seeded."""
    old, new = _step_times(before), _step_times(after)
    ratio = _ratio(old, new)
    differences, notes = sizes(before, after)
    if before.steps.source != after.steps.source:
        notes.append(
            f"Step times come from the {before.steps.source} before and from the {after.steps.source} after; "
            "the two do not cut steps at exactly the same points."
        )
    findings = _findings(before, after, comparable=not differences)
    notes += _predicted_and_actual(before, after, findings)
    sides = _side(before, old), _side(after, new)
    notes += [
        f"The job {which} {side.stopped}: its steps until then are compared."
        for which, side in zip(("before", "after"), sides, strict=True)
        if side.stopped
    ]
    notes += _notes_of(before, after)
    judgement = _judgement(ratio, differences)
    return Comparison(
        verdict=_verdict(judgement, ratio, sides, differences),
        judgement=judgement,
        before=sides[0],
        after=sides[1],
        ratio=ratio,
        differences=differences,
        breakdown=_breakdown(before, after),
        findings=findings,
        changes=other_changes(before, after),
        notes=notes,
    )


def _notes_of(before: Diagnosis, after: Diagnosis) -> list[str]:
    """The notes of both diagnoses, marked by where they are from: what could not be read of a job is missing in its comparison, too."""
    both = set(before.notes) & set(after.notes)
    sides = {
        "Before and after": [note for note in before.notes if note in both],
        "Before": [note for note in before.notes if note not in both],
        "After": [note for note in after.notes if note not in both],
    }
    told = []
    for side, notes in sides.items():
        told += [f"{side}: {note}" for note in notes[:_MOST_NOTES]]
        if more := len(notes[_MOST_NOTES:]):
            told.append(f"{side}: {words.count(more, 'more note')}, which `ddpdoctor analyze -v` shows.")
    return told


def _stride(diagnosis: Diagnosis) -> int:
    steps = diagnosis.series.steps
    return max(1, round(float(np.median(np.diff(steps))))) if len(steps) > 1 else 1


def _step_times(diagnosis: Diagnosis) -> NDArray[np.float64]:
    """[points] ms: each step's median over the ranks, without the steps set aside as warm-up."""
    lists = diagnosis.series.step_ms
    if not lists:
        return np.empty(0)
    table = np.array([[np.nan if ms is None else ms for ms in times] for times in lists])
    table = table[:, -(-diagnosis.steps.set_aside.get("warm-up", 0) // _stride(diagnosis)) :]
    table = table[:, ~np.isnan(table).all(axis=0)]
    result: NDArray[np.float64] = np.nanmedian(table, axis=0) if table.size else np.empty(0)
    # No step takes no time: of what says so, nothing can be a ratio.
    return result[result > 0]


def _side(diagnosis: Diagnosis, times_ms: NDArray[np.float64]) -> Side:
    steps = diagnosis.steps
    return Side(
        source=diagnosis.source,
        headline=diagnosis.verdict.headline,
        healthy=diagnosis.healthy,
        everybody=words.all_ranks_label(diagnosis),
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
    )


def _ratio(before_ms: NDArray[np.float64], after_ms: NDArray[np.float64]) -> Ratio | None:
    if not len(before_ms) or not len(after_ms) or np.median(before_ms) <= 0:
        return None
    estimate = float(np.median(after_ms) / np.median(before_ms))
    if min(len(before_ms), len(after_ms)) < FEWEST_POINTS:
        return Ratio(estimate=estimate, low=None, high=None)
    random = np.random.default_rng(SEED)
    ratios = _resampled_medians(after_ms, random) / _resampled_medians(before_ms, random)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return Ratio(estimate=estimate, low=float(low), high=float(high))


def _resampled_medians(values: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.float64]:
    """[RESAMPLES] medians of circular moving blocks.

    Neighbouring steps resemble each other, and drawing them one by one would give too narrow an interval;
    blocks of n^(1/3) keep that (Künsch 1989; Politis and Romano 1992).
    """
    count = len(values)
    length = max(1, round(count ** (1 / 3)))
    starts = random.integers(0, count, size=(RESAMPLES, -(-count // length), 1))
    index = (starts + np.arange(length)).reshape(RESAMPLES, -1)[:, :count] % count
    result: NDArray[np.float64] = np.median(values[index], axis=1)
    return result


def median_step(diagnosis: Diagnosis) -> tuple[float, tuple[float, float] | None] | None:
    """(Median step, in ms, over all but the warm-up; its confidence interval, None with too few steps)."""
    times_ms = _step_times(diagnosis)
    if not len(times_ms):
        middle_ms = diagnosis.steps.median_ms
        return None if middle_ms is None or middle_ms <= 0 else (middle_ms, None)
    middle_ms = float(np.median(times_ms))
    if len(times_ms) < FEWEST_POINTS:
        return middle_ms, None
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(_resampled_medians(times_ms, np.random.default_rng(SEED)), [tail, 1 - tail])
    return middle_ms, (float(low), float(high))


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
        return f"Not comparable ({what}). Both are shown without a verdict."
    if ratio is None or ratio.low is None or ratio.high is None:
        return f"Too few steps to decide: median step {before} before, {after} after."
    interval = f"{100 * CONFIDENCE:.0f} % interval {ratio.low:.3f} to {ratio.high:.3f}"
    times = f"the median step takes {after}, before {before} (ratio {ratio.estimate:.3f}, {interval})"
    if judgement == "faster":
        return f"Faster, {words.speedup(1 / ratio.estimate)}: {times}."
    if judgement == "slower":
        return f"Slower by {words.percent(ratio.estimate - 1)}: {times}."
    return f"No clear difference: {times}."


def _breakdown(before: Diagnosis, after: Diagnosis) -> list[PartChange]:
    rows = []
    for part in PARTS:
        shares = [d.breakdown.get(part, 0.0) if d.breakdown else None for d in (before, after)]
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


_ONE_SIDED = {"resolved": "before only", "new": "after only"}


def _findings(before: Diagnosis, after: Diagnosis, *, comparable: bool) -> list[FindingChange]:
    """One row for each finding of either side, costliest first."""
    pairs: list[tuple[Finding | None, Finding | None]] = []
    waiting: dict[object, deque[int]] = {}
    for place, new in enumerate(after.findings):
        for key in (new.rule, _finding_key(new)):
            waiting.setdefault(key, deque()).append(place)
    taken: set[int] = set()
    for old in before.findings:
        same = _pop_match(waiting, _finding_key(old), taken)
        same = _pop_match(waiting, old.rule, taken) if same is None else same
        pairs.append((old, None if same is None else after.findings[same]))
    pairs += [(None, new) for place, new in enumerate(after.findings) if place not in taken]
    looked = _was_checked(before), _was_checked(after)
    rows = [_finding(old, new, before, looked) for old, new in pairs]
    if not comparable:
        rows = [msgspec.structs.replace(row, status=_ONE_SIDED.get(row.status, row.status)) for row in rows]
    return sorted(rows, key=lambda r: -max(r.before_ms_per_step or 0.0, r.after_ms_per_step or 0.0))


def _finding_key(finding: Finding) -> tuple[str, tuple[int, ...] | None]:
    return finding.rule, None if finding.ranks is None else tuple(finding.ranks)


def _pop_match(waiting: Mapping[object, deque[int]], key: object, taken: set[int]) -> int | None:
    """The first place that waits under ``key`` and is not ``taken``, and then is; None where none does."""
    places = waiting.get(key, deque())
    while places:
        place = places.popleft()
        if place not in taken:
            taken.add(place)
            return place
    return None


def _finding(
    old: Finding | None, new: Finding | None, before: Diagnosis, looked: tuple[_Looked, _Looked]
) -> FindingChange:
    shown = new or old
    assert shown is not None
    if new is None:
        status = "resolved" if looked[1](shown.rule) else "not checked after"
    elif old is None:
        status = "new" if looked[0](shown.rule) else "not checked before"
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


def _was_checked(diagnosis: Diagnosis) -> _Looked:
    """Which rules could look. A report that does not list its rules is taken to have looked."""
    listed = bool(diagnosis.checked or diagnosis.skipped)
    known = {finding.rule for finding in diagnosis.findings} | {rule.rule for rule in diagnosis.checked}
    return lambda rule: not listed or rule in known


def _cost_changed(old: Finding, new: Finding, step_ms: float) -> bool:
    moved_ms = abs((new.costs_ms_per_step or 0.0) - (old.costs_ms_per_step or 0.0))
    dearer = moved_ms > _MOVED_SHARE * step_ms and not (_in_range(old, new) and _in_range(new, old))
    return old.severity != new.severity or old.ranks != new.ranks or dearer


def _in_range(one: Finding, other: Finding) -> bool:
    """Whether the price of one lies in the range of the other's."""
    ends_ms, cost_ms = other.costs_ms_per_step_range, one.costs_ms_per_step
    return ends_ms is not None and cost_ms is not None and ends_ms[0] <= cost_ms <= ends_ms[1]


def _predicted_and_actual(before: Diagnosis, after: Diagnosis, rows: list[FindingChange]) -> list[str]:
    """What mending the one priced finding that is gone was to save, and what it did; [] where several are gone."""
    gone = {row.rule for row in rows if row.status == "resolved" and row.before_ms_per_step is not None}
    mended = [f for f in before.findings if f.rule in gone and f.caused_by is None]
    old_ms, new_ms = before.steps.mean_ms, after.steps.mean_ms
    if len(mended) != 1 or old_ms is None or new_ms is None:
        return []
    finding, saved = mended[0], words.milliseconds(abs(old_ms - new_ms))
    cost = words.milliseconds(finding.costs_ms_per_step) + words.in_parentheses(words.cost_range(finding))
    told = f"{'at most ' if finding.at_most else ''}{cost}"
    return [
        f"{finding.rule} was estimated at {told} per step; the mean step is now {saved} {'shorter' if new_ms <= old_ms else 'longer'}."
    ]
