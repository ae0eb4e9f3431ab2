"""The account of a run as facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpdoctor.measure.runfacts import RestartFacts, RunEvent, RunFacts
from ddpdoctor.measure.sourcelines import LogSourceLines
from ddpdoctor.measure.steplog import PatternKind, RankLog

from .account import Launch, RunAccount, RunPart
from .attempts import AttemptRecord, attempt_facts, restart_facts
from .events import event_of


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
    is_whole = all(log.host in launches and launches[log.host].ended_ns is not None for log in logs)
    wall_s = account.wall_s if is_whole else None
    parts_s, patterns = account.parts_s.get, account.patterns

    def event(kind: PatternKind) -> RunEvent | None:
        return event_of(kind, patterns, logs, lines, wall_s)

    restarts = restart_facts(attempts)
    launched_ns = min((launch.started_ns for launch in launches.values()), default=None)
    return RunFacts(
        attempts=attempt_facts(attempts, launched_ns),
        restarts=restarts,
        wall_s=wall_s,
        steps=account.steps,
        goodput=_goodput(account, attempts, restarts) if is_whole else None,
        start_s=parts_s(RunPart.START),
        earlier_attempts_s=parts_s(RunPart.EARLIER_ATTEMPTS),
        preparation_s=parts_s(RunPart.PREPARATION),
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
        later_attempts_s=parts_s(RunPart.LATER_ATTEMPTS),
        end_s=parts_s(RunPart.END, 0.0) + parts_s(RunPart.TEARDOWN, 0.0) if is_whole else None,
        pause=event(PatternKind.ONCE),
        rhythm=event(PatternKind.EVERY_NTH),
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
