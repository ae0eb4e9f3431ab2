"""Which steps speak for the job: without warm-up, evaluation, and what the profiler itself disturbed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ddpdoctor.rundir import EventKind, Mark

from .log import RankLog, Step

WARM_UP_STEPS = 3
"""DDP rebuilds its buckets in the second iteration; allocators, caches and thread pools settle in the same
time."""
_LONGEST_WARM_UP = 20
_SETTLED = 1.5
"""Steps at the front count as warm-up while they take more than this multiple of the median (compilation,
autotuning)."""
_ENOUGH = 8
"""With at least this many undisturbed steps, the steps inside the profiler's window are set aside too."""
PROFILED, OPENED = Mark.PROFILED, Mark.OPENED
"""Marks of a step: inside our window; the window was opened in it."""
AROUND_WINDOW = (OPENED, Mark.CLOSED, Mark.SAVING)
SUSPENDED = "suspended"
"""A mark given by :mod:`.suspensions`: the process was stopped in this step."""
_DISTURBED = (*AROUND_WINDOW, Mark.USER_PROFILER)


def choose_steps(logs: Sequence[RankLog]) -> tuple[set[int], dict[str, int]]:
    """Numbers of the steps to measure, and how many were set aside, by reason."""
    chosen, reasons = chosen_and_why(logs)
    return chosen, dict(Counter(reasons.values()))


def chosen_and_why(logs: Sequence[RankLog]) -> tuple[set[int], dict[int, str]]:
    """Numbers of the steps to measure, and of all others why not."""
    everywhere = recorded_everywhere(logs)
    anywhere = {step.number for log in logs for step in log.steps}
    reasons: dict[int, str] = dict.fromkeys(anywhere - set(everywhere), "missing on a rank")
    main = main_loaders(logs)
    for number, steps in everywhere.items():
        if any(disturbed(step) for step in steps):
            reasons[number] = "disturbed by the profiler"
            reasons.setdefault(number + 1, "disturbed by the profiler")
        elif any(evaluates(step, loaders) for step, loaders in zip(steps, main, strict=True)):
            reasons[number] = "evaluation"
    _warm_up(everywhere, reasons)
    for number, steps in everywhere.items():
        if any(SUSPENDED in step.marks for step in steps):
            # Others may have waited for this rank in the next one.
            reasons[number] = reasons[number + 1] = SUSPENDED
    candidates = set(everywhere) - set(reasons)
    profiled = {n for n in candidates if any(PROFILED in step.marks for step in everywhere[n])}
    if len(candidates - profiled) >= _ENOUGH:
        reasons.update(dict.fromkeys(profiled, "inside the profiled window"))
        candidates -= profiled
    return candidates, {number: reason for number, reason in reasons.items() if number in anywhere}


def recorded_everywhere(logs: Sequence[RankLog]) -> dict[int, list[Step]]:
    """By number, in order: the step on each rank, of those that all ranks recorded."""
    by_number = [{step.number: step for step in log.steps} for log in logs]
    numbers = sorted(set.intersection(*(set(of) for of in by_number))) if by_number else []
    return {number: [of[number] for of in by_number] for number in numbers}


def longest_ns(steps: Sequence[Step]) -> int:
    """A step of all ranks is as long as its longest one."""
    return max(step.end - step.start for step in steps)


def _warm_up(everywhere: dict[int, list[Step]], reasons: dict[int, str]) -> None:
    order = list(everywhere)
    if order == [0]:
        reasons[0] = "warm-up"  # of a job that died in its second step, say: nothing but start-up
    if len(order) < 2:
        return
    lengths = np.array([longest_ns(steps) for steps in everywhere.values()], float)
    settled = _SETTLED * float(np.median(lengths))
    fewest = min(WARM_UP_STEPS, max(1, len(order) // 4))
    for place, number in enumerate(order[:_LONGEST_WARM_UP]):
        if place >= fewest and lengths[place] <= settled:
            break
        if place >= fewest and place >= len(order) // 2:
            break
        reasons[number] = "warm-up"


def disturbed(step: Step) -> bool:
    """Whether a profiler, ours or the job's, was opened, closed or saved in this step."""
    return any(mark in _DISTURBED for mark in step.marks)


def main_loaders(logs: Sequence[RankLog]) -> list[set[int]]:
    """Per rank, see :attr:`RankLog.main_loaders`."""
    return [log.main_loaders for log in logs]


def undisturbed(logs: Sequence[RankLog]) -> list[tuple[int, list[Step]]]:
    """Number, and the step on each rank, of what all ranks recorded after the warm-up, and neither a profiler nor a
    suspension disturbed."""
    found = list(recorded_everywhere(logs).items())[WARM_UP_STEPS:]
    stopped = {number for number, steps in found if any(SUSPENDED in step.marks for step in steps)}
    return [
        (number, steps)
        for number, steps in found
        if not any(disturbed(step) for step in steps) and not stopped & {number, number - 1}
    ]


def evaluates(step: Step, main: set[int]) -> bool:
    """Whether the job evaluates in this step: a forward without gradients, or batches of another loader."""
    return any(
        e.kind == EventKind.EVALUATION
        or (e.kind == EventKind.DATA and not e.exhausted and main and e.loader not in main)
        for e in step.events
    )
