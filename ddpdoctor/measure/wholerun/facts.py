"""The account of a run as facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpdoctor.measure.runfacts import RunFacts
from ddpdoctor.measure.sourcelines import SourceLines
from ddpdoctor.measure.steplog import RankLog

from .account import Launch, RunPart, run_account
from .pauses import pause_event

_FACTS = {
    "start_s": RunPart.START,
    "preparation_s": RunPart.PREPARATION,
    "first_batch_s": RunPart.FIRST_BATCH,
    "warm_up_s": RunPart.WARM_UP,
    "steps_s": RunPart.STEPS,
    "some_steps_s": RunPart.SOME_STEPS,
    "epochs_s": RunPart.EPOCHS,
    "evaluation_s": RunPart.EVALUATION,
    "checkpoint_s": RunPart.CHECKPOINTS,
    "pauses_s": RunPart.PAUSES,
    "suspended_s": RunPart.SUSPENDED,
    "profiler_s": RunPart.PROFILER,
    "unrecorded_s": RunPart.UNKNOWN,
}


def run_facts(logs: Sequence[RankLog], launches: Mapping[str, Launch], lines: SourceLines) -> RunFacts:
    """The facts ``run``; ``lines`` are those of the same ``logs``. The wall time is known where the launcher of each rank is."""
    account = run_account(logs, launches)
    if account is None:
        return RunFacts()
    is_whole = all(log.host in launches and launches[log.host].ended_ns is not None for log in logs)
    wall_s = account.wall_s if is_whole else None
    parts = account.parts_s
    return RunFacts(
        wall_s=wall_s,
        goodput=account.goodput if is_whole else None,
        **{name: parts.get(part) for name, part in _FACTS.items()},
        end_s=parts.get(RunPart.END, 0.0) + parts.get(RunPart.TEARDOWN, 0.0) if is_whole else None,
        pause=pause_event(account.patterns, logs, lines, wall_s),
    )
