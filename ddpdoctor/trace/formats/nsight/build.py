"""Rows of all kinds → the columns of a :class:`RankTrace`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

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
from ddpdoctor.trace.formats.kineto.interner import Interner

_INT32 = np.iinfo(np.int32)
_NARROW = ("name", "category", "lane", "stream", "device", "shapes")
_WIDE = ("start_ns", "duration_ns", "correlation", "bytes")


class Rows(msgspec.Struct, frozen=True):
    """Events of the same kind, N of them; times as in the file, :data:`MISSING` where a number is absent."""

    category: str | Sequence[str]
    name: Sequence[str]
    start: IntColumn
    duration: IntColumn
    thread: IntColumn | None = None
    """Global numbers of the threads; None for what a device does."""
    device: IntColumn | None = None
    stream: IntColumn | None = None
    correlation: IntColumn | None = None
    bytes: IntColumn | None = None
    shapes: Sequence[str] | None = None


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

    def add(self, rows: Rows) -> None:
        """Appends those of ``rows`` that have a time."""
        good = _can_be(rows.start) & (rows.duration >= 0) & (rows.duration <= LONGEST_NS)
        self.left_out += int((~good).sum())
        count = len(rows.name)
        columns: dict[str, NDArray[Any]] = {
            "start_ns": rows.start,
            "duration_ns": rows.duration,
            "name": self._names.ids(list(rows.name)),
            "category": self._category(rows.category, count),
            "lane": self._lane(rows, count),
            "stream": _narrow(rows.stream, count),
            "device": _narrow(rows.device, count),
            "correlation": _known(rows.correlation, count),
            "bytes": _known(rows.bytes, count),
            "shapes": self._shape(rows.shapes, count),
        }
        for column, values in columns.items():
            self._parts[column].append(values[good])
        self.rows += int(good.sum())

    def _category(self, category: str | Sequence[str], count: int) -> IdColumn:
        if isinstance(category, str):
            return np.full(count, self._categories[category], np.int32)
        return self._categories.ids(list(category))

    def _lane(self, rows: Rows, count: int) -> IdColumn:
        if rows.thread is not None:
            return self._lanes.ids([(None, number) for number in rows.thread.tolist()])
        device, stream = (_narrow(of, count).tolist() for of in (rows.device, rows.stream))
        return self._lanes.ids(list(zip(device, stream, strict=True)))

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
            collectives=Collectives.none(),
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
