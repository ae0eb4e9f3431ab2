"""Reads kernels, copies, API calls and NVTX ranges of one process and builds the columns of a :class:`RankTrace`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddpdoctor.trace.columns import (
    LIMIT_NS,
    MAX_DURATION_NS,
    Collectives,
    ColumnParts,
    IdColumn,
    IntColumn,
    Interner,
    RankTrace,
    TraceMeta,
)

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
    parse_range_text,
)

_COMMON = ("start", "end", "deviceId", "streamId", "correlationId")
_COPY_KINDS = {
    1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH", 10: "PtoP",
    11: "HtoD", 12: "DtoH", 13: "DtoD",
}  # fmt: skip
"""Copy kinds by CUPTI's numbers, including managed memory. The file's own table of names takes precedence."""
_MEMORY = {
    0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device Static", 6: "Managed Static",
}  # fmt: skip
"""Memory kinds by CUPTI's numbers."""
_SIDES = {"HTOD", "DTOH", "HTOA", "ATOH", "ATOA", "ATOD", "DTOA", "DTOD", "HTOH", "PTOP"}


def add_device_work(database: Database, table: EventTable) -> None:
    """Appends the device events of the process to ``table``. Raises :class:`DamagedError`."""
    for batch in database.batches(KERNELS, (*_COMMON, *NAMES)):
        _add(table, batch, "kernel", database.strings(kernel_name_ids(batch)))
    copy_kinds = _COPY_KINDS | _copy_kinds_in(database)
    labels = database.first_rows("ENUM_CUDA_MEM_KIND", "id", "label")
    memory = _MEMORY | {k: v for k, v in labels if isinstance(k, int) and isinstance(v, str)}
    for batch in database.batches(COPIES, (*_COMMON, "bytes", "copyKind", "srcKind", "dstKind")):
        kinds = zip(*(batch[name].tolist() for name in ("copyKind", "srcKind", "dstKind")), strict=True)
        _add(table, batch, "gpu_memcpy", [_copy(kind, copy_kinds, memory) for kind in kinds])
    for batch in database.batches(FILLS, (*_COMMON, "bytes")):
        _add(table, batch, "gpu_memset", ["Memset (Device)"] * len(batch["start"]))
    for batch in database.batches(GRAPHS, (*_COMMON, "graphId")):
        # The kernels of the graph were not recorded, so the graph is added as one kernel.
        numbers = [f" {number}" if number != MISSING else "" for number in batch["graphId"].tolist()]
        _add(table, batch, "kernel", [f"CUDA graph{number}" for number in numbers])


def _add(table: EventTable, batch: Batch, category: str, names: list[str]) -> None:
    table.add(
        category,
        names,
        batch["start"],
        durations(batch),
        device=batch["deviceId"],
        stream=batch["streamId"],
        correlation=np.where(batch["correlationId"] > 0, batch["correlationId"], -1),
        moved=batch.get("bytes"),
    )


def kernel_name_ids(batch: Batch) -> IntColumn:
    """[rows] string id of each kernel's name: the first column of :data:`NAMES` that is present."""
    number: IntColumn = batch[NAMES[-1]]
    for name in reversed(NAMES[:-1]):
        number = np.where(batch[name] != MISSING, batch[name], number)
    return number


def durations(batch: Batch) -> IntColumn:
    """[rows] duration of each event, -1 if it has no start or no end."""
    known = (batch["start"] != MISSING) & (batch["end"] != MISSING)
    return np.where(known, batch["end"] - np.where(known, batch["start"], 0), -1)


def _copy(kinds: tuple[int, int, int], copy_kinds: Mapping[int, str], memory: Mapping[int, str]) -> str:
    """Kineto's name of a copy, such as ``Memcpy HtoD (Pinned -> Device)``."""
    way, source, target = kinds
    if way not in copy_kinds:
        return "Memcpy"
    if source not in memory or target not in memory:
        return f"Memcpy {copy_kinds[way]}"
    return f"Memcpy {copy_kinds[way]} ({memory[source]} -> {memory[target]})"


def _copy_kinds_in(database: Database) -> dict[int, str]:
    """Copy kinds by the file's own numbers, such as HtoD for the number of CUDA_MEMCPY_KIND_HTOD."""
    ends = {
        number: name.rpartition("_")[2].upper()
        for number, name in database.first_rows("ENUM_CUDA_MEMCPY_OPER", "id", "name")
        if isinstance(number, int) and isinstance(name, str)
    }
    return {number: f"{end[0]}to{end[3]}" for number, end in ends.items() if end in _SIDES}


_VERSION = re.compile(r"_v\d{4,5}$")
"""Suffix that Nsight Systems appends, the CUDA version that introduced a function: cudaLaunchKernel_v7000."""
_DRIVER = re.compile(r"cu[A-Z]")


def add_calls(database: Database, table: EventTable) -> None:
    """Appends the CUDA and OS runtime calls of the process to ``table``. Raises :class:`DamagedError`."""
    for name in (RUNTIME, OS_CALLS):
        for batch in database.batches(name, ("start", "end", "globalTid", "correlationId", "nameId")):
            texts = database.strings(batch["nameId"])
            parsed = {text: _call(text, name) for text in set(texts)}
            correlation = np.where(batch["correlationId"] > 0, batch["correlationId"], -1)
            table.add(
                [parsed[text][1] for text in texts],
                [parsed[text][0] for text in texts],
                batch["start"],
                durations(batch),
                thread=batch["globalTid"],
                correlation=correlation if name == RUNTIME else None,
            )


def _call(text: str, table: str) -> tuple[str, str]:
    """(Kineto's name, category) of a call."""
    if table == OS_CALLS:
        return text, "os_runtime"
    name = _VERSION.sub("", text)
    return name, "cuda_driver" if _DRIVER.match(name) else "cuda_runtime"


_MAX_MEMOIZED = 1 << 16
"""Most range texts whose parsed form is memoized. Texts repeat unless operators are numbered."""


class NvtxRange(NamedTuple):
    """An NVTX range that later stages evaluate, with the file's times."""

    name: str
    start: int
    end: int
    thread: int
    payload: Fields
    """Values of the range's payload by label; {} without one."""


class ProcessRanges(msgspec.Struct, frozen=True):
    """The ranges of a process that later stages evaluate."""

    annotations: list[NvtxRange] = msgspec.field(default_factory=list)
    nccl_calls: list[NvtxRange] = msgspec.field(default_factory=list)
    """Ranges of NCCL's API calls."""


def read_ranges(database: Database, table: EventTable, found: ProcessRanges) -> None:
    """Appends the process's ranges to ``table``, and annotations and NCCL calls to ``found``. Ranges that were open when the recording
    ended are skipped. Raises :class:`DamagedError`."""
    payloads = Payloads(database)
    parse = lru_cache(_MAX_MEMOIZED)(parse_range_text)
    columns = ("start", "end", "globalTid", "textId")
    for batch in database.batches(NVTX, columns, ("text",), ("binaryData",), 'e."end" >= e.start'):
        # A range without a text refers to a registered string.
        is_own = np.array([text is not None for text in batch["text"]], bool)
        registered = database.strings(np.where(is_own, MISSING, batch["textId"]))
        parsed = [parse(own or known) for own, known in zip(batch["text"], registered, strict=True)]
        start, end = batch["start"], batch["end"]
        table.add(
            [one.category for one in parsed],
            [one.name for one in parsed],
            start,
            np.where((start != MISSING) & (end != MISSING), end - start, 0),
            thread=batch["globalTid"],
            shapes=[one.shapes for one in parsed],
        )
        times = zip(*(batch[name].tolist() for name in ("start", "end", "globalTid")), strict=True)
        for one, (begin, over, thread), data in zip(parsed, times, batch["binaryData"], strict=True):
            if one.category == ANNOTATION:
                found.annotations.append(NvtxRange(one.name, begin, over, thread, {}))
            elif one.category == LIBRARY and one.name.startswith("nccl"):
                found.nccl_calls.append(NvtxRange(one.name, begin, over, thread, payloads.decode(data)))


_MAX_INT32 = np.iinfo(np.int32).max


class EventTable(ColumnParts):
    """Collects rows; :meth:`finish` sorts them."""

    def __init__(self) -> None:
        super().__init__()
        self._names = Interner()
        self._categories = Interner()
        self._lanes = Interner()
        """Lane by (None, global thread id) or (device, stream)."""
        self.rows_without_time = 0
        """Number of rows that were dropped because their times are missing or out of range."""

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
        shapes: Sequence[str] = (),
    ) -> None:
        """Appends the events that have valid times. All sequences have one entry per event; times are the file's, and absent numbers are
        :data:`MISSING`. ``thread``: global thread ids, None for device events. ``moved``: bytes."""
        good = (start > -LIMIT_NS) & (start < LIMIT_NS) & (duration >= 0) & (duration <= MAX_DURATION_NS)
        self.rows_without_time += int((~good).sum())
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
            "shapes": self._shape_ids(shapes, count),
        }
        self.append({column: values[good] for column, values in columns.items()})

    def _shape_ids(self, shapes: Sequence[str], count: int) -> IdColumn:
        ids: IdColumn = np.full(count, -1, np.int32)
        at = [row for row, text in enumerate(shapes) if text]
        ids[at] = self._names.ids([shapes[row] for row in at])
        return ids

    @property
    def threads(self) -> dict[int, int]:
        """Global thread id → lane."""
        return {number: lane for lane, (kind, number) in enumerate(self._lanes) if kind is None}

    def finish(self, meta: TraceMeta, base_ns: int) -> RankTrace:
        """The trace without collective metadata, with rows sorted and ``base_ns`` added to all starts."""
        self.keep_times_within(base_ns)
        columns, _ = self.sorted(base_ns)
        names, categories = list(self._names), list(self._categories)
        return RankTrace(meta, names, categories, collectives=Collectives.of({}), **columns)


def _known(values: IntColumn | None, count: int) -> IntColumn:
    """[``count``] ``values``, with -1 for absent or negative ones."""
    if values is None:
        return np.full(count, -1, np.int64)
    return np.maximum(values, -1)


def _narrow(values: IntColumn | None, count: int) -> IdColumn:
    """Like :func:`_known`, also with -1 for values that do not fit 32 bits."""
    known = _known(values, count)
    return np.where(known > _MAX_INT32, -1, known).astype(np.int32)
