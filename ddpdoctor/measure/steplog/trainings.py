"""The trainings of one process: each has a process group, and often a model, of its own, as in a sweep that trains one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as with_fields
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.numerics import Ints
from ddpdoctor.rundir import EventKind

from .log import RankLog
from .records import Step

_NOT_SETTINGS = ("id", "where")
"""What a DDP module's description says besides its settings."""


class Training(msgspec.Struct, frozen=True):
    """One training: steps that were taken with one process group, or with several one after the other whose DDP modules are alike."""

    number: int
    """From 1, in order."""
    first_step: int
    """Number that its first step has in the whole process."""
    logs: list[RankLog]
    """Its steps, numbered from 0, of the ranks that took any."""

    @property
    def steps(self) -> int:
        """How many it took."""
        return max((log.steps[-1].number + 1 for log in self.logs), default=0)

    @property
    def length_ns(self) -> int:
        """From its first step's beginning to its last step's end, ns."""
        return max((log.steps[-1].end_ns - log.steps[0].start_ns for log in self.logs), default=0)

    @property
    def steps_s(self) -> float:
        """Time that its steps would take if all took the median one, seconds: without the preparation in the first step."""
        return self.steps * self.step_s

    @property
    def step_s(self) -> float:
        """Median step time, seconds."""
        return float(np.median([step.length_ns for log in self.logs for step in log.steps])) / 1e9

    @property
    def is_synchronised(self) -> bool:
        """Whether its ranks wait for each other, as far as recorded. Its first step may begin with the end of the training before."""
        return any(point.step > 0 for log in self.logs for point in log.sync_points)

    @property
    def modules(self) -> list[dict[str, Any]]:
        """What its DDP modules are, as one of its ranks describes them."""
        return list(self.logs[0].record.info.get("ddp") or [])


def trainings_of(logs: Sequence[RankLog]) -> list[Training]:
    """The trainings that the ranks took one after the other; [] if there is only one. ``logs``: with steps."""
    firsts = _firsts(logs)
    if not firsts:
        return []
    logs = [replace(log, steps=[_begun(step, log.group_ends_ns) for step in log.steps]) for log in logs]
    joined: list[tuple[int, int | None]] = []
    known: list[dict[str, Any]] | None = None
    for first, end in zip([0, *firsts], [*firsts, None], strict=True):
        own = _settings(logs, first, end)
        if joined and (own is None or known is None or own == known):
            joined[-1] = (joined[-1][0], end)
            known = known or own
        else:
            joined.append((first, end))
            known = own
    if len(joined) < 2:
        return []
    return [
        Training(number, first, _of_training(logs, first, end))
        for number, (first, end) in enumerate(joined, 1)
    ]


def _begun(step: Step, group_ends_ns: Sequence[int]) -> Step:
    """The ``step``, without what comes before the end of a process group in it: that belongs to the training before."""
    start_ns, end_ns = step.recorded_ns
    later_ns = max((end for end in group_ends_ns if start_ns < end < end_ns), default=start_ns) - start_ns
    if not later_ns:
        return step
    return replace(
        step,
        start_ns=step.start_ns + later_ns,
        events=tuple(event.later(later_ns) for event in step.events if event.start_ns >= later_ns),
    )


def _firsts(logs: Sequence[RankLog]) -> list[int]:
    """Numbers of the first steps after a process group was destroyed; [] where the ranks disagree."""
    found: list[list[tuple[int, int]]] = []
    for log in logs:
        ends_ns = np.array([step.recorded_ns[1] for step in log.steps], np.int64)
        after = sorted({int(np.searchsorted(ends_ns, end_ns)) for end_ns in log.group_ends_ns})
        steps = log.steps
        found.append([(steps[at - 1].number, steps[at].number) for at in after if 0 < at < len(steps)])
    most = max(map(len, found), default=0)
    firsts = []
    for place in range(most):
        # Ranks may lack different steps next to the boundary, and one that died has none of the later ones.
        around = [of_rank[place] for of_rank in found if place < len(of_rank)]
        firsts.append(min(first for _, first in around))
        if any(last >= firsts[-1] for last, _ in around):
            return []
    return firsts


def _steps(log: RankLog, first: int, end: int | None) -> list[Step]:
    return [step for step in log.steps if step.number >= first and (end is None or step.number < end)]


def _modules(log: RankLog, steps: Sequence[Step]) -> list[dict[str, Any]] | None:
    """The DDP modules used in the ``steps``; None where that is unknown, as none was recorded in full or one is not described."""
    if not any(step.in_full for step in steps):
        return None
    kinds = (EventKind.FORWARD, EventKind.BACKWARD)
    used = {event.module for step in steps for event in step.events if event.kind in kinds} - {-1}
    every = log.record.info.get("ddp") or []
    known = {module.get("id", place): module for place, module in enumerate(every)}
    return [known[each] for each in sorted(used)] if used <= known.keys() else None


def _settings(logs: Sequence[RankLog], first: int, end: int | None) -> list[dict[str, Any]] | None:
    """The settings of the DDP modules of a training on its first rank that has any of its steps; None where they are unknown."""
    log, steps = next(((log, steps) for log in logs if (steps := _steps(log, first, end))), (logs[0], []))
    modules = _modules(log, steps)
    if modules is None:
        return None
    return [
        {name: value for name, value in module.items() if name not in _NOT_SETTINGS} for module in modules
    ]


def _of_training(logs: Sequence[RankLog], first: int, end: int | None) -> list[RankLog]:
    return [_part(log, steps, first, end) for log in logs if (steps := _steps(log, first, end))]


def _part(log: RankLog, steps: list[Step], first: int, end: int | None) -> RankLog:
    """What a rank recorded of one training."""
    start_ns, end_ns = steps[0].start_ns, steps[-1].end_ns
    info = {**log.record.info}
    modules = _modules(log, steps)
    if modules is not None:
        info["ddp"] = modules
    if first > 0:
        info.pop("joining_ns", None)
        info["started_ns"] = steps[0].recorded_ns[0]
    later_ends_ns = None
    if end is not None:
        own_end_ns = steps[-1].recorded_ns[1]
        later_ends_ns = max(log.record.info.get("ended_ns") or 0, log.steps[-1].recorded_ns[1])
        info["ended_ns"] = min((ns for ns in log.group_ends_ns if ns >= own_end_ns), default=own_end_ns)
        end_ns += info["ended_ns"] - own_end_ns
    from_ns = 0 if first == 0 else start_ns
    until_ns = np.iinfo(np.int64).max if end is None else end_ns
    return replace(
        log,
        record=with_fields(log.record, info=info),
        steps=tuple(replace(step, number=step.number - first) for step in steps),
        samples=_between(log.samples, from_ns, until_ns),
        burst_samples=_between(log.burst_samples, from_ns, until_ns),
        device_times={
            number - first: times
            for number, times in log.device_times.items()
            if number >= first and (end is None or number < end)
        },
        follows_training=first > 0,
        later_trainings_end_ns=later_ends_ns,
    )


def _between(samples: Ints, from_ns: int, until_ns: int) -> Ints:
    """The samples [S, 4] from one moment until another, epoch ns."""
    return samples[(samples[:, 0] >= from_ns) & (samples[:, 0] < until_ns)]
