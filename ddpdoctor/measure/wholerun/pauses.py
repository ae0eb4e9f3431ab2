"""Who paused, where and in what, in the one or two steps that are far longer than all others.

In a step in which a rank pauses, the others wait for it at the next synchronisation. A rank's own part of the step is what it spent
outside of collectives, barriers, and backward passes that reduce gradients; beyond its usual own part, it is its pause.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from ddpdoctor.measure.places import Where
from ddpdoctor.measure.runfacts import PauseFacts
from ddpdoctor.measure.sourcelines import SourceLines
from ddpdoctor.measure.steplog import PatternKind, RankLog, Step, StepPattern
from ddpdoctor.measure.taxonomy import Component
from ddpdoctor.rundir import EventKind

_KINDS = {
    EventKind.DATA: "data",
    EventKind.ITERATION: "data",
    EventKind.SAVE: "checkpoint",
    EventKind.LOAD: "checkpoint",
    EventKind.FORWARD: "compute",
    EventKind.BACKWARD: "compute",
    EventKind.OPTIMIZER: "compute",
    EventKind.COLLECTION: "host",
}
_WAITS = frozenset([EventKind.COLLECTIVE, EventKind.BARRIER, EventKind.WAIT, EventKind.BROADCAST])
_COMPONENTS = {
    "data": (Component.DATA, Component.EPOCH_START),
    "checkpoint": (Component.CHECKPOINT,),
    "host": (Component.HOST,),
    "compute": (Component.FORWARD, Component.BACKWARD, Component.OPTIMIZER),
}
_OWN = 0.5
"""Part of the pause that a rank's own time must be beyond its usual one, so that it is the rank's pause."""
_OFF_CPU = 0.5
"""Part of the pause without a core from which on the thread is said to be off the CPU."""


def pause_event(
    patterns: Sequence[StepPattern], logs: Sequence[RankLog], lines: SourceLines, wall_s: float | None
) -> PauseFacts | None:
    """The facts of the single pauses among the ``patterns``; None without one. ``lines`` are those of the same ``logs``."""
    pattern = next((each for each in patterns if each.kind is PatternKind.ONCE), None)
    if pattern is None:
        return None
    of_ranks = [{step.number: step for step in log.steps} for log in logs]
    longest = max(
        pattern.steps,
        key=lambda number: max((s[number].length_ns for s in of_ranks if number in s), default=0),
    )
    own = [_own_times(steps.get(longest)) for steps in of_ranks]
    usual = [_usual_times(log.steps, pattern.steps) for log in logs]
    extra = [
        {kind: ns - before.get(kind, 0.0) for kind, ns in now.items()}
        for now, before in zip(own, usual, strict=True)
    ]
    length_ns = max((steps[longest].length_ns for steps in of_ranks if longest in steps), default=0)
    beyond_ns = max(length_ns - float(np.median([sum(each.values()) for each in usual])), 1.0)
    who = [place for place, kinds in enumerate(extra) if max(kinds.values(), default=0.0) >= _OWN * beyond_ns]
    recorded = [place for place, steps in enumerate(of_ranks) if longest in steps and steps[longest].in_full]
    together = _together(extra, who)
    kind = (
        max(together, key=lambda name: together[name]) if together else "communication" if recorded else None
    )
    ranks = None if len(who) in (0, len(logs)) else [logs[place].rank for place in who]
    where: list[Where] = []
    if kind in _COMPONENTS:
        chosen = who if ranks is not None else None
        where = lines.work(_COMPONENTS[kind], chosen, np.array([longest], np.int64))
    return PauseFacts(
        steps=pattern.steps,
        total_s=pattern.extra_s,
        longest_s=length_ns / 1e9,
        share=pattern.extra_s / wall_s if wall_s else None,
        ranks=ranks,
        kind=kind,
        off_cpu=_is_off_cpu([of_ranks[place].get(longest) for place in who], beyond_ns),
        where=where,
    )


def _own_times(step: Step | None) -> dict[str, float]:
    """ns of a step by kind, without the time in which the rank may wait for others."""
    if step is None or not step.in_full:
        return {}
    times: defaultdict[str, float] = defaultdict(float)
    covered = 0
    end_ns = 0
    for event in sorted(step.events, key=lambda event: event.start_ns):
        if event.kind == EventKind.COLLECTION:
            continue  # within something else
        begin_ns = max(event.start_ns, end_ns)
        own_ns = max(min(event.end_ns, step.length_ns) - begin_ns, 0)
        end_ns = max(end_ns, event.end_ns)
        covered += own_ns
        if event.kind in _WAITS:
            continue
        if event.kind == EventKind.BACKWARD and event.reductions:
            own_ns = max(min(event.gradients_ready_ns, event.end_ns) - begin_ns, 0)
        if event.kind in _KINDS:
            times[_KINDS[EventKind(event.kind)]] += own_ns
    times["host"] += max(step.length_ns - covered, 0)
    return dict(times)


def _usual_times(steps: Sequence[Step], without: Sequence[int]) -> dict[str, float]:
    """ns by kind: the median over the steps that were recorded in full."""
    each = [_own_times(step) for step in steps if step.in_full and step.number not in without]
    kinds = {kind for times in each for kind in times}
    return {kind: float(np.median([times.get(kind, 0.0) for times in each])) for kind in kinds}


def _together(extra: Sequence[Mapping[str, float]], who: Sequence[int]) -> dict[str, float]:
    """ns by kind beyond the usual, of the ranks that paused."""
    total: defaultdict[str, float] = defaultdict(float)
    for place in who:
        for kind, ns in extra[place].items():
            total[kind] += max(ns, 0.0)
    return dict(total)


def _is_off_cpu(steps: Sequence[Step | None], beyond_ns: float) -> bool | None:
    known = [
        step
        for step in steps
        if step is not None and step.cpu_ns is not None and step.run_delay_ns is not None
    ]
    if not known:
        return None
    away = [step.length_ns - (step.cpu_ns or 0) - (step.run_delay_ns or 0) for step in known]
    return bool(min(away) >= _OFF_CPU * beyond_ns)
