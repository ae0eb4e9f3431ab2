"""The trainings of one process: each has a process group, and often a model, of its own, as in a sweep that trains one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as with_fields
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

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
    groups = list(zip([0, *firsts], [*firsts, None], strict=True))
    joined: list[tuple[int, int | None]] = groups[:1]
    for first, end in groups[1:]:
        before = joined[-1]
        if _settings(logs, *before) == _settings(logs, first, end):
            joined[-1] = (before[0], end)
        else:
            joined.append((first, end))
    if len(joined) < 2:
        return []
    return [
        Training(number, first, _of_training(logs, first, end))
        for number, (first, end) in enumerate(joined, 1)
    ]


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


def _modules(log: RankLog, steps: Sequence[Step]) -> list[dict[str, Any]]:
    """The DDP modules used in the ``steps``; all of the log where none was recorded in full."""
    every = log.record.info.get("ddp") or []
    kinds = (EventKind.FORWARD, EventKind.BACKWARD)
    used = {event.module for step in steps for event in step.events if event.kind in kinds}
    if not any(step.in_full for step in steps):
        return list(every)
    return [module for place, module in enumerate(every) if module.get("id", place) in used]


def _settings(logs: Sequence[RankLog], first: int, end: int | None) -> list[dict[str, Any]]:
    """The settings of the DDP modules of a training on its first rank that has any of its steps."""
    log, steps = next(((log, steps) for log in logs if (steps := _steps(log, first, end))), (logs[0], []))
    return [
        {name: value for name, value in module.items() if name not in _NOT_SETTINGS}
        for module in _modules(log, steps)
    ]


def _of_training(logs: Sequence[RankLog], first: int, end: int | None) -> list[RankLog]:
    return [_part(log, steps, first, end) for log in logs if (steps := _steps(log, first, end))]


def _part(log: RankLog, steps: list[Step], first: int, end: int | None) -> RankLog:
    """What a rank recorded of one training."""
    start_ns, end_ns = steps[0].start_ns, steps[-1].end_ns
    info = {**log.record.info, "ddp": _modules(log, steps)}
    if first > 0:
        info.pop("joining_ns", None)
        info["started_ns"] = steps[0].recorded_ns[0]
    if end is not None:
        ended_ns = (ns for ns in log.group_ends_ns if ns >= steps[-1].recorded_ns[1])
        info["ended_ns"] = min(ended_ns, default=steps[-1].recorded_ns[1])
        end_ns += info["ended_ns"] - steps[-1].recorded_ns[1]
    from_ns = 0 if first == 0 else start_ns
    until_ns = np.iinfo(np.int64).max if end is None else end_ns
    return replace(
        log,
        record=with_fields(log.record, info=info),
        steps=tuple(replace(step, number=step.number - first) for step in steps),
        samples=log.samples[(log.samples[:, 0] >= from_ns) & (log.samples[:, 0] < until_ns)],
        burst_samples=log.burst_samples[
            (log.burst_samples[:, 0] >= from_ns) & (log.burst_samples[:, 0] < until_ns)
        ],
        device_times={
            number - first: times
            for number, times in log.device_times.items()
            if number >= first and (end is None or number < end)
        },
        follows_training=first > 0,
        precedes_training=end is not None,
    )
