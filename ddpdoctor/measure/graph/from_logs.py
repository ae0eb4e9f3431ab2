"""Step logs of all ranks → the dependency graph of the run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.steplog import Activities, Meeting, RankLog, Step, chosen_and_why, match, rank_points
from ddpdoctor.measure.taxonomy import INDEX, SyncKind
from ddpdoctor.rundir import EventKind

from .graph import CycleGroup, Graph, RankSteps, Sync
from .loaderpace import batches_per_step, latent_data, pace_ns
from .reckoning import set_aside

_MOST_CELLS = 20_000_000
"""Bound on N x K x R x C, so that a long run of many ranks stays in memory (8 bytes each)."""

_NO_MEETING = "no collective that all ranks share"
_ONLY_TIMES = "only its times recorded"


def graph_of_logs(logs: Sequence[RankLog], operator_shares: Mapping[int, float] | None = None) -> Graph:
    """Build the graph; ``logs`` are on a common clock, one per rank, ordered by rank.

    ``operator_shares`` (by position) is the part of a rank's host time that is computation, see
    :mod:`.outside`.
    """
    ranks = tuple(log.rank for log in logs)
    meetings, unmatched = match([rank_points(log) for log in logs])
    measured, reasons = chosen_and_why(logs)
    origin = min((log.steps[0].start for log in logs if log.steps), default=0)
    activities = [Activities(log, origin) for log in logs]
    by_step: dict[int, list[Meeting]] = defaultdict(list)
    for meeting in meetings:
        by_step[meeting.first.step].append(meeting)
    if not meetings:
        groups = _alone(logs, measured, activities, origin)
    else:
        groups = _groups(by_step, measured, ranks, activities, origin, reasons)
    for group in groups:
        _recount(group, operator_shares or {})
    paces = [pace_ns(log) for log in logs]
    batches = [batches_per_step(log) for log in logs]
    groups = [group.with_latent("data", latent_data(group, paces, batches)) for group in groups]
    steps = [_rank_steps(log, origin) for log in logs]
    full = {step.number for log in logs for step in log.steps if step.events}

    def reason(number: int) -> str:
        return reasons.get(number) or (_NO_MEETING if number in full else _ONLY_TIMES)

    return Graph(
        "step-log",
        ranks,
        groups,
        steps,
        set_aside(steps, groups, reason),
        matched=len(meetings),
        unmatched=unmatched,
    )


def _recount(group: CycleGroup, shares: Mapping[int, float]) -> None:
    """Count the operators' share of the usual host time as computation: what a cycle has beyond it, the quiet window did not show."""
    for position, share in shares.items():
        host = np.clip(group.work[:, :, position, INDEX["host"]], 0, None)
        moved = np.minimum(host, np.median(host, axis=0)) * share
        group.work[:, :, position, INDEX["host"]] -= moved
        group.work[:, :, position, INDEX["forward"]] += moved


def _cut(meetings: list[Meeting], world: int) -> int | None:
    """Where a step's cycle ends: its last reduction of gradients, else its last synchronisation of all
    ranks."""
    full = [
        i for i, meeting in enumerate(meetings) if len(meeting.points) == world and meeting.first.root is None
    ]
    gradients = [i for i in full if meetings[i].first.kind == SyncKind.GRADIENTS]
    chosen = gradients or full
    return chosen[-1] if chosen else None


def _groups(
    by_step: dict[int, list[Meeting]],
    measured: set[int],
    ranks: Sequence[int],
    activities: Sequence[Activities],
    origin: int,
    reasons: dict[int, str],
) -> list[CycleGroup]:
    cycles: dict[tuple[Sync, ...], list[tuple[int, Meeting, list[Meeting]]]] = defaultdict(list)
    carried: list[Meeting] = []
    previous: tuple[int, Meeting] | None = None
    for step in sorted(by_step):
        meetings = by_step[step]
        cut = _cut(meetings, len(ranks))
        if cut is None:
            previous, carried = None, []
            continue
        body = carried + meetings[: cut + 1]
        if step in measured:
            if previous is not None and previous[0] == step - 1:
                cycles[_signature(body, ranks)].append((step, previous[1], body))
            else:
                reasons[step] = "no measured step before it"
        previous, carried = (step, meetings[cut]), meetings[cut + 1 :]
    cells = sum(len(c) * len(s) for s, c in cycles.items()) * len(ranks) * len(INDEX)
    stride = max(1, -(-cells // _MOST_CELLS))
    for number in [step for found in cycles.values() for step, _, _ in found] if stride > 1 else ():
        reasons[number] = "left out, to bound memory"
    return [_group(syncs, found[::stride], activities, origin) for syncs, found in cycles.items()]


def _signature(body: list[Meeting], ranks: Sequence[int]) -> tuple[Sync, ...]:
    return tuple(
        Sync(
            m.first.kind,
            m.first.name,
            tuple(sorted(m.points)),
            m.first.micro,
            m.first.group,
            ranks.index(m.first.root) if m.first.root is not None and m.first.root in ranks else None,
            m.first.update,
        )
        for m in body
    )


def _group(
    syncs: tuple[Sync, ...],
    found: list[tuple[int, Meeting, list[Meeting]]],
    activities: Sequence[Activities],
    origin: int,
) -> CycleGroup:
    cycles, count, world = len(found), len(syncs), len(activities)
    begin = np.full((cycles, world), np.nan)
    arrival = np.full((cycles, count, world), np.nan)
    end = np.full((cycles, count, world), np.nan)
    message = np.full((cycles, count), np.nan)
    for n, (_, before, body) in enumerate(found):
        for position, point in before.points.items():
            begin[n, position] = point.end - origin
        for k, meeting in enumerate(body):
            message[n, k] = meeting.first.message_bytes or np.nan
            for position, point in meeting.points.items():
                arrival[n, k, position] = point.arrival - origin
                end[n, k, position] = max(point.end, point.arrival) - origin
    work = _work(begin, arrival, end, activities)
    return CycleGroup(syncs, np.array([step for step, _, _ in found]), begin, arrival, end, work, message)


def _work(begin: Array, arrival: Array, end: Array, activities: Sequence[Activities]) -> Array:
    """[N, K, R, C] what each rank did in each segment. A rank outside a synchronisation works on towards its
    next one."""
    cycles, count, world = arrival.shape
    work = np.zeros((cycles, count, world, len(INDEX)))
    for r in range(world):
        left = begin[:, r].copy()
        for k in range(count):
            member = ~np.isnan(arrival[:, k, r])
            if not member.any():
                continue
            right = arrival[:, k, r]
            work[:, k, r] = np.where(member[:, None], activities[r].between(left, right), 0.0)
            left = np.where(member, end[:, k, r], left)
    return work


def _alone(
    logs: Sequence[RankLog], measured: set[int], activities: Sequence[Activities], origin: int
) -> list[CycleGroup]:
    """Cycles of ranks that never meet: cut at the ends of the optimizer's steps."""
    steps = sorted(measured)
    ends = [{step.number: (step.start - origin, step.end - origin) for step in log.steps} for log in logs]
    steps = [s for s in steps if all(s in of for of in ends)]
    if not steps:
        return []
    begin = np.array([[of[s][0] for of in ends] for s in steps], float)
    end = np.array([[of[s][1] for of in ends] for s in steps], float)[:, None, :]
    syncs = (Sync(SyncKind.STEP_END, SyncKind.STEP_END, tuple(range(len(logs)))),)
    work = _work(begin, end, end, activities)
    return [
        CycleGroup(syncs, np.array(steps), begin, end.copy(), end, work, np.full((len(steps), 1), np.nan))
    ]


def _input_elements(step: Step) -> float:
    """Elements of the inputs of all forwards of the step; NaN where one is unknown."""
    sizes = [event.elements for event in step.events if event.kind == EventKind.FORWARD]
    return float(sum(sizes)) if sizes and min(sizes) > 0 else float("nan")


def _rank_steps(log: RankLog, origin: int) -> RankSteps:
    batches = [
        [e.count for e in s.events if e.kind == EventKind.DATA and not e.exhausted and e.count >= 0]
        for s in log.steps
    ]
    return RankSteps(
        np.array([s.number for s in log.steps], np.int64),
        np.array([s.start - origin for s in log.steps], float),
        np.array([s.end - origin for s in log.steps], float),
        np.array([float(sum(b)) if b else np.nan for b in batches]),
        np.array([np.nan if s.run_delay_ns is None else s.run_delay_ns for s in log.steps], float),
        np.array([sum(e.kind == EventKind.BACKWARD for e in s.events) for s in log.steps], float),
        elements=np.array([_input_elements(s) for s in log.steps], float),
        cpu=np.array([np.nan if s.cpu_ns is None else s.cpu_ns for s in log.steps], float),
    )
