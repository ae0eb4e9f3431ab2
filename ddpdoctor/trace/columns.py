"""One rank's profiler events as columns (:class:`RankTrace`), the result of every reader and the input of ``measure``.

Rows are events with start and duration (0 for instants), sorted by (``start_ns``, ``-duration_ns``), so a parent comes
before its children. Names are interned; ``measure`` selects events by masks over names and categories. Absent values are -1 in id
columns, never 0. A column may have a narrower integer type than declared, see :meth:`RankTrace.narrowed`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import CodeType, FunctionType
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import force_setattr, replace
from numpy.typing import NDArray

Predicate = Callable[[str], Any]

CUDA_CALLS = ("cuda_runtime", "cuda_driver")
"""Categories of host calls that launch work on a CUDA or ROCm device, or wait for it."""
RUNTIME_CALLS = (*CUDA_CALLS, "xpu_runtime")
"""The same for all kinds of devices."""
KNOWN_NAMES = 1 << 16
"""Most names for which a function of names keeps its results."""
_MOST_SHARED_NAMES = 1 << 18
"""Most names whose answers the traces share; some 250 bytes each, and one per predicate."""
_FEW_IDS = 6
"""Most ids that are compared one by one with the events, instead of by a lookup table."""


_UNKNOWN, _UNSHARED = -1, -1


class Interner(defaultdict[Any, int]):
    """Assigns each new key the next number. Lookups run in C."""

    def __init__(self) -> None:
        super().__init__()
        self.default_factory = self.__len__

    def ids(self, keys: Sequence[Any]) -> IdColumn:
        """[keys] number of each key. Raises TypeError if a key is a list or a dict."""
        return np.fromiter(map(self.__getitem__, keys), np.int32, len(keys))


class SharedAnswers:
    """Answers of predicates on names, shared by all traces: the ranks of a job have nearly all names in common, and each trace asks for
    sixty predicates."""

    def __init__(self, most: int = _MOST_SHARED_NAMES) -> None:
        self._most = most
        self._numbers = Interner()
        self._answers: dict[CodeType, NDArray[np.int8]] = {}

    def numbers(self, names: Sequence[str]) -> IdColumn:
        """[names] the number of each name; ``_UNSHARED`` for new ones if there are too many."""
        known = self._numbers
        if len(known) + len(names) <= self._most:
            return known.ids(names)
        return np.fromiter((known.get(name, _UNSHARED) for name in names), np.int32, len(names))

    def of(self, predicate: Predicate, names: Sequence[str], numbers: IdColumn) -> NDArray[np.bool_]:
        """[names] ``predicate(name)``, a pure function. Functions are identified by their code object, because a lambda is a new object
        each time its line runs; the answers of one with a closure or defaults are not shared."""
        is_function = isinstance(predicate, FunctionType)
        if not is_function or predicate.__closure__ or predicate.__defaults__ or predicate.__kwdefaults__:
            return np.fromiter(map(bool, map(predicate, names)), bool, len(names))
        answers = self._answers.get(predicate.__code__)
        if answers is None or answers.size < len(self._numbers):
            longer = np.full(max(1024, 2 * len(self._numbers)), _UNKNOWN, np.int8)
            if answers is not None:
                longer[: answers.size] = answers
            answers = self._answers[predicate.__code__] = longer
        found = np.where(numbers == _UNSHARED, np.int8(_UNKNOWN), answers[numbers])
        at = np.flatnonzero(found == _UNKNOWN)
        if at.size:
            asked = map(bool, map(predicate, map(names.__getitem__, at.tolist())))
            found[at] = np.fromiter(asked, np.int8, at.size)
            shared = at[numbers[at] != _UNSHARED]
            answers[numbers[shared]] = found[shared]
        holds: NDArray[np.bool_] = found == 1
        return holds


_ANSWERS = SharedAnswers()


class InternPool:
    """Shares equal event names and equal descriptions of process groups and devices between the traces of a job.

    Each rank lists all members of each process group, so the size of unshared descriptions is quadratic in the number of ranks.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._descriptions: dict[bytes, tuple[dict[str, Any], ...]] = {}

    def intern(self, trace: RankTrace) -> RankTrace:
        """``trace`` with equal names and descriptions replaced by shared ones. Changes its list of names in place."""
        known = self._names
        trace.names[:] = [known.setdefault(name, name) for name in trace.names]
        groups = self._intern_descriptions(trace.meta.process_groups)
        devices = self._intern_descriptions(trace.meta.devices)
        return replace(trace, meta=replace(trace.meta, process_groups=groups, devices=devices))

    def _intern_descriptions(self, described: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        if not described:
            return described
        return self._descriptions.setdefault(msgspec.json.encode(described), described)


IntColumn = NDArray[np.int64]
IdColumn = NDArray[np.int32]

LIMIT_NS = 2**62
"""Largest distance of a time from its origin, which may be 1970 (2**62 ns: the year 2116). The sum of two fits 64 bits."""
MAX_DURATION_NS = 2**60
"""Longest duration of an event: 36 years."""


def column_types(table: type) -> dict[str, type[np.signedinteger[Any]]]:
    """Column of :class:`Collectives` or :class:`RankTrace` → type of its values, in order."""
    types: dict[str, type[np.signedinteger[Any]]] = {"IdColumn": np.int32, "IntColumn": np.int64}
    return {name: types[kind] for name, kind in table.__annotations__.items() if kind in types}


class Collectives(msgspec.Struct, frozen=True):
    """Metadata of communication events: row *i* belongs to event ``event[i]``.

    All columns have the same length. The values are the arguments that Kineto writes on NCCL kernels and on
    ``record_param_comms``. Text columns are ids into ``RankTrace.names``; absent values are -1.
    """

    event: IdColumn
    """Row of the event in the rank's columns."""
    operation: IdColumn
    """"Collective name", such as allreduce, as an id into names."""
    group: IdColumn
    """"Process Group Name" as an id into names."""
    group_size: IdColumn
    sequence: IntColumn
    """"Seq": the collective's number within its process group."""
    in_elements: IntColumn
    out_elements: IntColumn
    dtype: IdColumn
    """Element type, such as Float, as an id into names."""

    @classmethod
    def of(cls, rows: Mapping[str, Sequence[int] | NDArray[Any]]) -> Collectives:
        """Collectives with these columns; -1 for absent columns and numbers that do not fit. ``rows`` is {} if there is no metadata."""
        count = len(rows.get("event", ()))
        columns: dict[str, Any] = {}
        for name, type_ in column_types(cls).items():
            values = np.array(rows.get(name, [-1] * count), np.int64)
            columns[name] = np.where(values > np.iinfo(type_).max, -1, values).astype(type_)
        return cls(**columns)


class TraceMeta(msgspec.Struct, frozen=True):
    """Metadata of one trace file on its rank and machine; ``None`` if the file does not have it."""

    source: str
    """Path or URL of the file."""
    rank: int | None
    rank_from: str
    """Source of the rank: "distributedInfo" (the file itself), "file name", "run directory" or "" (unknown)."""
    world_size: int | None
    backend: str | None
    host: str | None
    process_groups: tuple[dict[str, Any], ...] = ()
    """``pg_config`` entries: pg_name, pg_desc, backend_config, pg_size, ranks."""
    devices: tuple[dict[str, Any], ...] = ()
    """``deviceProperties`` entries: id, name, totalGlobalMem, computeMajor, numSms, ..."""
    clock: str = "epoch"
    """"epoch" (times are ns since 1970) or "relative" (an older file with an unknown origin)."""
    torch_version: str | None = None
    nccl_version: str | None = None
    truncated: str | None = None
    """Why the end of the events is missing, such as "ends in the middle of its gzip data"; None if it is not. Events in files are not in
    order of time, so any step may lack some."""
    notes: tuple[str, ...] = ()
    """Sentences on data that was skipped or repaired while reading."""


class RankTrace(msgspec.Struct, frozen=True, dict=True):
    """One rank's profiler window. All event columns have length :attr:`size`."""

    meta: TraceMeta
    names: list[str]
    """Interned text: event names, group names, dtypes, shapes."""
    categories: list[str]
    """"cat" values under Kineto's newest names (kernel, gpu_memcpy, cpu_op, user_annotation, ...)."""

    name: IdColumn
    category: IdColumn
    lane: IdColumn
    """Index of the event's thread or stream, less than the number of events."""
    start_ns: IntColumn
    duration_ns: IntColumn
    stream: IdColumn
    """GPU stream of device events, else -1."""
    device: IdColumn
    """GPU index of device events, else -1."""
    correlation: IntColumn
    """Links a device event to the runtime call that launched it; -1 if absent."""
    external_id: IntColumn
    """Links a device event or runtime call to its CPU operator; -1 if absent."""
    bytes: IntColumn
    """Bytes moved by a memcpy or memset, else -1."""
    shapes: IdColumn
    """"Input Dims" of an operator as an id into names (compact JSON text), else -1."""
    collectives: Collectives

    @property
    def size(self) -> int:
        """Number of events."""
        return int(self.start_ns.shape[0])

    @property
    def end_ns(self) -> IntColumn:
        """[events] end of each event, ns; added up at each access, because a cached column of all ranks takes much memory."""
        ends: IntColumn = self.start_ns + self.duration_ns
        return ends

    @cached_property
    def span_ns(self) -> tuple[int, int]:
        """Start of the first and end of the last event, ns."""
        return int(self.start_ns[0]), int(np.max(self.start_ns + self.duration_ns))

    def narrowed(self) -> RankTrace:
        """This trace, each column replaced in place by one of the narrowest integer type that holds its values: 22 to 34 bytes per event
        instead of 64. Starts stay int64, because other times are added to them. Peak memory is one more column."""
        for name in column_types(RankTrace).keys() - {"start_ns"}:
            types = _DURATION_TYPES if name == "duration_ns" else _ID_TYPES
            force_setattr(self, name, _narrowest(getattr(self, name), types))
        return self

    def among(self, kept: NDArray[np.bool_]) -> RankTrace:
        """The trace with only the events in the mask ``kept`` [events]."""
        table = self.collectives
        rows = np.cumsum(kept) - 1
        own = kept[table.event]
        described: dict[str, Any] = {name: getattr(table, name)[own] for name in table.__struct_fields__}
        described["event"] = rows[described["event"]].astype(np.int32)
        _, lane = np.unique(self.lane[kept], return_inverse=True)
        taken: dict[str, Any] = {name: getattr(self, name)[kept] for name in column_types(RankTrace)}
        taken["lane"] = lane.astype(np.int32)
        return replace(self, **taken, collectives=Collectives(**described))

    def name_of(self, row: int) -> str:
        """Name of the event in ``row``."""
        return self.names[int(self.name[row])]

    def category_mask(self, *categories: str) -> NDArray[np.bool_]:
        """[events] whether the event has one of these categories (lower case)."""
        return _is_among(self.category, np.array([c in categories for c in self.categories], dtype=bool))

    def name_ids(self, predicate: Callable[[str], bool]) -> IdColumn:
        """Ids of all names for which ``predicate(name)``, a pure function, is true."""
        return np.flatnonzero(self._matching_names(predicate)).astype(np.int32)

    def name_mask(self, predicate: Callable[[str], bool]) -> NDArray[np.bool_]:
        """[events] whether ``predicate(name)``, a pure function, is true for the event's name."""
        return _is_among(self.name, self._matching_names(predicate))

    def _matching_names(self, predicate: Callable[[str], bool]) -> NDArray[np.bool_]:
        return _ANSWERS.of(predicate, self.names, self._shared_numbers)

    @cached_property
    def _shared_numbers(self) -> IdColumn:
        """[names] see :class:`SharedAnswers`."""
        return _ANSWERS.numbers(self.names)


_ID_TYPES = (np.int8, np.int16, np.int32)
_DURATION_TYPES = (np.int32,)
"""Durations keep 32 bits: the quotient of a narrower column and a float would be a float of half or single precision."""


def _narrowest(column: NDArray[Any], types: Sequence[type[np.signedinteger[Any]]]) -> NDArray[Any]:
    """``column`` in the first of ``types`` that holds its values; unchanged if none does, or if it is empty."""
    if not column.size:
        return column
    least, most = column.min(), column.max()
    for each in types:
        if np.iinfo(each).min <= least and most <= np.iinfo(each).max:
            return column.astype(each, copy=False)
    return column


def _is_among(ids: IdColumn, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """[events] ``chosen[ids]``; comparisons with few ids take a tenth of the time of looking up all."""
    few = np.flatnonzero(chosen).tolist()  # as Python's integers, which do not widen the column
    if len(few) > _FEW_IDS:
        return chosen[ids]
    found: NDArray[np.bool_] = ids == few[0] if few else np.zeros(ids.size, dtype=bool)
    for each in few[1:]:
        found |= ids == each
    return found


def sorted_order(start: IntColumn, duration: IntColumn) -> NDArray[np.int64]:
    """[events] row order by start, longer events first; stable."""
    order = np.argsort(start, kind="stable")
    same = np.zeros(order.size + 1, dtype=bool)  # whether a row starts with the one before it
    same[1:-1] = np.diff(start[order]) == 0
    at = np.flatnonzero(same[:-1] | same[1:])
    if at.size:
        rows = order[at]
        order[at] = rows[np.lexsort((rows, -duration[rows], start[rows]))]
    return order


class ColumnParts:
    """Event columns that a reader appends batch by batch. Peak memory is that of the columns, one more column, and one batch."""

    def __init__(self) -> None:
        self.rows = 0
        self._parts: dict[str, list[NDArray[Any]]] = defaultdict(list)

    def append(self, columns: Mapping[str, NDArray[Any]]) -> None:
        """Appends rows. All calls must have the same columns."""
        for name, part in columns.items():
            self._parts[name].append(part)
        self.rows += len(columns["start_ns"])

    def earliest_ns(self) -> int | None:
        """Earliest start, ns; None without rows."""
        return min((int(part.min()) for part in self._parts["start_ns"] if part.size), default=None)

    def keep_times_within(self, base_ns: int) -> NDArray[np.bool_] | None:
        """Drops rows whose start plus ``base_ns`` is outside ±:data:`LIMIT_NS`. Returns the mask of kept rows [rows], None if all are."""
        parts, least_ns, most_ns = self._parts["start_ns"], -LIMIT_NS - base_ns, LIMIT_NS - base_ns
        if all(least_ns < part.min() and part.max() < most_ns for part in parts if part.size):
            return None
        start = np.concatenate(parts)
        kept: NDArray[np.bool_] = (start > least_ns) & (start < most_ns)
        for name, all_parts in self._parts.items():
            self._parts[name] = [np.concatenate(all_parts)[kept]]
        self.rows = int(kept.sum())
        return kept

    def sorted(self, base_ns: int) -> tuple[dict[str, Any], NDArray[np.int64]]:
        """(Columns, order of the rows). The rows are sorted by (start, -duration), ``base_ns`` is added to the starts, and columns that
        were never appended are -1. Empties this object."""
        types = column_types(RankTrace)
        start, duration = self._joined("start_ns") + base_ns, self._joined("duration_ns")
        order = sorted_order(start, duration)
        columns: dict[str, Any] = {"start_ns": start[order], "duration_ns": duration[order]}
        del start, duration
        for name in types.keys() - columns.keys():
            is_there = name in self._parts
            columns[name] = self._joined(name)[order] if is_there else np.full(order.size, -1, types[name])
        return columns, order

    def _joined(self, name: str) -> NDArray[Any]:
        return np.concatenate(self._parts.pop(name))
