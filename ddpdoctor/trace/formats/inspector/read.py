"""One file of NCCL Inspector → one rank's columns."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace.columns import (
    LIMIT_NS,
    LONGEST_NS,
    Collectives,
    Lane,
    RankTrace,
    TraceMeta,
    sorted_order,
)
from ddpdoctor.trace.formats import Candidate
from ddpdoctor.trace.formats.kineto.interner import Interner
from ddpdoctor.trace.sources import MOST_RANKS, Source

_MARK = b'"coll_perf"'
_FIRST_LINE_BYTES = 1 << 15
_LONGEST_LINE_BYTES = 1 << 20
"""One with the events of all channels has some kilobytes."""
_LONGEST_NAME = 1 << 7
_NS_PER_US = 1000
_OF_ALL = frozenset(("allgather", "reducescatter"))
"""Their size is one rank's part; what PyTorch tells is the whole."""


class _Header(msgspec.Struct):
    id: str
    rank: int
    n_ranks: int


class _Metadata(msgspec.Struct):
    hostname: str = ""


class _KernelTimes(msgspec.Struct):
    kernel_start_ts: int = 0
    kernel_stop_ts: int = 0


class _Times(msgspec.Struct):
    kernel_events: list[_KernelTimes] = []


class _Performance(msgspec.Struct):
    coll: str
    coll_sn: int = -1
    coll_msg_size_bytes: int = -1
    event_trace_ts: _Times | None = None


class _Line(msgspec.Struct):
    header: _Header
    coll_perf: _Performance
    metadata: _Metadata | None = None


def recognises(candidate: Candidate) -> bool:
    """See :class:`ddpdoctor.trace.formats.Format`."""
    text = (candidate.head or b"").lstrip()[:_FIRST_LINE_BYTES]
    return text.startswith(b"{") and _MARK in text and b'"traceEvents"' not in text


def read(path: str, rank: int | None) -> RankTrace:
    """See :class:`ddpdoctor.trace.formats.Format`."""
    source = Source(path)
    table = _Table()
    for text in _objects(source):
        table.add(text)
    if table.untimed and not table.start:
        raise UnusableInput(
            f"{path} is of NCCL Inspector without the times of its {table.untimed} collectives: record again with "
            "NCCL_INSPECTOR_DUMP_VERBOSE=1."
        )
    if not table.start:
        raise UnusableInput(f"{path} is of NCCL Inspector and holds no whole line of a collective.")
    return table.finish(path, rank, source.broken)


def _objects(source: Source) -> Iterator[bytes]:
    """The lines of a file, those that are too long left out."""
    rest, passing = b"", False
    for piece in source.pieces():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if not passing:
                yield line
            passing = False
        if len(rest) > _LONGEST_LINE_BYTES:
            rest, passing = b"", True
    if rest and not passing:
        yield rest


class _Table:
    """Collects the collectives of one process, which may be in several communicators."""

    def __init__(self) -> None:
        self.start: list[int] = []
        self.untimed = self.damaged = 0
        self._duration: list[int] = []
        self._columns: dict[str, list[int]] = defaultdict(list)
        self._names = Interner()
        self._groups = Interner()
        self._lane: list[int] = []
        self._name: list[int] = []
        self._seats: Counter[tuple[int, int]] = Counter()
        self._host = ""
        self._decoder = msgspec.json.Decoder(_Line)

    def add(self, text: bytes) -> None:
        """Appends the collective of one line."""
        if not text.strip():
            return
        try:
            line = self._decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self.damaged += 1
            return
        events = line.coll_perf.event_trace_ts.kernel_events if line.coll_perf.event_trace_ts else []
        times = [(one.kernel_start_ts, one.kernel_stop_ts) for one in events if one.kernel_start_ts > 0]
        start_us, end_us = min((a for a, _ in times), default=0), max((b for _, b in times), default=0)
        limit_us = LIMIT_NS // _NS_PER_US
        if not 0 < start_us <= end_us < limit_us or end_us - start_us > LONGEST_NS // _NS_PER_US:
            self.untimed += 1
            return
        self._put(line, start_us * _NS_PER_US, (end_us - start_us) * _NS_PER_US)

    def _put(self, line: _Line, start_ns: int, duration_ns: int) -> None:
        header, told = line.header, line.coll_perf
        operation = told.coll[:_LONGEST_NAME]
        size = header.n_ranks if 0 < header.n_ranks < MOST_RANKS else -1
        parts = size if operation.lower() in _OF_ALL else 1
        whole = told.coll_msg_size_bytes * parts if told.coll_msg_size_bytes >= 0 and parts > 0 else -1
        known = 0 <= whole < LIMIT_NS
        self.start.append(start_ns)
        self._duration.append(duration_ns)
        self._name.append(self._names[f"ncclDevKernel_{operation}"])
        self._lane.append(self._groups[header.id[:_LONGEST_NAME]])
        self._seats[size, header.rank] += 1
        self._host = self._host or (line.metadata.hostname[:_LONGEST_NAME] if line.metadata else "")
        for column, value in (
            ("operation", self._names[operation.lower()]),
            ("group", self._names[header.id[:_LONGEST_NAME]]),
            ("group_size", size),
            ("sequence", told.coll_sn if 0 <= told.coll_sn < LIMIT_NS else -1),
            ("in_elements", whole if known else -1),
            ("dtype", self._names["byte"] if known else -1),
        ):
            self._columns[column].append(value)

    def finish(self, path: str, rank: int | None, broken: str | None) -> RankTrace:
        """The columns, in the order of time."""
        start, duration = (np.array(of, np.int64) for of in (self.start, self._duration))
        order = sorted_order(start, duration)
        count = len(order)
        # Of its communicators the widest, where it has the world's number of it.
        size, own = max(self._seats, key=lambda seat: (seat[0], self._seats[seat]))
        absent: dict[str, Any] = {
            name: np.full(count, -1, np.int64) for name in ("correlation", "external_id", "bytes")
        }
        lane = np.array(self._lane, np.int32)[order]
        return RankTrace(
            meta=TraceMeta(
                source=path,
                rank=rank if rank is not None else own if 0 <= own < MOST_RANKS else None,
                rank_from="run directory" if rank is not None else "distributedInfo",
                world_size=size if size > 0 else None,
                backend="nccl",
                host=self._host or None,
                truncated=broken is not None,
                notes=tuple(self._notes(path, broken)),
            ),
            names=list(self._names),
            categories=["kernel"],
            lanes=[
                Lane("0", str(number), f"communicator {name}") for number, name in enumerate(self._groups)
            ],
            name=np.array(self._name, np.int32)[order],
            category=np.zeros(count, np.int32),
            lane=lane,
            start_ns=start[order],
            duration_ns=duration[order],
            stream=lane,
            device=np.zeros(count, np.int32),
            shapes=np.full(count, -1, np.int32),
            collectives=_collectives(self._columns, order),
            **absent,
        )

    def _notes(self, path: str, broken: str | None) -> Iterator[str]:
        if broken:
            yield f"{path} {broken}: its {len(self.start)} whole lines are used, what came after is lost."
        if self.damaged:
            yield f"{path}: {self.damaged} line(s) that NCCL Inspector does not write so were left out."
        if self.untimed:
            yield f"{path}: {self.untimed} collective(s) without times were left out."


def _collectives(columns: dict[str, list[int]], order: Sequence[int]) -> Collectives:
    made: dict[str, Any] = {}
    for name, kind in Collectives.__annotations__.items():
        values = np.array(columns.get(name, [-1] * len(order)), np.int64)[order]
        made[name] = values.astype(np.int32 if kind == "IdColumn" else np.int64)
    made["event"] = np.arange(len(order), dtype=np.int32)
    return Collectives(**made)
