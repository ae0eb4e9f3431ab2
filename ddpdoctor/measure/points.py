"""Synchronisation points of step logs: where a rank arrives and when it goes on, matched over the ranks by
what they are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from .graph import BARRIER, BROADCAST, COLLECTIVE, GRADIENTS
from .steplog import Event, RankLog, Step

Key = tuple[str, str, int]

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
    has_ddp = bool(log.record.info.get("ddp"))
    buffers = any(
        ddp.get("broadcast_buffers") and ddp.get("buffer_bytes") for ddp in log.record.info.get("ddp") or []
    )
    points: list[Point] = []
    for step in log.steps:
        points.extend(_backward_points(log, step))
        points.extend(_called_points(step, has_ddp))
    if buffers:
        points.extend(_buffer_points(log))
    points.sort(key=lambda point: point.arrival)
    return points


def _backward_points(log: RankLog, step: Step) -> list[Point]:
    """DDP's reductions: the rank arrives when its last gradient is ready, not when its backward pass begins
    or ends."""
    points = []
    backwards = [event for event in step.events if event.k == "bwd"]
    for micro, event in enumerate(backwards):
        if not event.sync or event.m < 0:
            continue
        arrival = gradients_ready(log, event)
        points.append(
            Point(
                ("ddp", str(event.m), event.it),
                GRADIENTS,
                "DDP gradients",
                step.number,
                min(arrival, event.stop),
                event.stop,
                micro=micro,
                group=f"ddp{event.m}",
                message_bytes=_gradient_bytes(log, event.m),
                where=event.w,
            )
        )
    return points


def gradients_ready(log: RankLog, event: Event) -> int:
    """Epoch ns at which the last gradient of this backward pass was ready: DDP's own stamp, else from the
    buckets' times."""
    stamps = log.stamps.get((event.m, event.it))
    if stamps is not None and event.s <= stamps.ce <= event.stop + 1_000_000:
        return stamps.ce
    if event.ready:
        return (event.base if event.base is not None else event.s) + max(event.ready)
    return event.stop


def _gradient_bytes(log: RankLog, module: int) -> float | None:
    modules = log.record.info.get("ddp") or []
    return float(modules[module].get("parameters_bytes") or 0) or None if 0 <= module < len(modules) else None


def _called_points(step: Step, has_ddp: bool) -> list[Point]:
    """Collectives called from Python. Without DDP, those between backward and optimizer average the
    gradients."""
    points: list[Point] = []
    pending: Event | None = None
    last_backward = max((e.stop for e in step.events if e.k == "bwd"), default=None)
    optimizer = min(
        (e.s for e in step.events if e.k == "opt" and (last_backward is None or e.s >= last_backward)),
        default=None,
    )
    for event in step.events:
        if event.k in ("coll", "bar") and not event.p2p and event.seq >= 0:
            if event.is_async:
                pending = event
                continue
            points.append(_called(step, event, event.s, event.stop, has_ddp, last_backward, optimizer))
        elif event.k == "wait" and pending is not None:
            points.append(_called(step, pending, event.s, event.stop, has_ddp, last_backward, optimizer))
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
    kind = BARRIER if event.k == "bar" else COLLECTIVE
    if (
        kind == COLLECTIVE
        and not has_ddp
        and backward is not None
        and event.s >= backward
        and (optimizer is None or event.s <= optimizer)
    ):
        kind = GRADIENTS
    return Point(
        ("call", event.pg, event.seq),
        kind,
        event.op or event.k,
        step.number,
        arrival,
        end,
        group=event.pg,
        root=(event.src or 0) if event.op in ROOTED else None,
        message_bytes=event.b,
        where=event.w,
    )


def _buffer_points(log: RankLog) -> list[Point]:
    """DDP broadcasts its buffers from rank 0 at the start of each synchronised forward: all others wait there
    for rank 0."""
    points = []
    step_of = {(e.m, e.it): step.number for step in log.steps for e in step.events if e.k == "bwd" and e.sync}
    for key, stamps in log.stamps.items():
        if stamps.fs and key in step_of:
            points.append(
                Point(
                    ("buffers", str(key[0]), key[1]),
                    BROADCAST,
                    "DDP buffers",
                    step_of[key],
                    stamps.fs,
                    stamps.fs,
                    group=f"ddp{key[0]}",
                    root=0,
                )
            )
    return points


def match(points: Sequence[Sequence[Point]], ranks: Sequence[int]) -> tuple[list[Meeting], int]:
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
    for meeting in meetings:
        if meeting.key[0] == "buffers":
            _end_of_broadcast(meeting, ranks)
    meetings.sort(key=lambda meeting: meeting.last_arrival)
    return meetings, unmatched


def _same(found: dict[int, Point]) -> bool:
    """Whether all ranks mean the same by this key: a sequence that slipped on one rank pairs different
    operations."""
    return len(Counter(point.name for point in found.values())) == 1


def _end_of_broadcast(meeting: Meeting, ranks: Sequence[int]) -> None:
    """A rank goes on when both it and the root have arrived; the transfer of a few buffers itself was not
    recorded."""
    root = meeting.points.get(ranks.index(0)) if 0 in ranks else None
    if root is not None:
        for point in meeting.points.values():
            point.end = max(point.arrival, root.arrival)
