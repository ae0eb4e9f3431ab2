"""Synchronisation points of step logs: where a rank arrives and when it goes on, matched over the ranks by
what they are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ddpdoctor.measure.taxonomy import SyncKind
from ddpdoctor.rundir import EventKind

from .log import Event, RankLog, Step

Key = tuple[str, str, int]
"""Kind, group or module, and number: the step's times ``_MOST_IN_STEP`` plus the point's in it."""
_MOST_IN_STEP = 1 << 20

POINT_TO_POINT = (
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "send_object_list",
    "recv_object_list",
)
_OF_SHARDS = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single")
"""With which FSDP and DeepSpeed gather parameters and scatter gradients, by both names that torch has for them."""
ROOTED = ("broadcast", "broadcast_object_list", "scatter", "scatter_object_list")


@dataclass
class Point:
    """One rank's part in one synchronisation; times epoch ns."""

    key: Key
    kind: str
    name: str
    step: int
    arrival: int
    end: int
    micro: int = 0
    update: int = 0
    group: str = ""
    root: int | None = None
    """Rank number of the root of a broadcast."""
    message_bytes: float | None = None
    where: int = -1
    work_end: int | None = None
    """End of the backward pass's own computation, for gradients."""


@dataclass
class Meeting:
    """The same synchronisation on all its ranks, by position."""

    key: Key
    points: dict[int, Point]

    @property
    def first(self) -> Point:
        """The point of the lowest position, for what is the same on all."""
        return self.points[min(self.points)]

    @property
    def last_arrival(self) -> int:
        """ns"""
        return max(point.arrival for point in self.points.values())


def rank_points(log: RankLog) -> list[Point]:
    """All synchronisation points of one rank, in order of arrival."""
    info = log.record.info
    has_ddp = bool(info.get("ddp"))
    # deepspeed is also imported by libraries that only could use it.
    sharded = bool(info.get("fsdp") or (info.get("deepspeed") and not has_ddp))
    points: list[Point] = []
    for step in log.steps:
        of_step = [
            *_backward_points(log, step),
            *(_of_model(point, step) if sharded else point for point in _called_points(step, has_ddp)),
            *_buffer_points(step),
        ]
        _number(of_step)
        points.extend(of_step)
    points.sort(key=lambda point: point.arrival)
    return points


def _number(points: list[Point]) -> None:
    """Complete the keys of one step's points: how many of the same kind and group there were before it in the step.

    Ranks may record different steps in full, so that what they counted over the whole run would differ.
    """
    seen: Counter[tuple[str, str]] = Counter()
    for point in points:
        kind, group, _ = point.key
        point.key = (kind, group, point.step * _MOST_IN_STEP + seen[kind, group])
        seen[kind, group] += 1


def _backward_points(log: RankLog, step: Step) -> list[Point]:
    """DDP's reductions: the rank arrives when its last gradient is ready, not when its backward pass begins
    or ends."""
    points = []
    backwards = [event for event in step.events if event.kind == EventKind.BACKWARD]
    for micro, event in enumerate(backwards):
        reduced = event.reductions
        if not reduced:
            continue
        points.append(
            Point(
                ("ddp", str(reduced[0].module), 0),
                SyncKind.GRADIENTS,
                "DDP gradients",
                step.number,
                min(gradients_ready(event), event.end_ns),
                event.end_ns,
                micro=micro,
                update=sum(
                    other.kind == EventKind.OPTIMIZER and other.start_ns < event.start_ns
                    for other in step.events
                ),
                group=f"ddp{reduced[0].module}",
                message_bytes=sum(_gradient_bytes(log, each.module) for each in reduced) or None,
                where=event.where,
            )
        )
    return points


def gradients_ready(event: Event) -> int:
    """Epoch ns at which the last gradient of this backward pass was ready, by the reducer's own times."""
    moments = [
        (each.forward_end_ns if each.forward_end_ns is not None else event.start_ns) + max(each.ready_ns)
        for each in event.reductions
        if each.ready_ns
    ]
    return max(moments) if moments else event.end_ns


def _gradient_bytes(log: RankLog, module: int) -> float:
    modules = log.record.info.get("ddp") or []
    return float(modules[module].get("parameters_bytes") or 0) if 0 <= module < len(modules) else 0.0


def _called_points(step: Step, has_ddp: bool) -> list[Point]:
    """Collectives called from Python. Without DDP, those between backward and optimizer average the
    gradients."""
    points: list[Point] = []
    pending: Event | None = None
    last_backward = max((e.end_ns for e in step.events if e.kind == EventKind.BACKWARD), default=None)
    optimizer = min(
        (
            e.start_ns
            for e in step.events
            if e.kind == EventKind.OPTIMIZER and (last_backward is None or e.start_ns >= last_backward)
        ),
        default=None,
    )
    for event in step.events:
        if event.kind in (EventKind.COLLECTIVE, EventKind.BARRIER) and event.operation not in POINT_TO_POINT:
            if event.is_async:
                pending = event
                continue
            points.append(
                _called(step, event, event.start_ns, event.end_ns, has_ddp, last_backward, optimizer)
            )
        elif event.kind == EventKind.WAIT and pending is not None:
            points.append(
                _called(step, pending, event.start_ns, event.end_ns, has_ddp, last_backward, optimizer)
            )
            pending = None
    return points


def _called(
    step: Step,
    event: Event,
    arrival: int,
    end: int,
    has_ddp: bool,
    backward: int | None,
    optimizer: int | None,
) -> Point:
    kind = SyncKind.BARRIER if event.kind == EventKind.BARRIER else SyncKind.COLLECTIVE
    if (
        kind == SyncKind.COLLECTIVE
        and not has_ddp
        and backward is not None
        and event.start_ns >= backward
        and (optimizer is None or event.start_ns <= optimizer)
    ):
        kind = SyncKind.GRADIENTS
    return Point(
        ("call", event.group, 0),
        kind,
        event.operation or event.kind,
        step.number,
        arrival,
        end,
        group=event.group,
        root=(event.source or 0) if event.operation in ROOTED else None,
        message_bytes=event.message_bytes,
        where=event.where,
    )


def _of_model(point: Point, step: Step) -> Point:
    """The same with its kind, where the parameters are sharded: the library's own calls are not the script's."""
    if point.kind == SyncKind.COLLECTIVE and (
        point.name in _OF_SHARDS
        or any(
            event.kind == EventKind.BACKWARD and event.start_ns <= point.arrival < event.end_ns
            for event in step.events
        )
    ):
        point.kind = SyncKind.MODEL
    return point


def _buffer_points(step: Step) -> list[Point]:
    """DDP broadcasts its buffers from rank 0 at the start of a forward: all others wait there for rank 0."""
    return [
        Point(
            ("buffers", str(event.module), 0),
            SyncKind.BROADCAST,
            "DDP buffers",
            step.number,
            event.start_ns,
            event.end_ns,
            group=f"ddp{event.module}",
            root=0,
            where=event.where,
        )
        for event in step.events
        if event.kind == EventKind.BROADCAST
    ]


def match(points: Sequence[Sequence[Point]]) -> tuple[list[Meeting], int]:
    """Meetings of all members, in order of last arrival, and how many points had no counterpart on another
    rank.

    The members of a group are the ranks on which any of its synchronisations was seen.
    """
    by_key: dict[Key, dict[int, Point]] = defaultdict(dict)
    members: dict[tuple[str, str], set[int]] = defaultdict(set)
    for position, of_rank in enumerate(points):
        for point in of_rank:
            by_key[point.key][position] = point
            members[point.key[:2]].add(position)
    meetings, unmatched = [], 0
    for key, found in by_key.items():
        if len(found) == len(members[key[:2]]) and _same(found):
            meetings.append(Meeting(key, found))
        else:
            unmatched += len(found)
    meetings.sort(key=lambda meeting: meeting.last_arrival)
    return meetings, unmatched


def _same(found: dict[int, Point]) -> bool:
    """Whether all ranks mean the same by this key: a sequence that slipped on one rank pairs different
    operations."""
    return len(Counter(point.name for point in found.values())) == 1
