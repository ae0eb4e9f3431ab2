"""The attempts of a restarted run with the cost of the restarts, and the trainings of a run with several in the same processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.runfacts import AttemptFacts, RestartFacts, RunFacts, TrainingFacts, Where
from ddpdoctor.measure.steplog import RankLog, Step, Training
from ddpdoctor.rundir.stepevents import EventKind


class AttemptRecord(msgspec.Struct, frozen=True):
    """Records of one attempt; times are epoch ns."""

    logs: Sequence[RankLog]
    """Logs of at least some of its ranks."""
    started_ns: int | None
    failed_ns: int | None
    """When its first rank failed; None if none did."""
    ended_ns: int | None
    """When its last rank had ended."""
    ranks: Sequence[int] = ()
    """Ranks that failed."""
    ended: str = ""
    where: Sequence[Where] = ()
    world_size: int | None = None
    is_measured: bool = False
    unrecorded: int = 0
    """Number of attempts just before it that are not in the recording."""

    @property
    def steps(self) -> int:
        """Number of steps taken."""
        return max((log.steps[-1].number + 1 for log in self.logs if log.steps), default=0)

    @property
    def step_s(self) -> float | None:
        """Median step time, seconds; None without a step."""
        lengths = [step.length_ns / 1e9 for log in self.logs for step in log.steps]
        return float(np.median(lengths)) if lengths else None

    @property
    def first_step_ns(self) -> int | None:
        """End of the first step on all of its ranks."""
        return max((log.steps[0].recorded_ns[1] for log in self.logs if log.steps), default=None)

    @property
    def saved_step(self) -> int | None:
        """The last step in which any rank saved a checkpoint; that save may be incomplete."""
        saved = [step.number for step in self._steps_with(EventKind.SAVE)]
        return max([*saved, *(log.saved for log in self.logs if log.saved is not None)], default=None)

    @property
    def has_checkpoints(self) -> bool:
        """Whether any rank saved or loaded a checkpoint."""
        return self.saved_step is not None or any(self._steps_with(EventKind.LOAD))

    def _steps_with(self, kind: EventKind) -> Iterator[Step]:
        return (
            step for log in self.logs for step in log.steps if any(each.kind == kind for each in step.events)
        )


def attempt_facts(records: Sequence[AttemptRecord], launched_ns: int | None) -> list[AttemptFacts]:
    """The attempts as facts, in order; [] if there is only one. ``launched_ns``: start of the launcher."""
    if len(records) < 2:
        return []
    return [
        AttemptFacts(
            number=number,
            is_measured=record.is_measured,
            started_s=_since_s(launched_ns, record.started_ns),
            ended_s=_since_s(launched_ns, record.ended_ns),
            world_size=record.world_size,
            steps=record.steps,
            first_step=first_step,
            step_ms=None if record.step_s is None else 1e3 * record.step_s,
            checkpoint_step=record.saved_step,
            ranks=list(record.ranks),
            ended=record.ended,
            where=list(record.where),
        )
        for number, (record, first_step) in enumerate(zip(records, _first_steps(records), strict=True), 1)
    ]


def with_first_findings(run: RunFacts, findings: Mapping[int, str]) -> RunFacts:
    """The facts, each attempt with the rule of the first finding when it is diagnosed alone, by number; "" if it has none."""
    return replace(run, attempts=[replace(each, finding=findings.get(each.number)) for each in run.attempts])


def _first_steps(records: Sequence[AttemptRecord]) -> list[int | None]:
    """The first step of each attempt, counted over the whole job: it continues from the last checkpoint, without one from step 0."""
    if not any(record.has_checkpoints for record in records):
        return [None] * len(records)
    found: list[int | None] = []
    saved: int | None = 0
    for record in records:
        saved = None if record.unrecorded else saved
        found.append(saved)
        if saved is not None and record.saved_step is not None:
            saved += record.saved_step
    return found


def restart_facts(records: Sequence[AttemptRecord]) -> RestartFacts | None:
    """The time lost between each failed attempt and the next one; None if none failed."""
    failed = [(old, new) for old, new in pairwise(records) if old.failed_ns is not None]
    if not failed:
        return None
    detection = [_since_s(old.failed_ns, old.ended_ns) for old, _ in failed]
    start = [_since_s(old.ended_ns, new.first_step_ns) for old, new in failed]
    has_checkpoints = any(record.has_checkpoints for record in records)
    # A checkpoint saved within step n holds the n steps before. Without one, the next attempt starts where this one did.
    repeated = [max(old.steps - (old.saved_step or 0), 0) for old, _ in failed] if has_checkpoints else []
    repeated_s = [steps * (old.step_s or 0.0) for (old, _), steps in zip(failed, repeated, strict=False)]
    sums = [_sum(detection), _sum(start), _sum(repeated_s)]
    last = failed[-1][0]
    return RestartFacts(
        count=len(failed) + sum(new.unrecorded for _, new in failed),
        ranks=list(last.ranks),
        ended=last.ended,
        where=list(last.where),
        repeated_steps=sum(repeated) if has_checkpoints else None,
        repeated_s=sums[2],
        detection_s=sums[0],
        start_s=sums[1],
        total_s=sum(each for each in sums if each is not None),
    )


def _since_s(start_ns: int | None, end_ns: int | None) -> float | None:
    return None if start_ns is None or end_ns is None else max(end_ns - start_ns, 0) / 1e9


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def with_trainings(
    run: RunFacts, trainings: Sequence[Training], measured: int, findings: Mapping[int, str]
) -> RunFacts:
    """The facts of the ``measured`` training (a number), with a list of all trainings and the goodput of all their steps.
    ``findings``: rule of the first finding of each other training that was diagnosed, by number; "" if it has none."""
    if not trainings:
        return run
    goodput = run.goodput
    if goodput is not None and run.wall_s:
        others_s = sum(each.steps_s for each in trainings if each.number != measured)
        goodput = min(goodput + others_s / run.wall_s, 1.0)
    return replace(
        run,
        goodput=goodput,
        trainings=[
            TrainingFacts(
                number=each.number,
                is_measured=each.number == measured,
                first_step=each.first_step,
                steps=each.steps,
                total_s=each.length_ns / 1e9,
                step_ms=1e3 * each.step_s,
                models=[str(module.get("module")) for module in each.modules if module.get("module")],
                parameters_bytes=sum(module.get("parameters_bytes") or 0.0 for module in each.modules)
                or None,
                finding=findings.get(each.number),
            )
            for each in trainings
        ],
    )
