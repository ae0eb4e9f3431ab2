"""The account of a run as facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpdoctor.measure.runfacts import RunEvent, RunFacts
from ddpdoctor.measure.sourcelines import LogSourceLines
from ddpdoctor.measure.steplog import PatternKind, RankLog

from .account import Launch, RunAccount, RunPart
from .events import event_of


def run_facts(
    account: RunAccount | None,
    logs: Sequence[RankLog],
    launches: Mapping[str, Launch],
    lines: LogSourceLines,
) -> RunFacts:
    """The facts ``run`` of an ``account``; ``logs``, ``launches`` and ``lines`` are of the same run. The wall time is known if the
    launchers of all ranks are."""
    if account is None:
        return RunFacts()
    is_whole = all(log.host in launches and launches[log.host].ended_ns is not None for log in logs)
    wall_s = account.wall_s if is_whole else None
    parts_s, patterns = account.parts_s.get, account.patterns

    def event(kind: PatternKind) -> RunEvent | None:
        return event_of(kind, patterns, logs, lines, wall_s)

    return RunFacts(
        wall_s=wall_s,
        steps=account.steps,
        goodput=account.goodput if is_whole else None,
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
        end_s=parts_s(RunPart.END, 0.0) + parts_s(RunPart.TEARDOWN, 0.0) if is_whole else None,
        pause=event(PatternKind.ONCE),
        rhythm=event(PatternKind.EVERY_NTH),
        change=event(PatternKind.FROM_STEP),
        growth=event(PatternKind.GROWING),
    )
