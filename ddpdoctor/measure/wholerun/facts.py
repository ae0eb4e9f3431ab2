"""Facts of a run from its account."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ddpdoctor.measure.places import Stack, Where
from ddpdoctor.measure.runfacts import RestartFacts, RunEvent, RunFacts
from ddpdoctor.measure.sourcelines import LogSourceLines, by_line, with_heaviest
from ddpdoctor.measure.steplog import PatternKind, RankLog

from .account import Launch, RunAccount, RunPart, preparation_times
from .events import checkpoints_of, evaluations_of, event_of
from .restarts import AttemptRecord, attempt_facts, restart_facts

_FIELDS = {
    **{part: f"{part}_s" for part in RunPart if part not in (RunPart.END, RunPart.TEARDOWN)},
    RunPart.CHECKPOINTS: "checkpoint_s",
    RunPart.UNKNOWN: "unrecorded_s",
}
"""Field of each part in the facts. END and TEARDOWN are missing: their fields are only set if the account is whole."""
_MIN_WAIT_S = 1.0
"""Seconds between the first and the last rank's call from which the late ranks are reported. On one host, imports differ by less."""


def run_facts(
    account: RunAccount | None,
    logs: Sequence[RankLog],
    launches: Mapping[str, Launch],
    lines: LogSourceLines,
    attempts: Sequence[AttemptRecord] = (),
) -> RunFacts:
    """The facts ``run`` of an ``account``; ``logs``, ``launches`` and ``lines`` are of the same run. The wall time is None unless the
    launchers of all ranks are known. ``attempts``: all of the run, in order."""
    if account is None:
        return RunFacts()
    is_whole = account.is_whole
    wall_s = account.wall_s if is_whole else None
    parts_s, patterns = account.parts_s.get, account.patterns

    def event(kind: PatternKind) -> RunEvent | None:
        return event_of(kind, patterns, logs, lines, account.wall_s)

    of_parts: dict[str, Any] = {field: parts_s(part) for part, field in _FIELDS.items()}
    restarts = restart_facts(attempts)
    launched_ns = min((launch.started_ns for launch in launches.values()), default=None)
    joining_s, last_ranks = _joining(logs)
    preparation = lines_between(logs, [_preparation_span(log) for log in logs])
    end = lines_between(logs, [_end_span(log) for log in logs])
    return RunFacts(
        attempts=attempt_facts(attempts, launched_ns),
        restarts=restarts,
        wall_s=wall_s,
        steps=account.steps,
        goodput=_goodput(account, attempts, restarts) if is_whole else None,
        **of_parts,
        joining_s=joining_s,
        last_ranks=last_ranks,
        preparation_where=preparation.where,
        preparation_ranks=preparation.ranks,
        end_s=parts_s(RunPart.END, 0.0) + parts_s(RunPart.TEARDOWN, 0.0) if is_whole else None,
        exit_s=parts_s(RunPart.TEARDOWN) if is_whole else None,
        end_where=end.where,
        end_ranks=end.ranks,
        evaluation=evaluations_of(account, logs, lines, wall_s),
        checkpoints=checkpoints_of(account, logs, lines, wall_s),
        pause=event(PatternKind.ONCE),
        periodic=event(PatternKind.EVERY_NTH),
        change=event(PatternKind.FROM_STEP),
        growth=event(PatternKind.GROWING),
    )


def _goodput(account: RunAccount, attempts: Sequence[AttemptRecord], restarts: RestartFacts | None) -> float:
    """Share of the wall time that the steps of all attempts would take at the typical length, without repeated steps."""
    if len(attempts) < 2 or not account.steps:
        return account.goodput
    repeated = restarts.repeated_steps if restarts is not None else None
    useful = sum(attempt.steps for attempt in attempts) - (repeated or 0)
    return min(account.goodput * useful / account.steps, 1.0)


def _joining(logs: Sequence[RankLog]) -> tuple[float | None, list[int] | None]:
    """(seconds from the first rank's call of init_process_group until the group exists; ranks that called it last, if the first had
    to wait for them). Each rank's time is a difference on its own clock."""
    waits_s: dict[int, float] = {}
    for log in logs:
        joining_ns = log.record.info.get("joining_ns")
        if not isinstance(joining_ns, int) or not log.steps or log.steps[0].number != 0:
            return None, None
        waits_s[log.rank] = max(log.steps[0].recorded_ns[0] - joining_ns, 0) / 1e9
    longest_s = max(waits_s.values(), default=0.0)
    shortest_s = min(waits_s.values(), default=0.0)
    if longest_s - shortest_s < _MIN_WAIT_S:
        return longest_s, None
    middle_s = (longest_s + shortest_s) / 2
    last = [rank for rank, wait_s in waits_s.items() if wait_s < middle_s]
    return longest_s, last if 2 * len(last) <= len(waits_s) else None


def _preparation_span(log: RankLog) -> Span | None:
    """From the creation of the process group to the first batch."""
    first = log.steps[0] if log.steps else None
    if first is None or first.number != 0:
        return None
    return first.start_ns, first.start_ns + round(1e9 * sum(preparation_times(first)))


def _end_span(log: RankLog) -> Span | None:
    """From the end of the last step to the end of the recording, or the last sample."""
    if not log.steps or not len(log.samples):
        return None
    last, ended_ns = log.steps[-1], log.record.info.get("ended_ns")
    if isinstance(ended_ns, int):
        return last.end_ns, last.end_ns + ended_ns - last.recorded_ns[1]
    return last.end_ns, int(log.samples[-1, 0]) + 1


_REACH_NS = 1_000_000_000
"""Longest time before and after a sample that it represents: twice the longest interval between samples (0.5 s)."""
_LEAST_SHARE = 0.1
"""Share of the sampled time from which a line is reported."""
_FEWEST_SAMPLES = 3
"""Fewest samples of a reported line on one rank; fewer may be random."""
_MIN_SHARE_OF_LONGEST = 0.5
"""A rank counts as being at a line if its time there is at least this share of the longest."""
_MOST_LINES = 3
"""Most lines reported."""
_WAITS = ("/torch/distributed/", "/torch/nn/parallel/distributed.py", "<ddpdoctor, like importlib")
"""Parts of the paths of files in which a rank waits for others: collectives, stores, DDP's constructor (which compares shapes), and
the hook's wrapper of calls, which appears in stacks only during a collective."""

Span = tuple[int, int]
"""Begin and end, epoch ns, on the clock of the log's steps and samples."""


class LinesOutsideSteps(msgspec.Struct, frozen=True):
    """Source lines of a time without steps, from stack samples.

    The sampling rate drops after the first 30 s, so each sample is weighted by the time around it. A line's share is that of the rank that
    spends the most time there: if one rank reads a file while the others wait for it, the line that reads is reported, not the wait.
    """

    where: list[Where] = []
    """The lines, each with its largest share of a rank's sampled time."""
    ranks: list[int] | None = None
    """The ranks at the first line for long; None: all, or unknown."""


class _SampledTimes(msgspec.Struct, frozen=True):
    """Sampled time of one rank."""

    seconds: Mapping[Stack, float]
    """By call path, without waits for other ranks."""
    samples: Mapping[Stack, int]
    total_s: float
    """Including these waits."""


def lines_between(logs: Sequence[RankLog], spans: Sequence[Span | None]) -> LinesOutsideSteps:
    """The lines of the ranks within their ``spans``; None: not known for that rank."""
    pairs = [(log, span) for log, span in zip(logs, spans, strict=True) if span is not None]
    for without_waits in (True, False):
        times = {log.rank: _sampled_times(log, span, without_waits=without_waits) for log, span in pairs}
        found = _reported_lines(times)
        if found.where:
            return found
    return LinesOutsideSteps()


def _reported_lines(times: Mapping[int, _SampledTimes]) -> LinesOutsideSteps:
    seconds = {rank: by_line(of_rank.seconds) for rank, of_rank in times.items()}
    samples = {rank: by_line(of_rank.samples) for rank, of_rank in times.items()}
    share = {
        line: max(
            (of_line[line] / times[rank].total_s, rank)
            for rank, of_line in seconds.items()
            if line in of_line
        )
        for line in dict.fromkeys(line for of_line in seconds.values() for line in of_line)
    }
    reported = [
        (line, part)
        for line, (part, rank) in sorted(share.items(), key=lambda item: -item[1][0])
        if part >= _LEAST_SHARE and samples[rank][line] >= _FEWEST_SAMPLES
    ][:_MOST_LINES]
    if not reported:
        return LinesOutsideSteps()
    of_all: defaultdict[Stack, float] = defaultdict(float)
    for of_rank in times.values():
        for stack, spent_s in of_rank.seconds.items():
            of_all[stack] += spent_s
    first = {rank: of_line.get(reported[0][0], 0.0) for rank, of_line in seconds.items()}
    ranks = [
        rank for rank, spent_s in first.items() if spent_s >= _MIN_SHARE_OF_LONGEST * max(first.values())
    ]
    where = [Where(line.file, line.line, line.function, share=min(part, 1.0)) for line, part in reported]
    return LinesOutsideSteps(with_heaviest(where, of_all), None if len(ranks) == len(first) else ranks)


def _sampled_times(log: RankLog, span: Span, *, without_waits: bool) -> _SampledTimes:
    begin_ns, end_ns = span
    rows = log.samples[(log.samples[:, 0] >= begin_ns) & (log.samples[:, 0] < end_ns)]
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    taken_ns, due_ns = rows[:, 0], rows[:, 0] - rows[:, 3]
    middle_ns = (taken_ns[:-1] + due_ns[1:]) // 2
    begins_ns = np.maximum(np.append(begin_ns, middle_ns)[: len(rows)], due_ns - _REACH_NS)
    ends_ns = np.minimum(np.append(middle_ns, end_ns)[: len(rows)], taken_ns + _REACH_NS)
    spent_s = np.maximum(ends_ns - begins_ns, 0) / 1e9
    seconds: defaultdict[Stack, float] = defaultdict(float)
    samples: defaultdict[Stack, int] = defaultdict(int)
    for (_, user, innermost, _), of_sample_s in zip(rows.tolist(), spent_s.tolist(), strict=True):
        where, inner = log.sample_where.get(user), log.sample_where.get(innermost)
        is_wait = inner is not None and any(part in inner.file for part in _WAITS)
        if where is not None and not (is_wait and without_waits):
            seconds[where.stack] += of_sample_s
            samples[where.stack] += 1
    return _SampledTimes(seconds, samples, max(float(spent_s.sum()), 1e-9))
