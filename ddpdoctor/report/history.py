"""History of many runs of a job: step times, verdicts, and level shifts of the step time.

Runs with the same script, number of ranks, batch size and device are one job. Step times vary more between runs than within a run,
so the runs' medians are compared. Change points are found as in E-divisive (Matteson and James, "A Nonparametric Approach for
Multiple Change Point Analysis of Multivariate Data", JASA 2014), with the difference of mean log step times as distance: the split
with the largest difference is a change point if a permutation test gives p <= 0.05. Both parts are then split in the same way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import PurePath

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddpdoctor.diagnose.diagnosis import RUNNING, Diagnosis
from ddpdoctor.measure.numerics import best_split
from ddpdoctor.report import words
from ddpdoctor.report.compare import median_step
from ddpdoctor.report.compare_settings import batch_size

HISTORY_SCHEMA = "ddpdoctor.history/1"
COMMITS = ("GITHUB_SHA", "CI_COMMIT_SHA", "GIT_COMMIT", "BUILDKITE_COMMIT", "CIRCLE_SHA1", "BITBUCKET_COMMIT")
"""Environment variables in which build systems store the commit. The first that is set is used."""
ALPHA = 0.05
"""Level of the permutation test for a change."""
MIN_RUNS = 4
"""Minimum number of runs on each side of a change. With fewer than eight runs the permutation test cannot reach p = 0.05."""
MIN_CHANGE = 0.01
"""Smaller changes, as a share of the step, are not reported."""
PERMUTATIONS = 2000
SEED = 20_240_229
_SCRIPTS = (".py", ".ipynb")

_MAX_CLOCK_ERROR_NS = 3600 * 10**9
"""A start time further in the future than this indicates a wrong clock."""
_MAX_NOTES = 3
"""Maximum number of notes shown of a run that could not be read completely."""

_Job = tuple[str, str, str, str]
"""Script, number of ranks, batch size and device, which identify a job; "" if unknown."""
_SortKey = tuple[bool, float]
"""Sort key of runs by time: (whether the start is plausible, start in epoch ns). Runs without a plausible start come first."""
_NEWEST: _SortKey = True, math.inf
"""Sort key of a run that may be newer than all others."""


class Unread(msgspec.Struct, frozen=True):
    """A file or folder that may be a run but cannot be read or contains no steps."""

    source: str
    command: Sequence[str]
    """[] if unknown."""
    started_ns: int | None
    """Epoch ns; modification time if the start is unknown. None: it may be the newest run."""
    why: str
    """Why it cannot be compared: a sentence with its path, without a final full stop."""


class _AmbiguousRun(msgspec.Struct, frozen=True):
    """A run whose job is ambiguous or unknown."""

    name: _Job
    order: _SortKey
    why: str


class HistoryRun(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a run."""

    source: str
    started: str | None
    """UTC, ISO 8601."""
    commit: str | None
    """From the build system's environment variables."""
    median_ms: float | None
    interval_ms: tuple[float, float] | None
    """95 % confidence interval of the median; None with too few steps."""
    wall_s: float | None
    """Wall time of the whole run, in seconds."""
    goodput: float | None
    """Share of the wall time that all steps would take if each took the usual time."""
    restarts: int
    """Number of attempts that failed and were followed by another one."""
    healthy: bool
    headline: str
    rule: str | None
    costs_ms_per_step: float | None
    stopped: str | None
    """How a job ended that did not complete: "hung", "failed", "was killed", "was cut off", "is still running", "has no recorded
    end". None for a job that completed or was stopped by its user, and for traces."""
    running: bool
    """Whether the job was still running when it was analysed."""


class _JobRun(msgspec.Struct, frozen=True):
    """A run with its job."""

    name: _Job
    order: _SortKey
    run: HistoryRun
    identifies_job: bool
    """Whether the run identifies its job: it has a step time, and its documents and step logs were read, or traces have a start time."""


class LevelShift(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the step time between two consecutive runs."""

    first: int
    """Index of the first run after the change."""
    source: str
    commit: str | None
    before_ms: float
    after_ms: float
    """Median over the runs since the previous change, and over those until the next one."""
    ratio: float
    chance: float
    """p-value of the permutation test."""


class JobHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of one job, oldest first."""

    job: str
    runs: list[HistoryRun]
    changes: list[LevelShift]
    newest_percent: float | None
    """Change of the newest run's step time relative to the median of the runs it is compared with, in per cent (positive:
    longer). None without such runs, or if the newest run has no step time or is still running."""
    slower: bool
    """Whether the newest run is slower than each of them, with confidence intervals that do not overlap."""

    newer: str | None
    """Why a run that may be newer and of this job cannot be compared, with its path; None if there is no such run."""

    @property
    def why_undecided(self) -> str | None:
        """Why it is unknown whether the newest run is slower; None if it is known, or if no earlier run has a step time."""
        newest = self.runs[-1]
        if self.newer is not None and any(run.median_ms for run in self.runs):
            return f"a run that may be newer and of this job cannot be compared: {self.newer}"
        if not any(run.median_ms for run in self.runs[:-1]):
            return None
        why = newest.stopped or (None if newest.median_ms else "has no step time")
        return None if why is None else f"the newest run, {newest.source}, {why}"


class History(msgspec.Struct, frozen=True, kw_only=True):
    """The history of all jobs."""

    schema: str = HISTORY_SCHEMA
    jobs: list[JobHistory]
    notes: list[str]

    def regression_percent(self) -> float | None:
        """The largest slowdown of a job's newest run in per cent; 0 if none is slower, None if no job has runs to compare."""
        known = [job for job in self.jobs if job.newest_percent is not None]
        if not known:
            return None
        return max((job.newest_percent or 0.0 for job in known if job.slower), default=0.0)


def history(
    recorded: Sequence[tuple[str, Diagnosis]],
    last: int,
    notes: Sequence[str] = (),
    unread: Sequence[Unread] = (),
    now_ns: int | None = None,
) -> History:
    """The history of ``recorded`` (path, diagnosis). Each job's newest run is compared with the ``last`` runs before it.

    A run with several reports, or with a report and a recording, counts once. ``unread``: files and folders that may be further
    runs. A run without a start time, or with one more than an hour after ``now_ns`` (default: now), may be the newest and is not
    compared.
    """
    now_ns = time.time_ns() if now_ns is None else now_ns
    all_notes = list(notes)
    found: dict[tuple[_Job, int | str], _JobRun] = {}
    for source, diagnosis in recorded:
        started_ns = diagnosis.job.started_ns
        each = _job_run(source, diagnosis, _sort_key(started_ns, now_ns))
        key = each.name, source if started_ns is None else started_ns
        if key not in found:
            found[key] = each
            all_notes += _notes_on(each, diagnosis)
    jobs: dict[_Job, list[_JobRun]] = {}
    ambiguous = [_ambiguous_run(each, now_ns) for each in unread]
    for each in sorted(found.values(), key=lambda each: not each.identifies_job):
        compatible_jobs = (
            []
            if each.identifies_job
            else [job for job in jobs if job != each.name and _is_compatible(each.name, job)]
        )
        # Batch size and device may be missing in a run that ended before its first step.
        has_single_match = len(compatible_jobs) == 1 and not each.run.median_ms
        if compatible_jobs and not has_single_match:
            why = f"{each.run.source} does not identify its job"
            ambiguous.append(_AmbiguousRun(each.name, each.order if each.order[0] else _NEWEST, why))
        jobs.setdefault(compatible_jobs[0] if has_single_match else each.name, []).append(each)
    return History(
        jobs=[
            _job_history(
                ", ".join(filter(None, (name[0] or "job", *name[1:]))),
                sorted(runs, key=lambda each: each.order),
                last,
                _why_order_unknown(runs) or _why_newest_unknown(name, jobs, ambiguous),
            )
            for name, runs in sorted(jobs.items())
        ],
        notes=all_notes,
    )


def _sort_key(started_ns: int | None, now_ns: int) -> _SortKey:
    return started_ns is not None and started_ns <= now_ns + _MAX_CLOCK_ERROR_NS, started_ns or 0


def _job_run(source: str, diagnosis: Diagnosis, order: _SortKey) -> _JobRun:
    run, job = _history_run(source, diagnosis), diagnosis.job
    if job.end is None:
        identified = order[0]
    else:
        identified = bool(job.command and job.settings) and diagnosis.steps.source == "step-log"
    return _JobRun(_job_of(diagnosis), order, run, identifies_job=bool(run.median_ms) and identified)


def _notes_on(found: _JobRun, diagnosis: Diagnosis) -> list[str]:
    """Notes that affect the comparison of a run with others."""
    source, started, notes = found.run.source, found.run.started, list[str]()
    if started is not None and not found.order[0]:
        notes.append(
            f"{source} is dated {started[:10]}, which is in the future: a clock was wrong. The run is not compared."
        )
    if diagnosis.job.missing_ranks or not (found.identifies_job or diagnosis.job.end is None):
        notes += [f"{source}: {note}" for note in diagnosis.notes[:_MAX_NOTES]]
    return notes


def _ambiguous_run(unread: Unread, now_ns: int) -> _AmbiguousRun:
    order = _sort_key(unread.started_ns, now_ns)
    return _AmbiguousRun((_script(unread.command), "", "", ""), order if order[0] else _NEWEST, unread.why)


def _why_order_unknown(runs: Sequence[_JobRun]) -> str | None:
    """Why it is unknown which of a job's ``runs`` is the newest; None if it is known."""
    undated = [each.run for each in runs if not each.order[0]]
    if not undated or len(runs) == 1:
        return None
    source, started = undated[-1].source, undated[-1].started
    return f"{source} " + (
        f"is dated {started[:10]}, which is in the future" if started else "has no start time"
    )


def _why_newest_unknown(
    name: _Job, jobs: Mapping[_Job, Sequence[_JobRun]], ambiguous: Sequence[_AmbiguousRun]
) -> str | None:
    """The field ``newer`` of :class:`JobHistory`. Runs with an unknown script count only if they are newer than all identified runs."""
    newest = max(each.order for each in jobs[name])
    newest_identified = max(
        [newest, *(each.order for runs in jobs.values() for each in runs if each.identifies_job)]
    )
    later = [
        each
        for each in ambiguous
        if _is_compatible(each.name, name) and each.order > (newest if each.name[0] else newest_identified)
    ]
    return max(later, key=lambda each: each.order).why if later else None


def _script(command: Sequence[str]) -> str:
    return next((PurePath(word).name for word in command if word.endswith(_SCRIPTS)), "")


def _job_of(diagnosis: Diagnosis) -> _Job:
    job = diagnosis.job
    size = batch_size(diagnosis)
    return (
        _script(job.command),
        words.count(job.world_size, "rank") if job.world_size else "",
        f"batch {size:.3g}" if size else "",
        ", ".join(sorted(set(job.device_names))) or job.device or "",
    )


def _is_compatible(one: _Job, job: _Job) -> bool:
    return all(own in ("", part) for own, part in zip(one, job, strict=True))


def _history_run(source: str, diagnosis: Diagnosis) -> HistoryRun:
    median = median_step(diagnosis)
    main = next((f for f in diagnosis.findings if f.rule == diagnosis.verdict.rule), None)
    at_ns = diagnosis.job.started_ns
    started = None if at_ns is None else datetime.fromtimestamp(at_ns / 1e9, UTC)
    return HistoryRun(
        source=source,
        started=None if started is None else started.isoformat(timespec="seconds"),
        commit=next((found for name in COMMITS if (found := diagnosis.job.environment.get(name))), None),
        median_ms=None if median is None else median[0],
        interval_ms=None if median is None else median[1],
        wall_s=words.number_fact(diagnosis, "run.wall_s"),
        goodput=words.number_fact(diagnosis, "run.goodput"),
        restarts=words.restarts(diagnosis),
        healthy=diagnosis.healthy,
        headline=diagnosis.verdict.headline,
        rule=diagnosis.verdict.rule,
        costs_ms_per_step=None if main is None else main.costs_ms_per_step,
        stopped=words.stopped(diagnosis),
        running=diagnosis.job.end == RUNNING,
    )


def _job_history(name: str, found: Sequence[_JobRun], last: int, newer: str | None) -> JobHistory:
    runs = [each.run for each in found]
    timed = [index for index, each in enumerate(found) if each.run.median_ms and each.order[0]]
    medians = np.array([runs[index].median_ms for index in timed], float)
    percent, slower = _change_of_newest(
        runs[-1], [runs[index] for index in timed if index < len(runs) - 1][-last:]
    )
    return JobHistory(
        job=name,
        runs=runs,
        changes=[
            LevelShift(
                first=timed[cut],
                source=runs[timed[cut]].source,
                commit=runs[timed[cut]].commit,
                before_ms=before_ms,
                after_ms=after_ms,
                ratio=after_ms / before_ms,
                chance=chance,
            )
            for cut, chance, before_ms, after_ms in _segment_medians(medians)
        ],
        newest_percent=percent,
        slower=slower,
        newer=newer,
    )


def _change_of_newest(newest: HistoryRun, before: Sequence[HistoryRun]) -> tuple[float | None, bool]:
    """The fields ``newest_percent`` and ``slower`` of :class:`JobHistory`."""
    medians_ms = [run.median_ms for run in before if run.median_ms is not None]
    if not medians_ms or not newest.median_ms or newest.running:
        return None, False
    lowest = newest.interval_ms[0] if newest.interval_ms else newest.median_ms
    highest = max(run.interval_ms[1] if run.interval_ms else run.median_ms or 0.0 for run in before)
    return 100.0 * (newest.median_ms / float(np.median(medians_ms)) - 1.0), lowest > highest


def _segment_medians(medians_ms: NDArray[np.float64]) -> list[tuple[int, float, float, float]]:
    """For each change, in order: (index of the first run after it, p-value, median before in ms, median after in ms)."""
    logs = np.log(medians_ms)
    found = sorted(_change_points(logs, 0))
    edges = [0, *(cut for cut, _ in found), len(logs)]
    levels = [float(np.median(medians_ms[a:b])) for a, b in pairwise(edges) if b > a]
    return [
        (cut, p_value, levels[n], levels[n + 1])
        for n, (cut, p_value) in enumerate(found)
        if abs(levels[n + 1] / levels[n] - 1.0) >= MIN_CHANGE
    ]


def _change_points(logs: NDArray[np.float64], offset: int) -> list[tuple[int, float]]:
    """(Index, p-value) of the changes within ``logs``, found recursively. ``offset``: index of its first run."""
    if len(logs) < 2 * MIN_RUNS:
        return []
    cut, largest = best_split(logs, MIN_RUNS)
    random = np.random.default_rng(SEED)
    exceeding = sum(best_split(random.permutation(logs), MIN_RUNS)[1] >= largest for _ in range(PERMUTATIONS))
    p_value = (exceeding + 1) / (PERMUTATIONS + 1)
    if largest <= 0.0 or p_value > ALPHA:
        return []
    return [
        *_change_points(logs[:cut], offset),
        (offset + cut, p_value),
        *_change_points(logs[cut:], offset + cut),
    ]
