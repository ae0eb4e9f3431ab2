"""Rows of all kinds → the columns of a :class:`RankTrace`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddpdoctor.trace.columns import (
    LIMIT_NS,
    LONGEST_NS,
    Collectives,
    IdColumn,
    IntColumn,
    RankTrace,
    TraceMeta,
    sorted_order,
)
from ddpdoctor.trace.formats.kineto.lanes import Interner

from .database import (
    ANNOTATION,
    COPIES,
    FILLS,
    GRAPHS,
    KERNELS,
    LIBRARY,
    MISSING,
    NAMES,
    NVTX,
    OS_CALLS,
    RUNTIME,
    Batch,
    Database,
    Fields,
    Payloads,
    Range,
    read_text,
)

_COMMON = ("start", "end", "deviceId", "streamId", "correlationId")
_WAYS = {
    1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH", 10: "PtoP",
    11: "HtoD", 12: "DtoH", 13: "DtoD",
}  # fmt: skip
"""CUPTI's numbers for the ways of a copy, of managed memory too; what a file that names them says otherwise goes before."""
_MEMORY = {
    0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device Static", 6: "Managed Static",
}  # fmt: skip
"""The same for kinds of memory."""
_SIDES = {"HTOD", "DTOH", "HTOA", "ATOH", "ATOA", "ATOD", "DTOA", "DTOD", "HTOH", "PTOP"}


def add_device_work(database: Database, table: Table) -> None:
    """Appends what devices did for the process to ``table``. Raises :class:`DamagedError`."""
    known: dict[int, str] = {}
    for batch in database.batches(KERNELS, (*_COMMON, *NAMES)):
        number = named(batch)
        new = [one for one in np.unique(number).tolist() if one not in known and one != MISSING]
        known.update(database.strings(new))
        _add(table, batch, "kernel", [known.get(one, "") for one in number.tolist()])
    ways = _WAYS | _named_ways(database)
    memory = _MEMORY | dict(_labels(database, "ENUM_CUDA_MEM_KIND"))
    for batch in database.batches(COPIES, (*_COMMON, "bytes", "copyKind", "srcKind", "dstKind")):
        kinds = zip(*(batch[name].tolist() for name in ("copyKind", "srcKind", "dstKind")), strict=True)
        _add(table, batch, "gpu_memcpy", [_copy(kind, ways, memory) for kind in kinds])
    for batch in database.batches(FILLS, (*_COMMON, "bytes")):
        _add(table, batch, "gpu_memset", ["Memset (Device)"] * len(batch["start"]))
    for batch in database.batches(GRAPHS, (*_COMMON, "graphId")):
        # Which kernels it is made of was not recorded: the device computes meanwhile, that is all.
        numbers = [f" {number}" if number != MISSING else "" for number in batch["graphId"].tolist()]
        _add(table, batch, "kernel", [f"CUDA graph{number}" for number in numbers])


def _add(table: Table, batch: Batch, category: str, names: list[str]) -> None:
    table.add(
        category,
        names,
        batch["start"],
        lengths(batch),
        device=batch["deviceId"],
        stream=batch["streamId"],
        correlation=np.where(batch["correlationId"] > 0, batch["correlationId"], -1),
        moved=batch.get("bytes"),
    )


def named(batch: Batch) -> IntColumn:
    """The number of each kernel's name: of the first of :data:`NAMES` that its row has."""
    number: IntColumn = batch[NAMES[-1]]
    for name in reversed(NAMES[:-1]):
        number = np.where(batch[name] != MISSING, batch[name], number)
    return number


def lengths(batch: Batch) -> IntColumn:
    """How long each event took, -1 where it has no begin or no end."""
    known = (batch["start"] != MISSING) & (batch["end"] != MISSING)
    return np.where(known, batch["end"] - np.where(known, batch["start"], 0), -1)


def _copy(kinds: tuple[int, int, int], ways: Mapping[int, str], memory: Mapping[int, str]) -> str:
    """The name that Kineto gives such a copy: ``Memcpy HtoD (Pinned -> Device)``."""
    way, source, target = kinds
    if way not in ways:
        return "Memcpy"
    if source not in memory or target not in memory:
        return f"Memcpy {ways[way]}"
    return f"Memcpy {ways[way]} ({memory[source]} -> {memory[target]})"


def _named_ways(database: Database) -> dict[int, str]:
    """The ways of copies as the file numbers them: CUDA_MEMCPY_KIND_HTOD is one."""
    ends = {
        number: name.rpartition("_")[2].upper()
        for number, name in database.small("ENUM_CUDA_MEMCPY_OPER", "id", "name")
        if isinstance(number, int) and isinstance(name, str)
    }
    return {number: f"{end[0]}to{end[3]}" for number, end in ends.items() if end in _SIDES}


def _labels(database: Database, table: str) -> Iterable[tuple[int, str]]:
    for number, label in database.small(table, "id", "label"):
        if isinstance(number, int) and isinstance(label, str):
            yield number, label


_VERSION = re.compile(r"_v\d{4,5}$")
"""Nsight Systems adds the version in which CUDA got a function: cudaLaunchKernel_v7000."""
_DRIVER = re.compile(r"cu[A-Z]")
_CATEGORIES = ("cuda_runtime", "cuda_driver", "os_runtime")


def add_calls(database: Database, table: Table) -> None:
    """Appends the calls of the process to ``table``. Raises :class:`DamagedError`."""
    known: dict[int, tuple[str, str]] = {}
    for name in (RUNTIME, OS_CALLS):
        for batch in database.batches(name, ("start", "end", "globalTid", "correlationId", "nameId")):
            numbers = batch["nameId"].tolist()
            new = [number for number in set(numbers) if number not in known and number != MISSING]
            for number, text in database.strings(new).items():
                known[number] = _call(text, name)
            told = [
                known.get(number, ("", _CATEGORIES[0] if name == RUNTIME else _CATEGORIES[2]))
                for number in numbers
            ]
            correlation = np.where(batch["correlationId"] > 0, batch["correlationId"], -1)
            table.add(
                [category for _, category in told],
                [text for text, _ in told],
                batch["start"],
                lengths(batch),
                thread=batch["globalTid"],
                correlation=correlation if name == RUNTIME else None,
            )


def _call(text: str, table: str) -> tuple[str, str]:
    """(Name as Kineto writes it, category) of a call."""
    if table == OS_CALLS:
        return text, _CATEGORIES[2]
    name = _VERSION.sub("", text)
    return name, _CATEGORIES[1] if _DRIVER.match(name) else _CATEGORIES[0]


_REMEMBERED = 1 << 16
"""Texts whose meaning is kept; those of operators have a number each."""


class Mark(NamedTuple):
    """A range that tells more than its time; times as in the file."""

    name: str
    start: int
    end: int
    thread: int
    payload: Fields
    """What it carries, by its name; {} without."""


class Ranges(msgspec.Struct, frozen=True):
    """What the ranges of a process told besides their rows."""

    annotations: list[Mark] = msgspec.field(default_factory=list)
    calls: list[Mark] = msgspec.field(default_factory=list)
    """Of NCCL."""


def read_ranges(database: Database, table: Table, found: Ranges) -> None:
    """Appends the process's ranges to ``table`` and, of some, what they tell besides to ``found``. Ranges that were still open when the
    recording ended have no length and are left out. Raises :class:`DamagedError`."""
    payloads = Payloads(database)
    known: dict[str, Range] = {}
    registered: dict[int, str] = {}
    columns = ("start", "end", "globalTid", "textId")
    for batch in database.batches(NVTX, columns, ("text",), ("binaryData",), 'e."end" >= e.start'):
        texts = list(_texts(database, batch, registered))
        told = [_range(text, known) for text in texts]
        start, end = batch["start"], batch["end"]
        table.add(
            [one.category for one in told],
            [one.name for one in told],
            start,
            np.where((start != MISSING) & (end != MISSING), end - start, 0),
            thread=batch["globalTid"],
            shapes=[one.shapes for one in told],
        )
        times = zip(*(batch[name].tolist() for name in ("start", "end", "globalTid")), strict=True)
        for one, (begin, over, thread), data in zip(told, times, batch["binaryData"], strict=True):
            if one.category == ANNOTATION:
                found.annotations.append(Mark(one.name, begin, over, thread, {}))
            elif one.category == LIBRARY and one.name.startswith("nccl"):
                found.calls.append(Mark(one.name, begin, over, thread, payloads.of(data)))


def _range(text: str, known: dict[str, Range]) -> Range:
    """What ``text`` says; texts repeat where operators are not numbered."""
    one = known.get(text)
    if one is None:
        one = read_text(text)
        if len(known) < _REMEMBERED:
            known[text] = one
    return one


def _texts(database: Database, batch: Batch, registered: dict[int, str]) -> Iterator[str]:
    """The text of each range: its own, else the registered one that it refers to."""
    wanted = [
        number
        for number, text in zip(batch["textId"].tolist(), batch["text"], strict=True)
        if text is None and number != MISSING
    ]
    registered.update(database.strings([number for number in set(wanted) if number not in registered]))
    for number, text in zip(batch["textId"].tolist(), batch["text"], strict=True):
        yield text if text is not None else registered.get(number, "")


_INT32 = np.iinfo(np.int32)
_NARROW = ("name", "category", "lane", "stream", "device", "shapes")
_WIDE = ("start_ns", "duration_ns", "correlation", "bytes")


class Table:
    """Collects rows; :meth:`finish` sorts them."""

    def __init__(self) -> None:
        self._names = Interner()
        self._categories = Interner()
        self._lanes = Interner()
        """(None, a thread's global number), or (device, stream)."""
        self._parts: dict[str, list[NDArray[Any]]] = defaultdict(list)
        self.left_out = 0
        """Rows whose times cannot be."""
        self.rows = 0

    def add(
        self,
        category: str | Sequence[str],
        name: Sequence[str],
        start: IntColumn,
        duration: IntColumn,
        *,
        thread: IntColumn | None = None,
        device: IntColumn | None = None,
        stream: IntColumn | None = None,
        correlation: IntColumn | None = None,
        moved: IntColumn | None = None,
        shapes: Sequence[str] | None = None,
    ) -> None:
        """Appends those of some events that have a time; times as in the file, :data:`MISSING` where a number is absent. ``thread``: the
        global numbers of the threads; None for what a device does. ``moved``: bytes."""
        good = _can_be(start) & (duration >= 0) & (duration <= LONGEST_NS)
        self.left_out += int((~good).sum())
        count = len(name)
        categories = [category] * count if isinstance(category, str) else list(category)
        on_device, streams = _narrow(device, count), _narrow(stream, count)
        lanes: Iterable[tuple[int | None, int]] = zip(on_device.tolist(), streams.tolist(), strict=True)
        if thread is not None:
            lanes = ((None, number) for number in thread.tolist())
        columns: dict[str, NDArray[Any]] = {
            "start_ns": start,
            "duration_ns": duration,
            "name": self._names.ids(list(name)),
            "category": self._categories.ids(categories),
            "lane": self._lanes.ids(list(lanes)),
            "stream": streams,
            "device": on_device,
            "correlation": _known(correlation, count),
            "bytes": _known(moved, count),
            "shapes": self._shape(shapes, count),
        }
        for column, values in columns.items():
            self._parts[column].append(values[good])
        self.rows += int(good.sum())

    def _shape(self, shapes: Sequence[str] | None, count: int) -> IdColumn:
        if shapes is None or not any(shapes):
            return np.full(count, -1, np.int32)
        told = np.array([bool(text) for text in shapes])
        ids: IdColumn = np.full(count, -1, np.int32)
        ids[told] = self._names.ids([text for text in shapes if text])
        return ids

    def earliest_ns(self) -> int | None:
        """Start of the first event."""
        return min((int(part.min()) for part in self._parts["start_ns"] if part.size), default=None)

    def name(self, text: str) -> int:
        """Number of a name, new or not."""
        return self._names[text]

    @property
    def threads(self) -> dict[int, int]:
        """Global number of a thread → its lane."""
        return {number: lane for lane, (kind, number) in enumerate(self._lanes) if kind is None}

    def finish(self, meta: TraceMeta, base_ns: int) -> RankTrace:
        """The trace without its collectives, rows sorted, ``base_ns`` added to all starts."""
        columns: dict[str, Any] = {
            name: np.concatenate(self._parts.pop(name)).astype(np.int32 if name in _NARROW else np.int64)
            for name in (*_NARROW, *_WIDE)
        }
        columns["start_ns"] += base_ns
        order = sorted_order(columns["start_ns"], columns["duration_ns"])
        order = order[_can_be(columns["start_ns"][order])]
        columns = {name: values[order] for name, values in columns.items()}
        return RankTrace(
            meta=meta,
            names=list(self._names),
            categories=list(self._categories),
            external_id=np.full(len(order), -1, np.int64),
            collectives=Collectives.of({}),
            **columns,
        )


def _can_be(start: IntColumn) -> NDArray[np.bool_]:
    """Which of these times can be one."""
    possible: NDArray[np.bool_] = (start > -LIMIT_NS) & (start < LIMIT_NS)
    return possible


def _known(values: IntColumn | None, count: int) -> IntColumn:
    """``values``, -1 where one is absent or negative."""
    if values is None:
        return np.full(count, -1, np.int64)
    return np.maximum(values, -1)


def _narrow(values: IntColumn | None, count: int) -> IntColumn:
    """The same, -1 too where one does not fit 32 bits."""
    known = _known(values, count)
    return np.where(known > _INT32.max, -1, known)
