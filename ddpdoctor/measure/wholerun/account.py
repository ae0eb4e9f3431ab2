"""Divides the wall time of a run, for each rank, into parts that do not overlap and add up to it.

The sources are the start and end of the rank's launcher (the run's manifest), the creation of its process group and the end of
its recording (``rank.json``), and its steps, each of which begins when the previous one ends. If a step is long for a known reason, its
time up to the typical length counts as an ordinary step, and the excess as the part of that reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.numerics import Array, Ints, Mask
from ddpdoctor.measure.steplog import (
    DISTURBED,
    EVALUATION,
    SUSPENDED,
    WARM_UP,
    Event,
    PatternKind,
    RankLog,
    Step,
    StepPattern,
    comparable_steps,
    lengths_of_run,
    long_steps,
    pause_steps,
    step_patterns,
    usual_lengths,
)
from ddpdoctor.rundir.stepevents import EventKind

_MAX_USUAL_RATIO = 1.5
"""Unrecorded steps of at most this multiple of the typical length, on average, count as ordinary steps dropped from a long log."""
_MAX_RUN_NS = 366 * 86_400 * 10**9
"""A year. A launcher that started earlier used a clock that was set later."""
_MIN_CHECKPOINT_SHARE = 0.5
"""Saving or loading is the reason for a long step if it takes at least this share of the excess over the typical length."""


class RunPart(StrEnum):
    """A part of a rank's wall time, in the order of the run."""

    START = "start"
    """From the launcher's start until the process group exists: interpreter, imports, rendezvous."""
    EARLIER_ATTEMPTS = "earlier_attempts"
    """The same time for a rank that an elastic launcher restarted: earlier attempts, and the start of this one."""
    OTHER_TRAININGS = "other_trainings"
    """Before the first and after the last step, if the process had other trainings then."""
    PREPARATION = "preparation"
    """Until the first batch is requested or the first forward pass begins: model, DDP's constructor, dataset, restored checkpoint."""
    FIRST_BATCH = "first_batch"
    """Wait for the first batch."""
    WARM_UP = "warm_up"
    """Excess time of the first steps, until their lengths are stable: compilation, autotuning, caches."""
    STEPS = "steps"
    """Ordinary steps, and the typical length of all other steps."""
    SOME_STEPS = "some_steps"
    """Excess time of every n-th step."""
    EPOCHS = "epochs"
    """Excess time of steps in which a pass over a loader begins or ends."""
    EVALUATION = "evaluation"
    """Excess time of steps in which the job evaluates."""
    CHECKPOINTS = "checkpoints"
    """Excess time of steps in which a rank saves or loads a checkpoint."""
    PAUSES = "pauses"
    """Excess time of single, far longer steps without any other reason."""
    SUSPENDED = "suspended"
    """Excess time of steps in which the rank was suspended from outside."""
    PROFILER = "profiler"
    """Excess time of steps in which a profiler, ddpdoctor's or the job's, was opened, closed or saved."""
    LATER_ATTEMPTS = "later_attempts"
    """From the end of the last step to the launcher's end, if other attempts follow the measured one."""
    END = "end"
    """From the end of the last step until the process group was destroyed or the recording ended."""
    TEARDOWN = "teardown"
    """From there to the launcher's end."""
    UNKNOWN = "unknown"
    """Steps not recorded, including those before a rank's first recorded step and, if other ranks have later ones, after its last."""


class Launch(msgspec.Struct, frozen=True):
    """Start and end of a host's launcher, epoch ns by that host's clock."""

    started_ns: int
    ended_ns: int | None
    """None if it was not recorded."""


class RunAccount(msgspec.Struct, frozen=True):
    """The wall time of a run."""

    parts_s: dict[RunPart, float]
    """Seconds by part, mean over the ranks."""
    steps: int
    """Number of the job's steps, as far as known."""
    goodput: float
    """Share (0 to 1) of the wall time that the job's steps would take at the median length of ordinary steps, limited to the time of
    the ordinary and the unrecorded steps."""
    patterns: list[StepPattern]
    reasons: Mapping[int, RunPart]
    """Step number → part that gets its excess over the typical length."""
    recorded_s: Mapping[int, Mapping[RunPart, float]]
    """Step number → seconds recorded as checkpoints and as the start of a pass over a main loader, on the slowest rank. In a step with
    evaluation, these parts are subtracted from the evaluation."""
    is_whole: bool
    """Whether start and end of every rank's launcher are known and consistent with its steps."""

    @property
    def wall_s(self) -> float:
        """Seconds, mean over the ranks."""
        return sum(self.parts_s.values())


def run_account(
    logs: Sequence[RankLog],
    why: Mapping[int, str],
    launches: Mapping[str, Launch],
    *,
    is_first: bool = True,
    is_last: bool = True,
) -> RunAccount | None:
    """The account of a run; None without a step. ``why``: reason for exclusion by step number, from :func:`select_steps`. ``launches``: by
    host name; without a consistent one, the time before the process group and after the recording is unknown and not included.
    If a log has several steps with the same number, the last one counts. ``is_first``, ``is_last``: whether no other attempt came
    before that of these logs, or follows it."""
    logs = [
        replace(log, steps=tuple(sorted(by_number.values(), key=lambda step: step.number)))
        for log in logs
        if (by_number := {step.number: step for step in log.steps})
    ]
    if not logs:
        return None
    numbers, lengths_s = lengths_of_run(logs)
    counted = comparable_steps(numbers, why)
    patterns = step_patterns(numbers, lengths_s, counted)
    usual = _usual_lengths(numbers, lengths_s, counted)
    usual_each_s = np.array([usual[number] for number in numbers.tolist()])
    is_long = long_steps(lengths_s, usual_each_s)
    excess_s = dict(zip(numbers[is_long].tolist(), (lengths_s - usual_each_s)[is_long].tolist(), strict=True))
    recorded_s = _recorded_s(logs)
    reasons = _reasons(logs, why, patterns, excess_s, recorded_s)
    for number in numbers[pause_steps(lengths_s, usual_each_s)].tolist():
        reasons.setdefault(number, RunPart.PAUSES)
    known = [_launch_of(log, launches) for log in logs]
    last = max((log.steps[-1] for log in logs), key=lambda step: (step.number, step.end_ns))
    of_ranks = [
        _parts_of_rank(log, launch, reasons, usual, recorded_s, last, is_first=is_first, is_last=is_last)
        for log, launch in zip(logs, known, strict=True)
    ]
    parts = {part: sum(max(own[part], 0.0) for own in of_ranks) / len(of_ranks) for part in RunPart}
    steps = last.number + 1
    ordinary = [
        length for number, length in zip(numbers.tolist(), lengths_s, strict=True) if number not in reasons
    ]
    usual_s = float(np.median(ordinary)) if ordinary else float(np.median(lengths_s))
    wall_s = sum(parts.values())
    usual_steps_s = min(steps * usual_s, parts[RunPart.STEPS] + parts[RunPart.UNKNOWN])
    return RunAccount(
        parts_s={part: seconds for part, seconds in parts.items() if seconds > 0.0},
        steps=steps,
        goodput=min(usual_steps_s / wall_s, 1.0) if wall_s > 0 else 0.0,
        patterns=patterns,
        reasons=reasons,
        recorded_s=recorded_s,
        is_whole=all(launch is not None and launch.ended_ns is not None for launch in known),
    )


_PART_OF_REASON = {
    WARM_UP: RunPart.WARM_UP,
    DISTURBED: RunPart.PROFILER,
    SUSPENDED: RunPart.SUSPENDED,
    EVALUATION: RunPart.EVALUATION,
}


def _usual_lengths(numbers: Ints, lengths_s: Array, counted: Mask) -> dict[int, float]:
    """Step number → typical length of the surrounding steps, seconds."""
    known = usual_lengths(lengths_s[counted]) if counted.any() else np.array([float(np.median(lengths_s))])
    at = numbers[counted] if counted.any() else numbers[:1]
    places = np.clip(np.searchsorted(at, numbers), 0, len(at) - 1)
    return dict(zip(numbers.tolist(), known[places].tolist(), strict=True))


def _recorded_s(logs: Sequence[RankLog]) -> dict[int, dict[RunPart, float]]:
    """See :attr:`RunAccount.recorded_s`."""
    found: dict[int, dict[RunPart, float]] = {}
    for log in logs:
        for step in log.steps:
            saves = [event for event in step.events if event.kind in (EventKind.SAVE, EventKind.LOAD)]
            if saves:
                _keep_longest(found, step, RunPart.CHECKPOINTS, saves)
            if any(event.kind == EventKind.ITERATION for event in step.events):
                loading = [event for event in step.events if event.loader in log.main_loaders]
                begins = any(event.kind == EventKind.ITERATION for event in loading)
                kinds = (EventKind.ITERATION, EventKind.DATA) if begins else ()
                loads = [event for event in loading if event.kind in kinds]
                _keep_longest(found, step, RunPart.EPOCHS, loads)
    return found


def _keep_longest(
    found: dict[int, dict[RunPart, float]], step: Step, part: RunPart, events: Sequence[Event]
) -> None:
    spent_s = min(sum(event.duration_ns for event in events), step.length_ns) / 1e9
    of_step = found.setdefault(step.number, {})
    of_step[part] = max(of_step.get(part, 0.0), spent_s)


def _reasons(
    logs: Sequence[RankLog],
    why: Mapping[int, str],
    patterns: Sequence[StepPattern],
    excess_s: Mapping[int, float],
    recorded_s: Mapping[int, Mapping[RunPart, float]],
) -> dict[int, RunPart]:
    """Step number → part that gets its excess over the typical length; the first matching reason counts. ``excess_s``: excess of the
    clearly longer steps, seconds; steps of typical length need no reason."""
    reasons = {number: _PART_OF_REASON[reason] for number, reason in why.items() if reason in _PART_OF_REASON}
    for number, of_step in recorded_s.items():
        if of_step.get(RunPart.CHECKPOINTS, 0.0) >= _MIN_CHECKPOINT_SHARE * excess_s.get(number, math.inf):
            reasons.setdefault(number, RunPart.CHECKPOINTS)
    for number in _epoch_steps(logs, excess_s):
        reasons.setdefault(number, RunPart.EPOCHS)
    for pattern in patterns:
        part_of = {PatternKind.EVERY_NTH: RunPart.SOME_STEPS, PatternKind.ONCE: RunPart.PAUSES}
        for number in pattern.steps if pattern.kind in part_of else ():
            reasons.setdefault(number, part_of[pattern.kind])
    return reasons


def _epoch_steps(logs: Sequence[RankLog], excess_s: Mapping[int, float]) -> Iterator[int]:
    """Numbers of longer steps in which a pass over a loader begins or ends."""
    for log in logs:
        for step in log.steps[1:]:
            if step.number in excess_s and any(
                event.kind == EventKind.ITERATION or event.exhausted for event in step.events
            ):
                yield step.number


def _launch_of(log: RankLog, launches: Mapping[str, Launch]) -> Launch | None:
    """The launcher of a rank; None if its times are inconsistent with this rank's steps."""
    launch = launches.get(log.host)
    if launch is None:
        return None
    first, last = log.steps[0].recorded_ns, log.steps[-1].recorded_ns
    starts = first[0] - _MAX_RUN_NS <= launch.started_ns <= first[1]
    return launch if starts and (launch.ended_ns is None or launch.ended_ns >= last[0]) else None


def _parts_of_rank(
    log: RankLog,
    launch: Launch | None,
    reasons: Mapping[int, RunPart],
    usual_s: Mapping[int, float],
    recorded_s: Mapping[int, Mapping[RunPart, float]],
    last: Step,
    *,
    is_first: bool,
    is_last: bool,
) -> dict[RunPart, float]:
    """Seconds of a rank by part. ``last``: the last step of all ranks, on the clock of the log."""
    parts = dict.fromkeys(RunPart, 0.0)
    ended_ns = log.record.info.get("ended_ns")
    first_ns, last_ns = log.steps[0].recorded_ns[0], log.steps[-1].recorded_ns[1]
    before_ns, after_ns = _unrecorded_ends(log, launch, last)
    parts[RunPart.UNKNOWN] = (before_ns + after_ns) / 1e9
    first_ns, last_ns = first_ns - before_ns, last_ns + after_ns
    if launch is not None:
        # The launcher's restart count omits restarts caused by another host's ranks, but then the rank has another recording.
        is_restarted = not is_first or log.record.attempt or log.record.repeat
        start_part = RunPart.EARLIER_ATTEMPTS if is_restarted else RunPart.START
        start_part = RunPart.OTHER_TRAININGS if log.follows_training else start_part
        parts[start_part] = (first_ns - launch.started_ns) / 1e9
        own_end_ns = max(ended_ns if isinstance(ended_ns, int) else 0, last_ns)
        if (later_ns := log.later_trainings_end_ns) is not None and launch.ended_ns is not None:
            later_ns = min(max(later_ns, own_end_ns), launch.ended_ns)
            parts[RunPart.OTHER_TRAININGS] += (later_ns - own_end_ns) / 1e9
            parts[RunPart.TEARDOWN if is_last else RunPart.LATER_ATTEMPTS] = (
                launch.ended_ns - later_ns
            ) / 1e9
        elif not is_last and launch.ended_ns is not None:
            parts[RunPart.LATER_ATTEMPTS] = (launch.ended_ns - last_ns) / 1e9
        elif launch.ended_ns is not None:
            parts[RunPart.TEARDOWN] = (launch.ended_ns - own_end_ns) / 1e9
    if (is_last or log.later_trainings_end_ns is not None) and isinstance(ended_ns, int):
        parts[RunPart.END] = (ended_ns - last_ns) / 1e9
    before = None
    for step in log.steps:
        if before is not None and step.number > before.number + 1:
            between_s = max(step.start_ns - before.end_ns, 0) / 1e9
            as_usual_s = (step.number - before.number - 1) * usual_s.get(step.number, 0.0)
            known = between_s <= _MAX_USUAL_RATIO * as_usual_s
            parts[RunPart.STEPS if known else RunPart.UNKNOWN] += between_s
        step_usual_s = usual_s.get(step.number, 0.0)
        reason = reasons.get(step.number)
        if reason is None and step.length_ns / 1e9 > _MAX_USUAL_RATIO * step_usual_s:
            # Other ranks wait in this step for a delay after the last synchronisation of the previous step.
            reason = reasons.get(step.number - 1)
        _add_step(parts, step, reason, step_usual_s, recorded_s.get(step.number, {}))
        before = step
    return parts


def _unrecorded_ends(log: RankLog, launch: Launch | None, last: Step) -> tuple[int, int]:
    """(ns from the start of the recording to the first recorded step, if that is not the job's first; ns from this rank's last recorded
    step to the ``last`` one of all ranks)."""
    first, own_last = log.steps[0], log.steps[-1]
    started_ns, ended_ns = (log.record.info.get(name) for name in ("started_ns", "ended_ns"))
    before_ns = 0
    if first.number > 0 and launch is not None and isinstance(started_ns, int):
        before_ns = first.recorded_ns[0] - max(started_ns, launch.started_ns)
    after_ns = last.end_ns - own_last.end_ns if own_last.number < last.number else 0
    for end_ns in (ended_ns, launch and launch.ended_ns):
        if isinstance(end_ns, int):
            after_ns = min(after_ns, end_ns - own_last.recorded_ns[1])
    return max(before_ns, 0), max(after_ns, 0)


def _add_step(
    parts: dict[RunPart, float],
    step: Step,
    reason: RunPart | None,
    usual_s: float,
    recorded_s: Mapping[RunPart, float],
) -> None:
    """Divides the time of a step among the parts."""
    length_s = step.length_ns / 1e9
    if step.number == 0:
        prepared_s, batch_s = preparation_times(step)
        parts[RunPart.PREPARATION] += prepared_s
        parts[RunPart.FIRST_BATCH] += batch_s
        length_s -= prepared_s + batch_s
    ordinary_s = length_s if reason is None else min(length_s, usual_s)
    parts[RunPart.STEPS] += ordinary_s
    if reason is not None:
        excess_s = length_s - ordinary_s
        for part, seconds in recorded_s.items() if reason is RunPart.EVALUATION else ():
            parts[part] += min(seconds, excess_s)
            excess_s -= min(seconds, excess_s)
        parts[reason] += excess_s


def preparation_times(step: Step) -> tuple[float, float]:
    """(seconds of the first step until the first batch is requested, or else until the first forward pass; seconds of the wait for the
    batch)."""
    requests = [
        event
        for event in step.events
        if event.kind in (EventKind.ITERATION, EventKind.DATA, EventKind.FORWARD)
    ]
    if not requests:
        return 0.0, 0.0
    first = min(requests, key=lambda event: event.start_ns)
    # The recording is untrusted input: limit times to the step.
    prepared_ns = min(max(first.start_ns, 0), step.length_ns)
    if first.kind == EventKind.FORWARD:
        return prepared_ns / 1e9, 0.0
    batches = [
        event for event in step.events if event.kind == EventKind.DATA and event.start_ns >= first.start_ns
    ]
    end_ns = min((event.end_ns for event in batches), default=first.end_ns)
    return prepared_ns / 1e9, (min(max(end_ns, prepared_ns), step.length_ns) - prepared_ns) / 1e9
