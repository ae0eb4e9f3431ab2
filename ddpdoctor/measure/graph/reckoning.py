"""Every step that was recorded is measured, or has a reason why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ddpdoctor.measure.steplog import RankLog

from .graph import CycleGroup, Graph, RankSteps

LEFT_OUT = "left out of a long log"
"""Steps that were recorded and not read, see ``steplog.bound``."""


def recorded_steps(steps: Iterable[RankSteps]) -> set[int]:
    """Numbers of the steps that any rank recorded."""
    return {int(number) for of_rank in steps for number in of_rank.steps}


def measured_steps(groups: Iterable[CycleGroup]) -> set[int]:
    """Numbers of the steps that are measured."""
    return {int(number) for group in groups for number in group.steps}


def set_aside(
    steps: Iterable[RankSteps], groups: Iterable[CycleGroup], reason: Callable[[int], str]
) -> dict[str, int]:
    """How many steps are not measured, by ``reason`` of their numbers."""
    left = recorded_steps(steps) - measured_steps(groups)
    return dict(Counter(reason(number) for number in sorted(left)))


def all_set_aside(graph: Graph, logs: Sequence[RankLog]) -> dict[str, int]:
    """The same of ``graph``, with the steps of ``logs`` that it does not know at all, and those that were not read."""
    known = recorded_steps(graph.steps) | measured_steps(graph.groups)
    unknown = {step.number for log in logs for step in log.steps} - known
    reason = "outside the profiled window" if graph.source == "trace" else "not timed on every device"
    more = {reason: len(unknown), LEFT_OUT: max((log.left_out for log in logs), default=0)}
    return {**graph.set_aside, **{reason: count for reason, count in more.items() if count}}
