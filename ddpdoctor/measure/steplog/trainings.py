"""Divides the steps of one process into trainings. A sweep, for example, trains several models one after the other, each with its own
process group."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace as with_fields
from functools import cached_property
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.numerics import Ints
from ddpdoctor.rundir.stepevents import EventKind

from .log import RankLog
from .records import Step

_NOT_SETTINGS = ("id", "where")
"""Fields of a DDP module's description that are not settings."""


class Training(msgspec.Struct, frozen=True, dict=True):
    """Steps taken with one process group, or with consecutive ones whose DDP modules have equal settings."""

    number: int
    """From 1, in order."""
    first_step: int
    """Number of its first step within the whole process."""
    logs: list[RankLog]
    """Logs of the ranks that took any of its steps; steps are numbered from 0."""

    @property
    def steps(self) -> int:
        """Number of steps."""
        return max((log.steps[-1].number + 1 for log in self.logs), default=0)

    @property
    def length_ns(self) -> int:
        """From the start of its first step to the end of its last, ns."""
        return max((log.steps[-1].end_ns - log.steps[0].start_ns for log in self.logs), default=0)

    @property
    def steps_s(self) -> float:
        """Number of steps times the median step, seconds; this excludes the start-up in the first step."""
        return self.steps * self.step_s

    @cached_property
    def step_s(self) -> float:
        return float(np.median([step.length_ns for log in self.logs for step in log.steps])) / 1e9

    @property
    def is_synchronised(self) -> bool:
        """Whether its ranks are known to synchronise. Its first step is ignored: it may include the end of the previous training."""
        return any(point.step > 0 for log in self.logs for point in log.sync_points)

    @property
    def modules(self) -> list[dict[str, Any]]:
        """Descriptions of its DDP modules, from one of its ranks."""
        return list(self.logs[0].record.info.get("ddp") or [])


def trainings_of(logs: Sequence[RankLog]) -> list[Training]:
    """The consecutive trainings of the ranks; [] if there is only one. ``logs``: must have steps."""
    firsts = _first_steps_of_groups(logs)
    if not firsts:
        return []
    bounds = [0, *firsts]
    # The steps of each rank, by process group.
    groups = list(zip(*(_steps_by_group(log, firsts) for log in logs), strict=True))
    training_starts: list[int] = []
    known: list[dict[str, Any]] | None = None
    for place, of_ranks in enumerate(groups):
        own = _ddp_settings(logs, of_ranks)
        if not training_starts or not (own is None or known is None or own == known):
            training_starts.append(place)
            known = own
        known = known or own
    if len(training_starts) < 2:
        return []
    found = []
    for number, (place, until) in enumerate(
        zip(training_starts, [*training_starts[1:], len(groups)], strict=True), 1
    ):
        steps = [
            [step for part in of_rank for step in part] for of_rank in zip(*groups[place:until], strict=True)
        ]
        is_last = until == len(groups)
        numbers = {step.number for own in steps for step in own}
        end = max(numbers, default=-1) + 1 if is_last else bounds[until]
        left_out = min(end - bounds[place] - len(numbers), max(log.left_out for log in logs))
        parts = [
            replace(_training_log(log, own, bounds[place], is_last=is_last), left_out=left_out)
            for log, own in zip(logs, steps, strict=True)
            if own
        ]
        found.append(Training(number, bounds[place], parts))
    return found


def _steps_by_group(log: RankLog, firsts: Sequence[int]) -> list[Sequence[Step]]:
    """The steps of a rank by process group. ``firsts``: numbers of the first steps of all groups but the first."""
    steps = sorted(log.steps, key=lambda step: step.number)
    cuts = [0, *(bisect_left(steps, first, key=lambda step: step.number) for first in firsts), len(steps)]
    return [steps[begin:end] for begin, end in pairwise(cuts)]


def _without_previous_training(steps: Sequence[Step], group_ends_ns: Sequence[int]) -> Sequence[Step]:
    """The ``steps``; if a process group ends within the first one, without the part before that, which is of the previous training."""
    if not steps:
        return steps
    start_ns, end_ns = steps[0].recorded_ns
    later_ns = max((end for end in group_ends_ns if start_ns < end < end_ns), default=start_ns) - start_ns
    first = replace(
        steps[0],
        start_ns=steps[0].start_ns + later_ns,
        events=tuple(event.rebased(later_ns) for event in steps[0].events if event.start_ns >= later_ns),
    )
    return [first, *steps[1:]] if later_ns else steps


def _first_steps_of_groups(logs: Sequence[RankLog]) -> list[int]:
    """Numbers of the first steps after a process group was destroyed; [] if the ranks disagree."""
    found: list[list[tuple[int, int]]] = []
    for log in logs:
        ends_ns = np.array([step.recorded_ns[1] for step in log.steps], np.int64)
        after = sorted({int(np.searchsorted(ends_ns, end_ns)) for end_ns in log.group_ends_ns})
        steps = log.steps
        found.append([(steps[at - 1].number, steps[at].number) for at in after if 0 < at < len(steps)])
    most = max(map(len, found), default=0)
    firsts = []
    for place in range(most):
        # Ranks may lack different steps next to the boundary, and a rank that died lacks all later ones.
        around = [of_rank[place] for of_rank in found if place < len(of_rank)]
        firsts.append(min(first for _, first in around))
        if any(last >= firsts[-1] for last, _ in around):
            return []
    return firsts


def _used_modules(log: RankLog, steps: Sequence[Step]) -> list[dict[str, Any]] | None:
    """The DDP modules used in the ``steps``; None if unknown: no step was recorded in full, or a module has no description."""
    if not any(step.in_full for step in steps):
        return None
    kinds = (EventKind.FORWARD, EventKind.BACKWARD)
    used = {event.module for step in steps for event in step.events if event.kind in kinds} - {-1}
    every = log.record.info.get("ddp") or []
    known = {module.get("id", place): module for place, module in enumerate(every)}
    return [known[each] for each in sorted(used)] if used <= known.keys() else None


def _ddp_settings(logs: Sequence[RankLog], of_ranks: Sequence[Sequence[Step]]) -> list[dict[str, Any]] | None:
    """Settings of the DDP modules of a process group, from the first rank that took any of its steps; None if unknown."""
    log, steps = next(
        ((log, steps) for log, steps in zip(logs, of_ranks, strict=True) if steps), (logs[0], ())
    )
    modules = _used_modules(log, _without_previous_training(steps, log.group_ends_ns))
    if modules is None:
        return None
    return [
        {name: value for name, value in module.items() if name not in _NOT_SETTINGS} for module in modules
    ]


def _training_log(log: RankLog, steps: Sequence[Step], first: int, *, is_last: bool) -> RankLog:
    """A rank's records of one training. ``first``: number of its first step within the whole process."""
    steps = _without_previous_training(steps, log.group_ends_ns)
    start_ns, end_ns = steps[0].start_ns, steps[-1].end_ns
    info = {**log.record.info}
    modules = _used_modules(log, steps)
    if modules is not None:
        info["ddp"] = modules
    if first > 0:
        info.pop("joining_ns", None)
        info["started_ns"] = steps[0].recorded_ns[0]
    later_ends_ns = None
    if not is_last:
        own_end_ns = steps[-1].recorded_ns[1]
        later_ends_ns = max(log.record.info.get("ended_ns") or 0, log.steps[-1].recorded_ns[1])
        info["ended_ns"] = min((ns for ns in log.group_ends_ns if ns >= own_end_ns), default=own_end_ns)
        end_ns += info["ended_ns"] - own_end_ns
    from_ns = 0 if first == 0 else start_ns
    until_ns = np.iinfo(np.int64).max if is_last else end_ns
    return replace(
        log,
        record=with_fields(log.record, info=info),
        steps=tuple(replace(step, number=step.number - first) for step in steps),
        samples=_samples_between(log.samples, from_ns, until_ns),
        burst_samples=_samples_between(log.burst_samples, from_ns, until_ns),
        device_times={
            step.number - first: times
            for step in steps
            if (times := log.device_times.get(step.number)) is not None
        },
        follows_training=first > 0,
        later_trainings_end_ns=later_ends_ns,
    )


def _samples_between(samples: Ints, from_ns: int, until_ns: int) -> Ints:
    """The samples [S, 4] in [from_ns, until_ns), epoch ns."""
    return samples[(samples[:, 0] >= from_ns) & (samples[:, 0] < until_ns)]
