"""Finds the ranks that took longer in the steps of a pattern, an evaluation or a checkpoint, with the kind of work and the lines.

If one rank takes longer, the others wait for it at the next synchronisation. A rank's own part of a step is the time outside of
collectives and barriers, and without the part of a backward pass after its own gradients are ready. The rank with a longer own part is
the cause.

If ranks compute on devices and only their hosts were timed, a host that waits for its device, for example in ``loss.item()``, also waits
for the ranks for which the device waits. Then only the work in ``_SHOWN_BY_HOST`` is known to be the rank's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from ddpdoctor.measure.places import Where
from ddpdoctor.measure.runfacts import RunEvent, RunWork
from ddpdoctor.measure.sourcelines import LogSourceLines
from ddpdoctor.measure.steplog import PatternKind, RankLog, Step, StepPattern
from ddpdoctor.measure.taxonomy import BETWEEN_PHASES, Component
from ddpdoctor.rundir.stepevents import EventKind

from .account import RunAccount, RunPart

KINDS = {
    EventKind.DATA: "data",
    EventKind.ITERATION: "data",
    EventKind.SAVE: "checkpoint",
    EventKind.LOAD: "checkpoint",
    EventKind.FORWARD: "compute",
    EventKind.BACKWARD: "compute",
    EventKind.OPTIMIZER: "compute",
}
"""Kind of event → kind of work. In all other events, such as collectives, the rank may wait for others."""
_SHOWN_BY_HOST = ("data", "checkpoint")
"""Kinds of work that the host's clock shows even if the rank computes on a device."""
_PHASES = {EventKind.FORWARD: "forward", EventKind.BACKWARD: "backward", EventKind.OPTIMIZER: "optimizer"}
_ALIKE = 0.33
"""Least relative increase of a phase, as a share of the largest one, if the whole machine is slower. Of code that changed, only the phase
in which it is takes longer; larger inputs do not make the optimizer slower."""
_COMPONENTS = {
    "data": (Component.DATA, Component.EPOCH_START),
    "checkpoint": (Component.CHECKPOINT,),
    "host": (Component.HOST, *BETWEEN_PHASES),
    "compute": (Component.FORWARD, Component.BACKWARD, Component.OPTIMIZER),
}
_PERSISTENCE = {
    PatternKind.ONCE: "once",
    PatternKind.EVERY_NTH: "periodic",
    PatternKind.FROM_STEP: "range",
    PatternKind.GROWING: "growing",
}
_IN_EVALUATION = (Component.HOST, Component.FORWARD)
"""Components used to find the lines of an evaluation. DATA is not used: the training loader starts again at the same time, and its
batches would be attributed to the evaluation."""
_MIN_OWN_SHARE = 0.5
"""A rank causes the extra time if its own part is longer by at least this share of it."""
_MIN_OFF_CPU_SHARE = 0.5
"""Share of the extra time that is neither running nor runnable, from which it counts as off-CPU."""
_MAY_WAIT = (EventKind.BACKWARD, EventKind.COLLECTIVE, EventKind.BARRIER, EventKind.WAIT)
"""Kinds of events in which a rank may wait for others."""


def _ranks_from_samples(
    logs: Sequence[RankLog], lines: LogSourceLines, long: set[int], usual: set[int]
) -> tuple[list[int], list[Where]]:
    """(indices of the ranks that did not wait for others, their lines) for ``long`` steps with only times and samples recorded: the ranks
    whose samples are not at a line with a possible wait in any step."""
    waits = {
        (where.file, where.line)
        for log in logs
        for step in log.steps
        for event in step.events
        if event.kind in _MAY_WAIT and (where := log.where.get(event.where)) is not None
    }
    work = _COMPONENTS["host"]  # without events, all samples of a step count as host work
    seen = [lines.excess_lines(work, [place], long, usual) for place in range(len(logs))]
    culprits = [
        place for place, found in enumerate(seen) if found and (found[0].file, found[0].line) not in waits
    ]
    return culprits, lines.excess_lines(work, culprits, long, usual) if culprits else []


def event_of(
    kind: PatternKind,
    patterns: Sequence[StepPattern],
    logs: Sequence[RankLog],
    lines: LogSourceLines,
    wall_s: float | None,
) -> RunEvent | None:
    """Facts of the pattern of this ``kind``; None if there is none. ``lines`` are those of the same ``logs``."""
    pattern = next((each for each in patterns if each.kind is kind), None)
    if pattern is None:
        return None
    numbers = np.array(sorted({step.number for log in logs for step in log.steps}), np.int64)
    long, usual = (set(numbers[steps].tolist()) for steps in pattern.long_and_usual_steps(numbers))
    long_times, usual_times = ([_median_times(log.steps, steps) for log in logs] for steps in (long, usual))
    known = [bool(now and before) for now, before in zip(long_times, usual_times, strict=True)]
    hosts_wait = any(log.computes_on_device and not log.on_device_time for log in logs)
    extra = [
        {
            work: ns - before.get(work, 0.0)
            for work, ns in now.items()
            if work in _SHOWN_BY_HOST or not hosts_wait
        }
        if is_known
        else {}
        for now, before, is_known in zip(long_times, usual_times, known, strict=True)
    ]
    extra_ns = _extra_ns(logs, long, usual)
    culprits = [
        place for place, times in enumerate(extra) if sum(times.values()) >= _MIN_OWN_SHARE * extra_ns
    ]
    by_kind: defaultdict[str, float] = defaultdict(float)
    for place in culprits:
        for name, ns in extra[place].items():
            by_kind[name] += max(ns, 0.0)
    in_collectives = "communication" if all(known) and not hosts_wait else None
    work = max(by_kind, key=by_kind.__getitem__) if by_kind else in_collectives
    # If some rank was recorded with times only, it may have taken longer too: report ranks only if another known rank waited.
    ranks = [logs[place].rank for place in culprits] if 0 < len(culprits) < sum(known) else None
    where = lines.excess_lines(_COMPONENTS[work], culprits, long, usual) if work in _COMPONENTS else []
    if not any(known) and not hosts_wait and kind is PatternKind.ONCE:
        culprits, where = _ranks_from_samples(logs, lines, long, usual)
        ranks = [logs[place].rank for place in culprits] if 0 < len(culprits) < len(logs) else None
    lengths_ns = [step.length_ns for log in logs for step in log.steps if step.number in long]
    return RunEvent(
        steps=pattern.steps,
        longer=[min(long), max(long)] if long else [],
        persistence=_PERSISTENCE[kind],
        total_s=pattern.extra_s,
        longest_s=max(lengths_ns, default=0) / 1e9,
        share=min(pattern.extra_s / wall_s, 1.0) if wall_s else None,
        every=pattern.every,
        hits=pattern.hits,
        chances=pattern.chances,
        before_ms=pattern.before_ms,
        after_ms=pattern.after_ms,
        ranks=ranks,
        kind=work,
        in_all_phases=_in_all_phases([logs[place] for place in culprits] or logs, long, usual)
        if work in ("compute", "communication")
        else None,
        off_cpu=_is_off_cpu([logs[place] for place in culprits], long, extra_ns),
        where=where,
    )


def evaluations_of(
    account: RunAccount, logs: Sequence[RankLog], lines: LogSourceLines, wall_s: float | None
) -> RunWork | None:
    """Facts of the evaluations; None if there are none. ``lines`` are those of the same ``logs``."""
    numbers = {number for number, part in account.reasons.items() if part is RunPart.EVALUATION}
    positions = [place for place, log in enumerate(logs) if not log.evaluated.isdisjoint(numbers)]
    total_s = account.parts_s.get(RunPart.EVALUATION, 0.0)
    return _run_work(_IN_EVALUATION, numbers, total_s, positions, logs, lines, wall_s)


def checkpoints_of(
    account: RunAccount, logs: Sequence[RankLog], lines: LogSourceLines, wall_s: float | None
) -> RunWork | None:
    """Facts of the checkpoints; None if there are none. ``lines`` are those of the same ``logs``."""
    of_checkpoint = (RunPart.CHECKPOINTS, RunPart.EVALUATION)
    numbers = {
        number
        for number, recorded_s in account.recorded_s.items()
        if RunPart.CHECKPOINTS in recorded_s and account.reasons.get(number) in of_checkpoint
    }
    positions = [
        place
        for place, log in enumerate(logs)
        if any(
            event.kind in (EventKind.SAVE, EventKind.LOAD)
            for step in log.steps
            if step.number in numbers
            for event in step.events
        )
    ]
    total_s = account.parts_s.get(RunPart.CHECKPOINTS, 0.0)
    return _run_work(_COMPONENTS["checkpoint"], numbers, total_s, positions, logs, lines, wall_s)


def _run_work(
    components: Sequence[Component],
    numbers: set[int],
    total_s: float,
    positions: Sequence[int],
    logs: Sequence[RankLog],
    lines: LogSourceLines,
    wall_s: float | None,
) -> RunWork | None:
    """Facts of work of these ``components`` in steps with these ``numbers``, by the ranks at the indices ``positions``."""
    if not numbers or total_s <= 0.0:
        return None
    others = {step.number for log in logs for step in log.steps} - numbers
    distances = np.diff(sorted(numbers))
    return RunWork(
        count=len(numbers),
        total_s=total_s,
        share=min(total_s / wall_s, 1.0) if wall_s else None,
        every=round(float(np.median(distances))) if len(distances) else None,
        ranks=None if len(positions) in (0, len(logs)) else [logs[place].rank for place in positions],
        where=lines.excess_lines(components, positions, numbers, others),
    )


def _extra_ns(logs: Sequence[RankLog], long: set[int], usual: set[int]) -> float:
    """Median long step minus median typical step, ns, on the rank with the largest difference; at least 1."""
    differences = [0.0]
    for log in logs:
        lengths = [[step.length_ns for step in log.steps if step.number in steps] for steps in (long, usual)]
        if all(lengths):
            differences.append(float(np.median(lengths[0]) - np.median(lengths[1])))
    return max(*differences, 1.0)


def _own_times(step: Step, kinds: Mapping[EventKind, str] = KINDS) -> dict[str, float]:
    """ns of a step by kind of work, without the time in which the rank may wait for others."""
    times: defaultdict[str, float] = defaultdict(float)
    covered = 0
    end_ns = 0
    for event in sorted(step.events, key=lambda event: event.start_ns):
        if event.kind == EventKind.COLLECTION:
            continue  # inside another event
        begin_ns = max(event.start_ns, end_ns)
        own_ns = max(min(event.end_ns, step.length_ns) - begin_ns, 0)
        end_ns = max(end_ns, event.end_ns)
        covered += own_ns
        if event.kind == EventKind.BACKWARD and event.reductions:
            own_ns = max(event.gradients_ready_ns - begin_ns, 0)
        if event.kind in kinds:
            times[kinds[EventKind(event.kind)]] += own_ns
    times["host"] += max(step.length_ns - covered, 0)
    return dict(times)


def _median_times(
    steps: Sequence[Step], wanted: set[int], kinds: Mapping[EventKind, str] = KINDS
) -> dict[str, float]:
    """ns by kind of work: median over the ``wanted`` steps that were recorded in full."""
    each = [_own_times(step, kinds) for step in steps if step.number in wanted and step.in_full]
    found = {kind for times in each for kind in times}
    return {kind: float(np.median([times.get(kind, 0.0) for times in each])) for kind in found}


def _in_all_phases(logs: Sequence[RankLog], long: set[int], usual: set[int]) -> bool | None:
    """Whether forward, backward and optimizer of each rank take longer by similar ratios in the ``long`` steps; None if a phase is not
    recorded."""
    for log in logs:
        now, before = (_median_times(log.steps, steps, _PHASES) for steps in (long, usual))
        if not all(now.get(phase) and before.get(phase) for phase in _PHASES.values()):
            return None
        increases = [now[phase] / before[phase] - 1.0 for phase in _PHASES.values()]
        if max(increases) <= 0.0 or min(increases) < _ALIKE * max(increases):
            return False
    return bool(logs)


def _is_off_cpu(logs: Sequence[RankLog], long: set[int], extra_ns: float) -> bool | None:
    off_cpu_ns = [
        step.length_ns - step.cpu_ns - step.run_delay_ns
        for log in logs
        for step in log.steps
        if step.number in long and step.cpu_ns is not None and step.run_delay_ns is not None
    ]
    return bool(np.median(off_cpu_ns) >= _MIN_OFF_CPU_SHARE * extra_ns) if off_cpu_ns else None
