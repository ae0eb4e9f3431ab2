"""The account of a run as facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpdoctor.measure.runfacts import RestartFacts, RunEvent, RunFacts
from ddpdoctor.measure.sourcelines import LogSourceLines
from ddpdoctor.measure.steplog import PatternKind, RankLog

from .account import Launch, RunAccount, RunPart, prepared
from .attempts import AttemptRecord, attempt_facts, restart_facts
from .events import checkpoints_of, evaluations_of, event_of
from .outside import Span, lines_between

_WAITED_S = 1.0
"""Seconds by which the last rank calls later than the first one, from which it is named: on one host, imports differ by less."""


def run_facts(
    account: RunAccount | None,
    logs: Sequence[RankLog],
    launches: Mapping[str, Launch],
    lines: LogSourceLines,
    attempts: Sequence[AttemptRecord] = (),
) -> RunFacts:
    """The facts ``run`` of an ``account``; ``logs``, ``launches`` and ``lines`` are of the same run. The wall time is known if the
    launchers of all ranks are. ``attempts``: all of the run, in order."""
    if account is None:
        return RunFacts()
    is_whole = account.is_whole
    wall_s = account.wall_s if is_whole else None
    parts_s, patterns = account.parts_s.get, account.patterns

    def event(kind: PatternKind) -> RunEvent | None:
        return event_of(kind, patterns, logs, lines, account.wall_s)

    restarts = restart_facts(attempts)
    launched_ns = min((launch.started_ns for launch in launches.values()), default=None)
    joining_s, last_ranks = _joining(logs)
    preparation = lines_between(logs, [_preparation(log) for log in logs])
    end = lines_between(logs, [_end(log) for log in logs])
    return RunFacts(
        attempts=attempt_facts(attempts, launched_ns),
        restarts=restarts,
        wall_s=wall_s,
        steps=account.steps,
        goodput=_goodput(account, attempts, restarts) if is_whole else None,
        start_s=parts_s(RunPart.START),
        joining_s=joining_s,
        last_ranks=last_ranks,
        earlier_attempts_s=parts_s(RunPart.EARLIER_ATTEMPTS),
        preparation_s=parts_s(RunPart.PREPARATION),
        preparation_where=preparation.where,
        preparation_ranks=preparation.ranks,
        first_batch_s=parts_s(RunPart.FIRST_BATCH),
        warm_up_s=parts_s(RunPart.WARM_UP),
        steps_s=parts_s(RunPart.STEPS),
        some_steps_s=parts_s(RunPart.SOME_STEPS),
        epochs_s=parts_s(RunPart.EPOCHS),
        evaluation_s=parts_s(RunPart.EVALUATION),
        checkpoint_s=parts_s(RunPart.CHECKPOINTS),
        pauses_s=parts_s(RunPart.PAUSES),
        suspended_s=parts_s(RunPart.SUSPENDED),
        profiler_s=parts_s(RunPart.PROFILER),
        unrecorded_s=parts_s(RunPart.UNKNOWN),
        other_trainings_s=parts_s(RunPart.OTHER_TRAININGS),
        later_attempts_s=parts_s(RunPart.LATER_ATTEMPTS),
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
    """The share of the wall time that the steps of all attempts would take, without those that were repeated."""
    if len(attempts) < 2 or not account.steps:
        return account.goodput
    repeated = restarts.repeated_steps if restarts is not None else None
    useful = sum(attempt.steps for attempt in attempts) - (repeated or 0)
    return min(account.goodput * useful / account.steps, 1.0)


def _joining(logs: Sequence[RankLog]) -> tuple[float | None, list[int] | None]:
    """(Seconds from the first rank's call of init_process_group until the group exists; the ranks that called it last, if the first had
    to wait for them.) Each rank's time is a difference on its own clock."""
    waits_s: dict[int, float] = {}
    for log in logs:
        joining_ns = log.record.info.get("joining_ns")
        if not isinstance(joining_ns, int) or not log.steps or log.steps[0].number != 0:
            return None, None
        waits_s[log.rank] = max(log.steps[0].recorded_ns[0] - joining_ns, 0) / 1e9
    longest_s = max(waits_s.values(), default=0.0)
    shortest_s = min(waits_s.values(), default=0.0)
    if longest_s - shortest_s < _WAITED_S:
        return longest_s, None
    middle_s = (longest_s + shortest_s) / 2
    last = [rank for rank, wait_s in waits_s.items() if wait_s < middle_s]
    return longest_s, last if 2 * len(last) <= len(waits_s) else None


def _preparation(log: RankLog) -> Span | None:
    """From the process group until the first batch is there."""
    if not log.steps or log.steps[0].number != 0:
        return None
    first = log.steps[0]
    return first.start_ns, first.start_ns + round(1e9 * sum(prepared(first)))


def _end(log: RankLog) -> Span | None:
    """From the last step's end until the recording ended, or the last sample."""
    if not log.steps or not len(log.samples):
        return None
    last, ended_ns = log.steps[-1], log.record.info.get("ended_ns")
    over_ns = (
        last.end_ns + ended_ns - last.recorded_ns[1]
        if isinstance(ended_ns, int)
        else int(log.samples[-1, 0]) + 1
    )
    return last.end_ns, over_ns
