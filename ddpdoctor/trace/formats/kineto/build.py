"""Builds the columns of a trace from decoded Kineto events."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace.classify import DEVICE
from ddpdoctor.trace.columns import (
    MAX_DURATION_NS,
    Collectives,
    ColumnParts,
    IdColumn,
    IntColumn,
    Interner,
    RankTrace,
    TraceMeta,
)
from ddpdoctor.trace.formats.kineto import times

from .stream import NO_ARGUMENTS, NOTHING, Arguments, Batch, Event, EventStream, ExactEvent
from .times import as_int, ints, positive, stream_of

_RENAMED = {
    # torch 1.8 to 1.11 (libkineto's ActivityType names before they were lower-cased)
    "operator": "cpu_op",
    "cpu op": "cpu_op",
    "runtime": "cuda_runtime",
    "cuda runtime": "cuda_runtime",
    "concurrent_kernel": "kernel",
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
    "gpu user annotation": "gpu_user_annotation",
    "user annotation": "user_annotation",
    "python function": "python_function",
    "pythonfunction": "python_function",
}

_OLD_ANNOTATION = re.compile(
    r"ProfilerStep\b|enumerate\(DataLoader\)|Optimizer\.|DistributedDataParallel\.|nccl:|gloo:|## "
)


def normalised(category: object) -> str:
    """Current name of a category; lower case if it is unknown, "" if it is missing."""
    text = category.lower().strip() if isinstance(category, str) else ""
    return _RENAMED.get(text, text)


def is_old_operator(category: object) -> bool:
    """Whether this is the old schema's category, which contains both operators and annotations."""
    return isinstance(category, str) and category.lower() in ("operator", "cpu op")


def is_annotation_name(name: str) -> bool:
    """Whether an operator of this name in the old schema is a user_annotation in the current one."""
    return _OLD_ANNOTATION.match(name) is not None


_TEXT = ("operation", "group", "dtype")
_NUMBERS = ("group_size", "sequence", "in_elements", "out_elements")
_WHOLE = re.compile(r"\s*-?[0-9]{1,19}\s*")


class CollectiveRows:
    """Collects the metadata of a trace's communication events, of which there are few."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, ...]] = []
        """(Row of the event, ids of its texts, numbers)."""

    def add(self, args: list[Arguments], first_row: int, names: dict[Any, int]) -> None:
        """Appends the ``args`` that describe a collective; ``args[0]`` belongs to row ``first_row``."""
        for i, a in enumerate(args):
            if a.operation is not None:
                texts = [getattr(a, column) for column in _TEXT]
                ids = [names[str(text)] if isinstance(text, (str, int, float)) else -1 for text in texts]
                numbers = [_number(getattr(a, column)) for column in _NUMBERS]
                self._rows.append((first_row + i, *ids, *numbers))

    def keep(self, kept: NDArray[np.bool_]) -> None:
        """Keeps only the events in the mask ``kept``, and renumbers them."""
        position = np.cumsum(kept) - 1
        self._rows = [(int(position[event]), *rest) for event, *rest in self._rows if kept[event]]

    def finish(self, order: NDArray[np.int64]) -> Collectives:
        """The columns in the order of the sorted trace. ``order`` [events]: old row of each new row."""
        names = ("event", *_TEXT, *_NUMBERS)
        rows = np.array(self._rows, np.int64).reshape(-1, len(names))
        position = np.empty(order.size, dtype=np.int64)
        position[order] = np.arange(order.size)
        rows[:, 0] = position[rows[:, 0]]
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        return Collectives.of(dict(zip(names, rows.T, strict=True)))


def _number(value: Any) -> int:
    """``value`` as an integer (texts are decimal); -1 if it is not one."""
    if isinstance(value, str):
        return as_int(int(value)) if _WHOLE.fullmatch(value) else -1
    return as_int(value)


Rows = Sequence[Event]
_TS, _DUR = attrgetter("ts"), attrgetter("dur")
_CHUNK_EVENTS = 2048
"""Number of events converted at a time, a fifth of a batch. They fit in a core's cache."""
_MAX_NAME_CHARACTERS = 1 << 15
"""Longest event name that is kept; names of templated kernels have some thousand characters."""
_MAX_CATEGORIES = 10_000
"""Limit of categories; Kineto has forty, other tools add some."""
_MAX_DEVICES = 1024
"""The process id of a device event without a device argument is the device index if it is smaller than this."""
_INT32 = np.iinfo(np.int32)


class ColumnBuilder(ColumnParts):
    """Collects batches of events; :meth:`finish` joins and sorts them."""

    def __init__(self) -> None:
        super().__init__()
        self._names = Interner()
        self._categories = Interner()
        self._is_device: list[bool] = []
        self._old_schema = False
        self._shapes = Interner()
        self.lanes = LaneTable()
        self._collectives = CollectiveRows()
        self.events = 0
        """Number of events of all kinds."""
        self.events_without_time = 0
        self.events_without_duration = 0
        self.events_without_name = 0

    def add(self, batch: Batch, stream: EventStream) -> None:
        """Appends the complete and instant events of ``batch`` and reads its metadata events. Empties ``batch``: events are
        converted in chunks, and each chunk is freed after its conversion.
        """
        self.events += len(batch)
        while batch:
            try:
                self._add_some(batch[:_CHUNK_EVENTS], stream.source.path)
            except times.InexactTimesError:
                left = len(batch)
                batch.clear()
                batch = stream.decode_with_exact_times()[-left:]
            else:
                del batch[:_CHUNK_EVENTS]

    def _add_some(self, batch: Batch, path: str) -> None:
        """Appends a chunk. Raises InexactTimesError, and appends nothing, if the times must be decoded from their text."""
        rows = [e for e in batch if e.ph == "X" or e.ph == "i" or e.ph == "I"]
        if rows:
            values, exact = list(map(_TS, rows)), isinstance(rows[0], ExactEvent)
            start = times.from_text(values) if exact else times.from_numbers(values)
            # Durations are exact up to a hundred days.
            self._add_timed(rows, start, times.from_numbers(list(map(_DUR, rows)), rounded=True), path)
        self.lanes.read_metadata(e for e in batch if e.ph == "M")

    def _add_timed(self, rows: Rows, start: IntColumn, duration: IntColumn, path: str) -> None:
        """Appends the ``rows`` that have a time."""
        duration[duration > MAX_DURATION_NS] = times.MISSING_NS
        untimed = start == times.MISSING_NS
        if untimed.any():
            self.events_without_time += int(untimed.sum())
            kept = np.flatnonzero(~untimed)
            self._add_rows([rows[i] for i in kept.tolist()], start[kept], duration[kept], path)
        else:
            self._add_rows(rows, start, duration, path)

    def _add_rows(self, rows: Rows, start: IntColumn, duration: IntColumn, path: str) -> None:
        self.events_without_duration += int((duration < 0).sum())  # missing, not a number, or negative
        args = [e.args or NO_ARGUMENTS for e in rows]
        category = self._category_ids(rows, path)
        on_device = np.flatnonzero(np.array(self._is_device, dtype=bool)[category])
        columns = {
            "start_ns": start,
            "duration_ns": np.maximum(duration, 0),
            "name": self._name_ids(rows),
            "category": category,
            "lane": self.lanes.ids([(e.pid, e.tid) for e in rows]),
            "correlation": positive([a.correlation for a in args]),
            "external_id": self._external_ids(args),
            "shapes": self._shape_ids(args),
            **_device_columns(rows, args, on_device),
        }
        self._collectives.add(args, self.rows, self._names)
        self.append(columns)

    def _category_ids(self, rows: Rows, path: str) -> IdColumn:
        """[rows] ids of the categories as spelled in the file. Records whether new ones are device categories."""
        ids = _named_ids(self._categories, [e.cat for e in rows])
        if len(self._categories) > _MAX_CATEGORIES or len(self.lanes) > MAX_LANES:
            raise UnusableInput(
                f"{path} is not a profiler trace: it names more than {_MAX_CATEGORIES} categories of events or "
                f"{MAX_LANES} threads and streams."
            )
        for raw in list(self._categories)[len(self._is_device) :]:
            self._is_device.append(normalised(raw) in DEVICE)
            self._old_schema = self._old_schema or is_old_operator(raw)
        return ids

    def _name_ids(self, rows: Rows) -> IdColumn:
        ids = _named_ids(self._names, [e.name for e in rows])
        self.events_without_name += int((ids == self._names[None]).sum()) if None in self._names else 0
        return ids

    def _external_ids(self, args: list[Arguments]) -> IntColumn:
        ids = positive([a.external_id for a in args])
        missing = np.flatnonzero(ids < 0)
        if missing.size:
            ids[missing] = positive([args[i].old_external_id for i in missing.tolist()])
        return ids

    def _shape_ids(self, args: list[Arguments]) -> IdColumn:
        ids = np.full(len(args), -1, dtype=np.int32)
        shaped = [(i, a.dims) for i, a in enumerate(args) if a.dims is not NOTHING]
        if self._old_schema:
            shaped += [(i, a.old_dims) for i, a in enumerate(args) if a.old_dims is not NOTHING]
        if shaped:
            at, texts = zip(*shaped, strict=True)
            ids[list(at)] = self._shapes.ids([bytes(t) for t in texts])
        return ids

    def finish(self, meta: TraceMeta, base_ns: int) -> RankTrace:
        """The trace with rows sorted by (start, -duration) and ``base_ns`` added to all starts."""
        columns, order = self.sorted(base_ns)
        collectives = self._collectives.finish(order)
        shapes = columns["shapes"]
        offset = len(self._names)
        np.add(shapes, offset, out=shapes, where=shapes >= 0)
        names = ["" if n is None else str(n)[:_MAX_NAME_CHARACTERS] for n in self._names]
        names.extend(b"".join(text.split()).decode("utf-8", "replace") for text in self._shapes)
        columns["lane"] = self.lanes.finish()[columns["lane"]]
        categories, columns["category"] = self._final_categories(columns["category"], columns["name"], names)
        # Until 2023, Kineto wrote the correlation as external id of runtime and device events; it does not link them to an operator.
        columns["external_id"][columns["external_id"] == columns["correlation"]] = -1
        return RankTrace(meta=meta, names=names, categories=categories, collectives=collectives, **columns)

    def drop_times_outside(self, base_ns: int) -> None:
        """Drops events whose start plus ``base_ns`` is outside ±:data:`LIMIT_NS`, and counts them as events without time."""
        if (kept := self.keep_times_within(base_ns)) is not None:
            self._collectives.keep(kept)
            self.events_without_time += int((~kept).sum())

    def _final_categories(
        self, raw: IdColumn, name: IdColumn, names: list[str]
    ) -> tuple[list[str], IdColumn]:
        """(Normalised categories, ids [rows]). Separates the old schema's annotations from its operators."""
        merged = Interner()
        table = np.array([merged[normalised(c)] for c in self._categories], dtype=np.int32)
        old = [i for i, c in enumerate(self._categories) if is_old_operator(c)]
        ids: IdColumn = table[raw] if raw.size else raw
        if old:
            annotations = [i for i, n in enumerate(names) if is_annotation_name(n)]
            ids[np.isin(raw, old) & np.isin(name, annotations)] = merged["user_annotation"]
        return list(merged), ids


def _device_columns(rows: Rows, args: list[Arguments], at: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Stream, device and bytes [rows], which are -1 except for the device events in rows ``at``.

    They are taken from the arguments, else from the event's process id (device) and thread id (stream).
    """
    device_rows = at.tolist()
    stream = ints([args[i].stream for i in device_rows])
    if (stream < 0).any():
        stream = np.where(stream < 0, ints([stream_of(rows[i].tid) for i in device_rows]), stream)
    device = ints([args[i].device for i in device_rows])
    if (device < 0).any():
        pids = ints([rows[i].pid for i in device_rows])
        device = np.where((device < 0) & (pids < _MAX_DEVICES), pids, device)
    columns: dict[str, NDArray[Any]] = {
        **{column: np.full(len(rows), -1, np.int32) for column in ("stream", "device")},
        "bytes": np.full(len(rows), -1, np.int64),
    }
    columns["stream"][at], columns["device"][at] = _narrow(stream), _narrow(device)
    columns["bytes"][at] = ints([args[i].bytes for i in device_rows])
    return columns


def _named_ids(interner: Interner, names: list[Any]) -> IdColumn:
    try:
        return interner.ids(names)
    except TypeError:  # a list or an object instead of a name
        return interner.ids([None if isinstance(name, (list, dict)) else name for name in names])


def _narrow(values: IntColumn) -> IntColumn:
    """``values``, with -1 for those that do not fit 32 bits."""
    return np.where((values < 0) | (values > _INT32.max), -1, values)


_MAX_TEXT = 1 << 10
"""Most characters of a process or thread id that are kept."""
_ASCEND = "Ascend Hardware"
MAX_LANES = 100_000
"""Limit of threads and streams. A job that starts a thread in every step has some thousands."""


class LaneTable:
    """Numbers the pairs (pid, tid) in order of appearance."""

    def __init__(self) -> None:
        self._lanes = Interner()
        self.is_ascend = False
        """Whether a process has the name that torch_npu's profiler gives the NPU."""

    def ids(self, pairs: list[tuple[Any, Any]]) -> IdColumn:
        """[events] provisional lane ids, which index the table that :meth:`finish` returns."""
        try:
            return self._lanes.ids(pairs)
        except TypeError:  # a pid or tid that is a list or an object
            return self._lanes.ids([(_text(pid), _text(tid)) for pid, tid in pairs])

    def __len__(self) -> int:
        return len(self._lanes)

    def read_metadata(self, metadata: Iterable[Event]) -> None:
        """Reads process names from metadata events ("ph": "M")."""
        self.is_ascend = self.is_ascend or any(
            event.name == "process_name" and event.args is not None and event.args.name == _ASCEND
            for event in metadata
        )

    def finish(self) -> IdColumn:
        """[provisional ids] final lane of each. The ids 7 and "7" are the same thread."""
        index: dict[tuple[str, str], int] = {}
        table = [index.setdefault((_text(p), _text(t)), len(index)) for p, t in self._lanes]
        return np.array(table, dtype=np.int32)


def _text(value: Any) -> str:
    """Text of a number or text; "" for other types."""
    return str(value)[:_MAX_TEXT] if isinstance(value, (str, int, float)) else ""
