"""A job run after run: its step times and verdicts over time, and where they changed.

Runs are told apart by what forbids a comparison: another script, number of ranks, batch size or device is another job. Step times
differ from one start to the next by more than their own scatter within a run, so runs are compared with runs: a level that holds
for some runs and differs from that of the runs before is a change. Where it lies, and whether it is chance, is told as by
E-divisive (Matteson and James, "A Nonparametric Approach for Multiple Change Point Analysis of Multivariate Data", JASA 2014), with
means of logarithms for its distance: of all places to cut, the one with the largest difference, against the same of shuffled runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import PurePath

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddpdoctor.diagnose.diagnosis import RUNNING, Diagnosis
from ddpdoctor.report import words
from ddpdoctor.report.compare import median_step
from ddpdoctor.report.compare_settings import batch_size

HISTORY_SCHEMA = "ddpdoctor.history/1"
COMMITS = ("GITHUB_SHA", "CI_COMMIT_SHA", "GIT_COMMIT", "BUILDKITE_COMMIT", "CIRCLE_SHA1", "BITBUCKET_COMMIT")
"""Variables in which build systems tell the commit, first come first taken."""
UNLIKELY = 0.05
"""Probability of chance below which a change is told."""
FEWEST = 4
"""Runs on either side of a change: of fewer than eight, shuffling reaches no less than one in twenty."""
LEAST_CHANGE = 0.01
"""Part of the step below which nobody wants to hear of a change."""
SHUFFLES = 2000
SEED = 20_240_229
_SCRIPTS = (".py", ".ipynb")

_Job = tuple[str, str, str, str]
"""Script, ranks, batch size and device; "" if unknown. Other values are another job."""


class HistoryRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run, in short."""

    source: str
    started: str | None
    """UTC, ISO 8601."""
    commit: str | None
    """As the build system's variables tell it."""
    median_ms: float | None
    interval_ms: tuple[float, float] | None
    """In which the median lies in 95 of 100 such recordings; null with few steps."""
    healthy: bool
    headline: str
    rule: str | None
    costs_ms_per_step: float | None
    stopped: str | None
    """What became of a job that did not end well, in words: hung, failed, was cut off, is still running, has no recorded end; null of
    one that ended, or was asked to, and of traces."""
    running: bool
    """Whether it ran when it was analysed."""


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """Runs from one on take another time than those before."""

    first: int
    """Index of the first run after the change."""
    source: str
    commit: str | None
    before_ms: float
    after_ms: float
    """Medians of the runs up to the next change."""
    ratio: float
    chance: float
    """Probability of a difference as large where nothing has changed."""


class JobHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of one job, oldest first."""

    job: str
    runs: list[HistoryRun]
    changes: list[Changed]
    newest_percent: float | None
    """By how many per cent the newest run's step is longer (below zero: shorter) than the median of those before it that were asked
    for; null without any, or if the newest run has no step time."""
    slower: bool
    """Whether it is longer than each of them, by more than the intervals of both leave open."""

    @property
    def undecided(self) -> str | None:
        """Why the newest run does not count as one that got no slower, in words, if one before it has a step time."""
        newest = self.runs[-1]
        if not any(run.median_ms for run in self.runs[:-1]):
            return None
        return newest.stopped or (None if newest.median_ms else "has no step time")


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a history shows."""

    schema: str = HISTORY_SCHEMA
    jobs: list[JobHistory]
    notes: list[str]

    def regression_percent(self) -> float | None:
        """The largest by which a job's newest run is slower, 0 where none is; None where no job has a run before it."""
        known = [job for job in self.jobs if job.newest_percent is not None]
        if not known:
            return None
        return max((job.newest_percent or 0.0 for job in known if job.slower), default=0.0)


def history(recorded: Sequence[tuple[str, Diagnosis]], last: int, notes: Sequence[str] = ()) -> History:
    """The history of runs, given with where each was found. The newest is compared with ``last`` runs before it.

    A run of which there is a recording and a report, or several reports, counts once, where it was found first.
    """
    found: dict[tuple[_Job, int | str], tuple[_Job, int, HistoryRun]] = {}
    for source, diagnosis in recorded:
        name, started_ns = _job_of(diagnosis), diagnosis.job.started_ns
        key = name, source if started_ns is None else started_ns
        if key not in found:
            found[key] = name, started_ns or 0, _run(source, diagnosis)
    jobs: dict[_Job, list[tuple[int, HistoryRun]]] = {}
    for name, started_ns, run in sorted(found.values(), key=lambda each: not each[2].median_ms):
        # A run that ended before its first step may not tell its batch size or device.
        same = [] if run.median_ms else [job for job in jobs if _may_be(name, job)]
        jobs.setdefault(same[0] if len(same) == 1 else name, []).append((started_ns, run))
    told = [
        _of_job(", ".join(filter(None, name)), [run for _, run in sorted(runs, key=lambda run: run[0])], last)
        for name, runs in sorted(jobs.items())
    ]
    return History(jobs=told, notes=list(notes))


def _job_of(diagnosis: Diagnosis) -> _Job:
    job = diagnosis.job
    script = next((PurePath(word).name for word in job.command if word.endswith(_SCRIPTS)), None)
    size = batch_size(diagnosis)
    return (
        script or "job",
        words.count(job.world_size, "rank") if job.world_size else "",
        f"batch {size:.3g}" if size else "",
        ", ".join(sorted(set(job.device_names))) or job.device or "",
    )


def _may_be(one: _Job, job: _Job) -> bool:
    return all(own in ("", part) for own, part in zip(one, job, strict=True))


def _run(source: str, diagnosis: Diagnosis) -> HistoryRun:
    middle = median_step(diagnosis)
    costliest = next((f for f in diagnosis.findings if f.rule == diagnosis.verdict.rule), None)
    started_ns = diagnosis.job.started_ns
    return HistoryRun(
        source=source,
        started=None
        if started_ns is None
        else datetime.fromtimestamp(started_ns / 1e9, UTC).isoformat(timespec="seconds"),
        commit=next((found for name in COMMITS if (found := diagnosis.job.environment.get(name))), None),
        median_ms=None if middle is None else middle[0],
        interval_ms=None if middle is None else middle[1],
        healthy=diagnosis.healthy,
        headline=diagnosis.verdict.headline,
        rule=diagnosis.verdict.rule,
        costs_ms_per_step=None if costliest is None else costliest.costs_ms_per_step,
        stopped=words.stopped(diagnosis),
        running=diagnosis.job.end == RUNNING,
    )


def _of_job(name: str, runs: list[HistoryRun], last: int) -> JobHistory:
    timed = [index for index, run in enumerate(runs) if run.median_ms]
    medians = np.array([runs[index].median_ms for index in timed], float)
    percent, slower = _newest(runs[-1], [runs[index] for index in timed if index < len(runs) - 1][-last:])
    return JobHistory(
        job=name,
        runs=runs,
        changes=[
            Changed(
                first=timed[cut],
                source=runs[timed[cut]].source,
                commit=runs[timed[cut]].commit,
                before_ms=before_ms,
                after_ms=after_ms,
                ratio=after_ms / before_ms,
                chance=chance,
            )
            for cut, chance, before_ms, after_ms in _levels(medians)
        ],
        newest_percent=percent,
        slower=slower,
    )


def _newest(newest: HistoryRun, before: Sequence[HistoryRun]) -> tuple[float | None, bool]:
    """(Per cent by which the newest is longer, whether it clearly is); (None, False) if it or all ``before`` have no step time."""
    usual = [run.median_ms for run in before if run.median_ms is not None]
    if not usual or not newest.median_ms:
        return None, False
    lowest = newest.interval_ms[0] if newest.interval_ms else newest.median_ms
    highest = max(run.interval_ms[1] if run.interval_ms else run.median_ms or 0.0 for run in before)
    return 100.0 * (newest.median_ms / float(np.median(usual)) - 1.0), lowest > highest


def _levels(medians_ms: NDArray[np.float64]) -> list[tuple[int, float, float, float]]:
    """(First run after the change, chance, median before and after, ms) of each change, in their order."""
    logs = np.log(medians_ms)
    found = sorted(_changes(logs, 0))
    edges = [0, *(cut for cut, _ in found), len(logs)]
    levels = [float(np.median(medians_ms[a:b])) for a, b in pairwise(edges) if b > a]
    return [
        (cut, chance, levels[n], levels[n + 1])
        for n, (cut, chance) in enumerate(found)
        if abs(levels[n + 1] / levels[n] - 1.0) >= LEAST_CHANGE
    ]


def _changes(logs: NDArray[np.float64], offset: int) -> list[tuple[int, float]]:
    """(Place, chance) of the changes in a stretch of runs, and in the parts that they leave."""
    if len(logs) < 2 * FEWEST:
        return []
    cut, largest = _cut(logs)
    random = np.random.default_rng(SEED)
    chances = sum(_cut(random.permutation(logs))[1] >= largest for _ in range(SHUFFLES))
    chance = (chances + 1) / (SHUFFLES + 1)
    if largest <= 0.0 or chance > UNLIKELY:
        return []
    return [
        *_changes(logs[:cut], offset),
        (offset + cut, chance),
        *_changes(logs[cut:], offset + cut),
    ]


def _cut(logs: NDArray[np.float64]) -> tuple[int, float]:
    """(Where a cut leaves parts that differ most, how much they do): the squared difference of their means, weighed with n m / (n + m)."""
    count = len(logs)
    before = np.arange(FEWEST, count - FEWEST + 1)
    sums = np.cumsum(logs)
    means, rest = sums[before - 1] / before, (sums[-1] - sums[before - 1]) / (count - before)
    weights = before * (count - before) / count * (means - rest) ** 2
    best = int(weights.argmax())
    return int(before[best]), float(weights[best])
