"""The account of a run as facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpdoctor.measure.runfacts import RunEvent, RunFacts
from ddpdoctor.measure.sourcelines import LogSourceLines
from ddpdoctor.measure.steplog import PatternKind, RankLog

from .account import Launch, RunPart, run_account
from .events import event_of


def run_facts(
    logs: Sequence[RankLog], why: Mapping[int, str], launches: Mapping[str, Launch], lines: LogSourceLines
) -> RunFacts:
    """The facts ``run``; ``why`` by step number it is excluded, ``lines`` of the same ``logs``. The wall time is known if those of the
    launchers of all ranks are."""
    account = run_account(logs, why, launches)
    if account is None:
        return RunFacts()
    is_whole = account.is_whole
    wall_s = account.wall_s if is_whole else None
    parts_s, patterns = account.parts_s.get, account.patterns

    def event(kind: PatternKind) -> RunEvent | None:
        return event_of(kind, patterns, logs, lines, wall_s)

    return RunFacts(
        wall_s=wall_s,
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
