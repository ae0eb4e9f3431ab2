"""Selects the steps to measure: without warm-up, evaluation, and steps disturbed by a profiler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.numerics import Array, Ints, Mask
from ddpdoctor.rundir.stepevents import EventKind, Mark

from .log import RankLog
from .patterns import step_patterns, without_run_ahead
from .records import Step


class Tuning(msgspec.Struct, frozen=True):
    """Parameters of the warm-up and of the exclusion of profiled steps."""

    longest_warm_up: int = 20
    """Longest warm-up, in steps. A job that has not settled by then is measured as it is."""
    settled: float = 1.5
    """The first steps count as warm-up while they take more than this multiple of the median (compilation, autotuning)."""
    enough: int = 8
    """If at least this many other steps remain, the steps inside the profiler's window are excluded."""


TUNING = Tuning()
WARM_UP_STEPS = 3
"""DDP rebuilds its buckets in the second iteration; allocators, caches and thread pools settle in the same
time."""

PROFILED, OPENED = Mark.PROFILED, Mark.OPENED
"""Marks of a step inside ddpdoctor's profiler window, and of the step in which the window was opened."""
AROUND_WINDOW = (OPENED, Mark.CLOSED, Mark.SAVING)
SUSPENDED = "suspended"
"""Mark of a step in which the process was stopped, set by :func:`ddpdoctor.measure.align.exclude_suspended`. As a reason for
exclusion, it also applies to the next step."""
_DISTURBED_BY = (*AROUND_WINDOW, Mark.USER_PROFILER)

_MISSING = "missing on a rank"
DISTURBED = "disturbed by the profiler"
EVALUATION = "evaluation"
WARM_UP = "warm-up"
_PAUSE = "single pause"
_IN_WINDOW = "inside the profiled window"
_COMPARABLE = (None, _PAUSE, _IN_WINDOW, _MISSING)
"""Reasons for exclusion that do not change the length of a step; None: not excluded."""

StepsByNumber = Mapping[int, Sequence[Step]]
"""Step number → the step on each rank."""


def select_steps(logs: Sequence[RankLog]) -> tuple[set[int], dict[int, str]]:
    """(numbers of the steps to measure, step number → reason for exclusion of the others)."""
    everywhere = recorded_everywhere(logs)
    anywhere = {step.number for log in logs for step in log.steps}
    # If several reasons apply, the last one in this dict is reported.
    reasons = {
        **_disturbed_or_evaluating(logs, everywhere),
        **dict.fromkeys(anywhere - set(everywhere), _MISSING),
        **dict.fromkeys(_warm_up(everywhere), WARM_UP),
        **dict.fromkeys(_suspended(everywhere), SUSPENDED),
    }
    # One or two steps so long that they would dominate the mean. The time after the last synchronisation of a step belongs to the
    # next cycle, so the step after a pause is excluded too.
    numbers, lengths_s = lengths_of_run(logs)
    patterns = step_patterns(numbers, lengths_s, comparable_steps(numbers, reasons))
    single_pauses = next((pattern.steps for pattern in patterns if not pattern.recurs), [])
    paused = {each for number in single_pauses for each in (number, number + 1)}
    reasons = {**dict.fromkeys(paused & set(everywhere), _PAUSE), **reasons}
    candidates = set(everywhere) - set(reasons)
    profiled = {n for n in candidates if any(PROFILED in step.marks for step in everywhere[n])}
    if len(candidates - profiled) >= TUNING.enough:
        reasons.update(dict.fromkeys(profiled, _IN_WINDOW))
        candidates -= profiled
    return candidates, {number: reason for number, reason in reasons.items() if number in anywhere}


def lengths_of_run(logs: Sequence[RankLog]) -> tuple[Ints, Array]:
    """Numbers [N] of all recorded steps, and their lengths [N] in seconds, including steps of which only the times were kept. A length is
    the time between the last rank's ends of two consecutive steps, so a delay after the last synchronisation counts once. If not all
    of these ranks recorded both steps, it is the length on the slowest rank. On devices, see :func:`without_run_ahead`."""
    recorded: defaultdict[int, list[Step]] = defaultdict(list)
    for log in logs:
        for step in log.steps:
            recorded[step.number].append(step)
    numbers = sorted(recorded)
    ends = {number: (len(steps), max(step.end_ns for step in steps)) for number, steps in recorded.items()}
    lengths_ns = []
    for number in numbers:
        (ranks, end_ns), (ranks_before, start_ns) = ends[number], ends.get(number - 1, (0, 0))
        known = ranks == ranks_before and start_ns < end_ns
        lengths_ns.append(end_ns - start_ns if known else longest_ns(recorded[number]))
    at, lengths_s = np.array(numbers, np.int64), np.array(lengths_ns, float) / 1e9
    if any(log.computes_on_device and not log.on_device_time for log in logs):
        lengths_s = without_run_ahead(at, lengths_s, np.isin(at, list(evaluated(logs) | _saved(logs))))
    return at, lengths_s


def _saved(logs: Sequence[RankLog]) -> set[int]:
    """Numbers of the steps in which any rank writes or reads a checkpoint."""
    kinds = (EventKind.SAVE, EventKind.LOAD)
    return {
        step.number for log in logs for step in log.steps if any(event.kind in kinds for event in step.events)
    }


def comparable_steps(numbers: Ints, reasons: Mapping[int, str]) -> Mask:
    """[N] which steps have a length typical of the job: no warm-up, no evaluation, no outside disturbance."""
    return np.array([reasons.get(number) in _COMPARABLE for number in numbers.tolist()], bool)


def recorded_everywhere(logs: Sequence[RankLog]) -> dict[int, list[Step]]:
    """Step number → the step on each rank, for the steps that all ranks recorded, in order."""
    ranks = [{step.number: step for step in log.steps} for log in logs]
    numbers = sorted(set.intersection(*(set(steps) for steps in ranks))) if ranks else []
    return {number: [steps[number] for steps in ranks] for number in numbers}


def longest_ns(steps: Sequence[Step]) -> int:
    """Length of a step on the slowest rank, ns."""
    return max(step.length_ns for step in steps)


def _disturbed_or_evaluating(logs: Sequence[RankLog], everywhere: StepsByNumber) -> dict[int, str]:
    """Reasons for steps disturbed by a profiler, the steps after these, and steps with evaluation."""
    reasons: dict[int, str] = {}
    evaluating = evaluated(logs)
    for number, steps in everywhere.items():
        if any(disturbed(step) for step in steps):
            reasons[number] = DISTURBED
            reasons.setdefault(number + 1, DISTURBED)
        elif number in evaluating:
            reasons[number] = EVALUATION
    return reasons


def _suspended(everywhere: StepsByNumber) -> set[int]:
    """Steps in which a rank was stopped, and the steps after these, in which others may have waited for it."""
    stopped = {n for n, steps in everywhere.items() if any(SUSPENDED in step.marks for step in steps)}
    return stopped | {number + 1 for number in stopped}


def _warm_up(everywhere: StepsByNumber) -> list[int]:
    """Numbers of the first steps, until their lengths have settled."""
    order = list(everywhere)
    if order == [0]:
        return order  # only start-up, for example of a job that died in its second step
    if len(order) < 2:
        return []
    lengths = np.array([longest_ns(steps) for steps in everywhere.values()], float)
    settled = TUNING.settled * float(np.median(lengths))
    fewest = min(WARM_UP_STEPS, max(1, len(order) // 4))
    for place, length in enumerate(lengths[: TUNING.longest_warm_up]):
        if place >= fewest and (length <= settled or place >= len(order) // 2):
            return order[:place]
    return order[: TUNING.longest_warm_up]


def disturbed(step: Step) -> bool:
    """Whether a profiler, ddpdoctor's or the job's, was opened, closed or saved in this step."""
    return bool(step.marks) and any(mark in _DISTURBED_BY for mark in step.marks)


def settled_steps(logs: Sequence[RankLog]) -> StepsByNumber:
    """Steps that all ranks recorded in full, without warm-up and steps in which a rank was stopped."""
    everywhere = recorded_everywhere(logs)
    excluded = _suspended(everywhere).union(_warm_up(everywhere))
    return {
        number: steps
        for number, steps in everywhere.items()
        if number not in excluded and all(step.in_full for step in steps)
    }


def undisturbed(logs: Sequence[RankLog]) -> list[tuple[int, list[Step]]]:
    """(number, step on each rank) of the steps that all ranks recorded, without warm-up and steps disturbed by a profiler or a
    suspension."""
    settled = dict(list(recorded_everywhere(logs).items())[WARM_UP_STEPS:])
    stopped = _suspended(settled)
    return [
        (number, steps)
        for number, steps in settled.items()
        if number not in stopped and not any(disturbed(step) for step in steps)
    ]


def evaluated(logs: Sequence[RankLog]) -> set[int]:
    """Numbers of the steps in which any rank evaluates."""
    return set().union(*(log.evaluated for log in logs))
