"""A job run after run: its step times and verdicts over time, and where they changed.

Runs are told apart by what forbids a comparison: another script, number of ranks, batch size or device is another job. Step times
differ from one start to the next by more than their own scatter within a run, so runs are compared with runs: a level that holds
for some runs and differs from that of the runs before is a change. Where it lies, and whether it is chance, is told as by
E-divisive (Matteson and James, "A Nonparametric Approach for Multiple Change Point Analysis of Multivariate Data", JASA 2014), with
means of logarithms for its distance: of all places to cut, the one with the largest difference, against the same of shuffled runs.
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

_AHEAD_NS = 3600 * 10**9
"""A run that is dated further ahead of now was dated by a clock that was wrong: clocks of hosts that are right differ by less."""
_MOST_NOTES = 3
"""Of a run of which not everything could be read."""

_Job = tuple[str, str, str, str]
"""Script, ranks, batch size and device; "" if unknown. Other values are another job."""
_Order = tuple[bool, float]
"""Of runs by time: (has one that can be true, its start in epoch ns). Those without come first, and may be of any time."""
_NEWEST: _Order = True, math.inf
"""Of what may be newer than any run."""


class Unread(msgspec.Struct, frozen=True):
    """What may be a run, or hold one, and cannot be read, or holds no step."""

    source: str
    command: Sequence[str]
    """[] if unknown."""
    started_ns: int | None
    """Epoch ns; of what says nothing of its start, when it was last changed. None: it may be the newest."""
    why: str
    """It cannot be judged, with where it lies; a sentence without its point."""


class _Unclear(msgspec.Struct, frozen=True):
    """A run that may be of several jobs, or of any."""

    name: _Job
    order: _Order
    why: str


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


class _Found(msgspec.Struct, frozen=True):
    """A run that is listed."""

    name: _Job
    order: _Order
    run: HistoryRun
    described: bool
    """Whether it says of which job it is as far as a run of it can: not one without a step, or whose documents or step logs were not
    read, nor traces without a time."""


class LevelShift(msgspec.Struct, frozen=True, kw_only=True):
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
    changes: list[LevelShift]
    newest_percent: float | None
    """By how many per cent the newest run's step is longer (below zero: shorter) than the median of those before it that were asked
    for; null without any, or if the newest run has no step time or is still running."""
    slower: bool
    """Whether it is longer than each of them, by more than the intervals of both leave open."""

    newer: str | None
    """Why a run that may be newer, and of this job, cannot be judged, with where it lies; null without one."""

    @property
    def undecided(self) -> str | None:
        """Why no newest run counts as one that got no slower, in words, if one before it has a step time."""
        newest = self.runs[-1]
        if self.newer is not None and any(run.median_ms for run in self.runs):
            return f"a run that may be newer, and of this job, cannot be judged: {self.newer}"
        if not any(run.median_ms for run in self.runs[:-1]):
            return None
        why = newest.stopped or (None if newest.median_ms else "has no step time")
        return None if why is None else f"the newest run, {newest.source}, {why}"


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


def history(
    recorded: Sequence[tuple[str, Diagnosis]],
    last: int,
    notes: Sequence[str] = (),
    unread: Sequence[Unread] = (),
    now_ns: int | None = None,
) -> History:
    """The history of runs, given with where each was found. The newest is compared with ``last`` runs before it.

    A run of which there is a recording and a report, or several reports, counts once, where it was found first. ``unread``: what may
    be runs as well. A run that is dated after ``now_ns`` (default: the clock's time) by more than an hour, or not at all, is compared with
    no other: it may be the newest.
    """
    now_ns = time.time_ns() if now_ns is None else now_ns
    told = list(notes)
    found: dict[tuple[_Job, int | str], _Found] = {}
    for source, diagnosis in recorded:
        started_ns = diagnosis.job.started_ns
        each = _found(source, diagnosis, _order(started_ns, now_ns))
        key = each.name, source if started_ns is None else started_ns
        if key not in found:
            found[key] = each
            told += _notes_on(each, diagnosis)
    jobs: dict[_Job, list[_Found]] = {}
    unclear = [_unclear(each, now_ns) for each in unread]
    for each in sorted(found.values(), key=lambda each: not each.described):
        same = [] if each.described else [job for job in jobs if job != each.name and _may_be(each.name, job)]
        # A run that ended before its first step may not tell its batch size or device.
        of_one = len(same) == 1 and not each.run.median_ms
        if same and not of_one:
            why = f"{each.run.source} does not say of which job it is"
            unclear.append(_Unclear(each.name, each.order if each.order[0] else _NEWEST, why))
        jobs.setdefault(same[0] if of_one else each.name, []).append(each)
    return History(
        jobs=[
            _of_job(
                _words(name),
                sorted(runs, key=lambda each: each.order),
                last,
                _undated(runs) or _newer(name, jobs, unclear),
            )
            for name, runs in sorted(jobs.items())
        ],
        notes=told,
    )


def _order(started_ns: int | None, now_ns: int) -> _Order:
    return started_ns is not None and started_ns <= now_ns + _AHEAD_NS, started_ns or 0


def _found(source: str, diagnosis: Diagnosis, order: _Order) -> _Found:
    run, job = _run(source, diagnosis), diagnosis.job
    if job.end is None:
        says = order[0]
    else:
        says = bool(job.command and job.settings) and diagnosis.steps.source == "step-log"
    return _Found(_job_of(diagnosis), order, run, described=bool(run.median_ms) and says)


def _notes_on(found: _Found, diagnosis: Diagnosis) -> list[str]:
    """What somebody must know who compares this run with others."""
    source, started, notes = found.run.source, found.run.started, list[str]()
    if started is not None and not found.order[0]:
        notes.append(
            f"{source} is dated {started[:10]}, later than now: a clock was wrong. It is compared with no other run."
        )
    if diagnosis.job.missing_ranks or not (found.described or diagnosis.job.end is None):
        notes += [f"{source}: {note}" for note in diagnosis.notes[:_MOST_NOTES]]
    return notes


def _unclear(unread: Unread, now_ns: int) -> _Unclear:
    order = _order(unread.started_ns, now_ns)
    return _Unclear((_script(unread.command), "", "", ""), order if order[0] else _NEWEST, unread.why)


def _undated(runs: Sequence[_Found]) -> str | None:
    """Why nobody can tell which of a job's ``runs`` is the newest; None where their times do."""
    undated = [each.run for each in runs if not each.order[0]]
    if not undated or len(runs) == 1:
        return None
    source, started = undated[-1].source, undated[-1].started
    return f"{source} " + (
        f"is dated {started[:10]}, later than now" if started else "does not say when it ran"
    )


def _newer(name: _Job, jobs: Mapping[_Job, Sequence[_Found]], unclear: Sequence[_Unclear]) -> str | None:
    """See :class:`JobHistory`. Of a run whose script is unknown only those are of interest that are newer than all that say of which job
    they are: after them no run of any job has been judged."""
    newest = max(each.order for each in jobs[name])
    of_all = max([newest, *(each.order for runs in jobs.values() for each in runs if each.described)])
    later = [
        each
        for each in unclear
        if _may_be(each.name, name) and each.order > (newest if each.name[0] else of_all)
    ]
    return max(later, key=lambda each: each.order).why if later else None


def _script(command: Sequence[str]) -> str:
    return next((PurePath(word).name for word in command if word.endswith(_SCRIPTS)), "")


def _words(name: _Job) -> str:
    script, *more = name
    return ", ".join(filter(None, (script or "job", *more)))


def _job_of(diagnosis: Diagnosis) -> _Job:
    job = diagnosis.job
    size = batch_size(diagnosis)
    return (
        _script(job.command),
        words.count(job.world_size, "rank") if job.world_size else "",
        f"batch {size:.3g}" if size else "",
        ", ".join(sorted(set(job.device_names))) or job.device or "",
    )


def _date(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns / 1e9, UTC).isoformat(timespec="seconds")


def _may_be(one: _Job, job: _Job) -> bool:
    return all(own in ("", part) for own, part in zip(one, job, strict=True))


def _run(source: str, diagnosis: Diagnosis) -> HistoryRun:
    middle = median_step(diagnosis)
    costliest = next((f for f in diagnosis.findings if f.rule == diagnosis.verdict.rule), None)
    started_ns = diagnosis.job.started_ns
    return HistoryRun(
        source=source,
        started=None if started_ns is None else _date(started_ns),
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


def _of_job(name: str, found: Sequence[_Found], last: int, newer: str | None) -> JobHistory:
    runs = [each.run for each in found]
    timed = [index for index, each in enumerate(found) if each.run.median_ms and each.order[0]]
    medians = np.array([runs[index].median_ms for index in timed], float)
    percent, slower = _newest(runs[-1], [runs[index] for index in timed if index < len(runs) - 1][-last:])
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


def _newest(newest: HistoryRun, before: Sequence[HistoryRun]) -> tuple[float | None, bool]:
    """(Per cent by which the newest is longer, whether it clearly is); (None, False) if it or all ``before`` have no step time, and
    of one that is still running."""
    usual = [run.median_ms for run in before if run.median_ms is not None]
    if not usual or not newest.median_ms or newest.running:
        return None, False
    lowest = newest.interval_ms[0] if newest.interval_ms else newest.median_ms
    highest = max(run.interval_ms[1] if run.interval_ms else run.median_ms or 0.0 for run in before)
    return 100.0 * (newest.median_ms / float(np.median(usual)) - 1.0), lowest > highest


def _segment_medians(medians_ms: NDArray[np.float64]) -> list[tuple[int, float, float, float]]:
    """(First run after the change, chance, median before and after, ms) of each change, in their order."""
    logs = np.log(medians_ms)
    found = sorted(_change_points(logs, 0))
    edges = [0, *(cut for cut, _ in found), len(logs)]
    levels = [float(np.median(medians_ms[a:b])) for a, b in pairwise(edges) if b > a]
    return [
        (cut, chance, levels[n], levels[n + 1])
        for n, (cut, chance) in enumerate(found)
        if abs(levels[n + 1] / levels[n] - 1.0) >= LEAST_CHANGE
    ]


def _change_points(logs: NDArray[np.float64], offset: int) -> list[tuple[int, float]]:
    """(Place, chance) of the changes in a stretch of runs, and in the parts that they leave."""
    if len(logs) < 2 * FEWEST:
        return []
    cut, largest = _best_split(logs)
    random = np.random.default_rng(SEED)
    chances = sum(_best_split(random.permutation(logs))[1] >= largest for _ in range(SHUFFLES))
    chance = (chances + 1) / (SHUFFLES + 1)
    if largest <= 0.0 or chance > UNLIKELY:
        return []
    return [
        *_change_points(logs[:cut], offset),
        (offset + cut, chance),
        *_change_points(logs[cut:], offset + cut),
    ]


def _best_split(logs: NDArray[np.float64]) -> tuple[int, float]:
    """(Where a cut leaves parts that differ most, how much they do): the squared difference of their means, weighed with n m / (n + m)."""
    count = len(logs)
    before = np.arange(FEWEST, count - FEWEST + 1)
    sums = np.cumsum(logs)
    means, rest = sums[before - 1] / before, (sums[-1] - sums[before - 1]) / (count - before)
    weights = before * (count - before) / count * (means - rest) ** 2
    best = int(weights.argmax())
    return int(before[best]), float(weights[best])
