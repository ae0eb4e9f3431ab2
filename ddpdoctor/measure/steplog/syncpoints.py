"""Synchronisation points of one rank's step log, with arrival and end, and the matching of all ranks' points by key."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ddpdoctor.measure.taxonomy import SyncKind
from ddpdoctor.rundir.stepevents import POINT_TO_POINT, EventKind

from .records import Event, Reduction, Step

Key = tuple[str, str, int]
"""Kind, group or module, and number: step number * ``_MOST_IN_STEP`` + index of the point within the step."""
_MOST_IN_STEP = 1 << 20
"""More than the events recorded in a step, so numbers of two steps never collide."""

_SHARD_CALLS = (
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
)
"""Calls with which FSDP and DeepSpeed gather parameters and scatter gradients, under both of torch's names."""
_CALLS = frozenset((EventKind.COLLECTIVE, EventKind.BARRIER))
ROOTED = ("broadcast", "broadcast_object_list", "scatter", "scatter_object_list")


class SyncPoint(msgspec.Struct, frozen=True, gc=False):
    """One rank's part in a synchronisation."""

    key: Key
    kind: SyncKind
    name: str
    step: int
    arrival_ns: int
    """``arrival_ns`` and ``end_ns`` are epoch ns."""
    end_ns: int
    micro: int = 0
    update: int = 0
    group: str = ""
    root: int | None = None
    """Rank number of the root of a broadcast."""
    message_bytes: float | None = None
    where: int = -1


def has_ddp(steps: Sequence[Step], info: Mapping[str, Any]) -> bool:
    """Whether DDP reduces the gradients, according to rank.json (``info``) or, if that is lost, the recorded backward passes."""
    if info.get("ddp") or "rank" in info:
        return bool(info.get("ddp"))
    return any(event.reductions for step in steps for event in step.events)


class _Job(msgspec.Struct, frozen=True):
    """Properties of the job that determine the kinds and sizes of a rank's synchronisations."""

    module_bytes: Mapping[int, float]
    """Gradient size of each DDP module, by its id."""
    has_ddp: bool
    sharded: bool
    searches: bool
    """Whether an optimizer searches along a line (LBFGS): it evaluates the loss several times per step, and each time needs the gradients
    of all ranks."""

    @classmethod
    def of(cls, steps: Sequence[Step], info: Mapping[str, Any]) -> _Job:
        modules = info.get("ddp") or []
        sizes = {
            module.get("id", place): float(module.get("parameters_bytes") or 0)
            for place, module in enumerate(modules)
        }
        # Some libraries import deepspeed without using it.
        sharded = bool(info.get("fsdp") or (info.get("deepspeed") and not modules))
        searches = any(optimizer.get("type") == "LBFGS" for optimizer in info.get("optimizers") or [])
        return cls(sizes, has_ddp(steps, info), sharded, searches)

    def gradient_bytes(self, reductions: Sequence[Reduction]) -> float | None:
        """Sum over the modules reduced in a backward pass; None if unknown."""
        return sum(self.module_bytes.get(each.module, 0.0) for each in reductions) or None


_PointCounts = Counter[tuple[str, str]]
"""Number of points per kind and group so far in a step. It restarts in each step, because ranks may record different steps in full,
and counts over the whole run would differ."""


def _key(step: Step, counts: _PointCounts, kind: str, group: str) -> Key:
    """Key of the step's next point of this kind and group."""
    counts[kind, group] += 1
    return kind, group, step.number * _MOST_IN_STEP + counts[kind, group] - 1


def sync_points_of(steps: Sequence[Step], info: Mapping[str, Any]) -> list[SyncPoint]:
    """All synchronisation points of one rank, in order of arrival. ``info``: content of rank.json."""
    job = _Job.of(steps, info)
    points: list[SyncPoint] = []
    for step in steps:
        counts: _PointCounts = Counter()
        points += _gradient_points(step, counts, job)
        points += _collective_points(step, counts, job)
        points += _buffer_points(step, counts)
    points.sort(key=lambda point: point.arrival_ns)
    return points


def _gradient_points(step: Step, counts: _PointCounts, job: _Job) -> Iterator[SyncPoint]:
    """DDP's gradient reductions. The rank arrives when its last gradient is ready, not when its backward pass begins or ends."""
    backwards = [event for event in step.events if event.kind == EventKind.BACKWARD]
    for micro, event in enumerate(backwards):
        reduced = event.reductions
        if not reduced:
            continue
        module = reduced[0].module
        updates = [other.start_ns for other in step.events if other.kind == EventKind.OPTIMIZER]
        yield SyncPoint(
            _key(step, counts, "ddp", str(module)),
            SyncKind.GRADIENTS,
            "DDP gradients",
            step.number,
            step.start_ns + event.gradients_ready_ns,
            step.end_of(event),
            micro=micro,
            update=micro if job.searches else sum(start_ns < event.start_ns for start_ns in updates),
            group=f"ddp{module}",
            message_bytes=job.gradient_bytes(reduced),
            where=event.where,
        )


def _collective_points(step: Step, counts: _PointCounts, job: _Job) -> Iterator[SyncPoint]:
    """Collectives called from Python. For an asynchronous one, the arrival is the start of the wait for it. If several are pending, each
    wait is for the oldest one."""
    if not any(event.kind in _CALLS for event in step.events):
        return
    backwards = [event for event in step.events if event.kind == EventKind.BACKWARD]
    updates = [event.start_ns for event in step.events if event.kind == EventKind.OPTIMIZER]
    # Without DDP, collectives between the last backward and the optimizer after it average the gradients.
    since_ns = math.inf if job.has_ddp else max((event.end_ns for event in backwards), default=math.inf)
    until_ns = min((start_ns for start_ns in updates if start_ns >= since_ns), default=math.inf)
    pending: deque[Event] = deque()
    for event in step.events:
        call, wait = event, event
        if event.kind == EventKind.WAIT and pending:
            call = pending.popleft()
        elif event.kind not in _CALLS or event.operation in POINT_TO_POINT:
            continue
        elif event.is_async:
            pending.append(event)
            continue
        yield SyncPoint(
            _key(step, counts, "call", call.group),
            _kind_of(call, wait, backwards, job, averages=since_ns <= call.start_ns <= until_ns),
            call.operation or call.kind,
            step.number,
            step.start_of(wait),
            step.end_of(wait),
            group=call.group,
            root=(call.source or 0) if call.operation in ROOTED else None,
            message_bytes=call.message_bytes,
            where=call.where,
        )


def _kind_of(call: Event, wait: Event, backwards: Sequence[Event], job: _Job, *, averages: bool) -> SyncKind:
    """Kind of a collective. ``averages``: whether it averages gradients, judged by its place in the step. If parameters are sharded,
    calls of the sharding library are ``MODEL`` instead of ``COLLECTIVE``."""
    if call.kind == EventKind.BARRIER:
        return SyncKind.BARRIER
    if averages:
        return SyncKind.GRADIENTS
    inside = any(event.start_ns <= wait.start_ns < event.end_ns for event in backwards)
    if job.sharded and (call.operation in _SHARD_CALLS or inside):
        return SyncKind.MODEL
    return SyncKind.COLLECTIVE


def _buffer_points(step: Step, counts: _PointCounts) -> Iterator[SyncPoint]:
    """Broadcasts of DDP's buffers from rank 0 at the start of a forward: all other ranks wait for rank 0."""
    for event in step.events:
        if event.kind == EventKind.BROADCAST:
            yield SyncPoint(
                _key(step, counts, "buffers", str(event.module)),
                SyncKind.BROADCAST,
                "DDP buffers",
                step.number,
                step.start_of(event),
                step.end_of(event),
                group=f"ddp{event.module}",
                root=0,
                where=event.where,
            )


class MatchedSync(msgspec.Struct, frozen=True):
    """One synchronisation on all its ranks."""

    key: Key
    points: Mapping[int, SyncPoint]
    """By index of the log, increasing."""
    first: SyncPoint
    """The point with the lowest index, for fields that are equal on all ranks."""

    @property
    def last_arrival_ns(self) -> int:
        """Epoch ns."""
        return max(point.arrival_ns for point in self.points.values())


def match_syncs(ranks: Sequence[Sequence[SyncPoint]]) -> tuple[list[MatchedSync], int]:
    """(synchronisations with all their members in order of last arrival, number of unmatched points).

    ``ranks``: the points of each rank. The members of a group are the ranks that recorded any of its synchronisations.
    """
    by_key: dict[Key, dict[int, SyncPoint]] = defaultdict(dict)
    members: dict[tuple[str, str], set[int]] = defaultdict(set)
    for position, points_of_rank in enumerate(ranks):
        for point in points_of_rank:
            by_key[point.key][position] = point
            members[point.key[:2]].add(position)
    matched, unmatched = [], 0
    for key, points in by_key.items():
        # If one rank missed a call, its sequence is shifted and different operations have the same key.
        same_operation = len({point.name for point in points.values()}) == 1
        if same_operation and len(points) == len(members[key[:2]]):
            matched.append(MatchedSync(key, points, next(iter(points.values()))))
        else:
            unmatched += len(points)
    matched.sort(key=lambda sync: sync.last_arrival_ns)
    return matched, unmatched
