"""One rank's profiler events as columns: what every format becomes and what ``measure`` reads.

Rows are events with a begin and a duration, instants with a duration of 0, sorted by (``start_ns``, ``-duration_ns``) so
that a parent stands before its children. Names are interned. Absent values are -1 in id columns, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import CodeType, FunctionType
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

Predicate = Callable[[str], Any]

KNOWN_NAMES = 1 << 16
"""Names whose answer one predicate remembers: the ranks of a job share nearly all of theirs."""
_PREDICATES = 1 << 10
"""Predicates whose answers are remembered: the whole analysis asks some dozens. Beyond both, they are asked anew."""


class _Answers(dict[str, bool]):
    """What a predicate says about names; looking one up stays in C."""

    def __init__(self, predicate: Predicate) -> None:
        super().__init__()
        self._predicate = predicate

    def __missing__(self, name: str) -> bool:
        answer = bool(self._predicate(name))
        if len(self) < KNOWN_NAMES:
            self[name] = answer
        return answer


_ALL: dict[CodeType, _Answers] = {}


def remembered(predicate: Predicate) -> Predicate:
    """``predicate``, a pure function of the name, with its answers remembered from one call of this to the next.

    A lambda is made anew each time its line runs, but it is the same function if it holds nothing of its
    surroundings: such functions are told by their code. Others are returned as they are.
    """
    if not isinstance(predicate, FunctionType) or _holds_something(predicate):
        return predicate
    known = _ALL.get(predicate.__code__)
    if known is None:
        if len(_ALL) >= _PREDICATES:
            return predicate
        known = _ALL[predicate.__code__] = _Answers(predicate)
    return known.__getitem__


def _holds_something(function: FunctionType) -> bool:
    return bool(function.__closure__ or function.__defaults__ or function.__kwdefaults__)


class Shared:
    """Names of events, and descriptions of process groups and devices, that some rank had before.

    Each rank lists all members of each process group, so these descriptions grow with the square of the ranks.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._descriptions: dict[bytes, tuple[dict[str, Any], ...]] = {}

    def of(self, trace: RankTrace) -> RankTrace:
        """``trace``, with what others had before replaced by theirs. Its list of names is changed in place."""
        known = self._names
        trace.names[:] = [known.setdefault(name, name) for name in trace.names]
        return replace(trace, meta=self._meta(trace.meta))

    def _meta(self, meta: TraceMeta) -> TraceMeta:
        groups, devices = self._once(meta.process_groups), self._once(meta.devices)
        return replace(meta, process_groups=groups, devices=devices)

    def _once(self, described: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        if not described:
            return described
        return self._descriptions.setdefault(msgspec.json.encode(described), described)


IntColumn = NDArray[np.int64]
IdColumn = NDArray[np.int32]


class Collectives(msgspec.Struct, frozen=True):
    """Metadata of communication events: row *i* belongs to event ``event[i]``.

    All columns have the same length. They are filled from the arguments that Kineto writes on NCCL kernels and on
    ``record_param_comms``; text columns are ids into ``RankTrace.names``; -1 where the trace does not say.
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
        """Of these columns: -1 where one is absent, or a number does not fit; {}: of a trace without any such metadata."""
        count = len(rows.get("event", ()))
        columns: dict[str, Any] = {}
        for name, kind in cls.__annotations__.items():
            type_ = np.int32 if kind == "IdColumn" else np.int64
            values = np.array(rows.get(name, [-1] * count), np.int64)
            columns[name] = np.where(values > np.iinfo(type_).max, -1, values).astype(type_)
        return cls(**columns)


class TraceMeta(msgspec.Struct, frozen=True):
    """What one trace file says about the rank and the machine that wrote it; ``None`` where it does not say."""

    source: str
    """Path or URL of the file."""
    rank: int | None
    rank_from: str
    """Who says so: "distributedInfo" (the file itself), "file name", "run directory" or "" (nobody)."""
    world_size: int | None
    backend: str | None
    host: str | None
    process_groups: tuple[dict[str, Any], ...] = ()
    """``pg_config`` entries: pg_name, pg_desc, backend_config, pg_size, ranks."""
    devices: tuple[dict[str, Any], ...] = ()
    """``deviceProperties`` entries: id, name, totalGlobalMem, computeMajor, numSms, ..."""
    clock: str = "epoch"
    """"epoch" (times are ns since 1970) or "relative" (an older file on a clock of its own)."""
    torch_version: str | None = None
    nccl_version: str | None = None
    notes: tuple[str, ...] = ()
    """One sentence each: what was lost or repaired while reading."""


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
    """Number of its thread or stream, less than the number of events."""
    start_ns: IntColumn
    duration_ns: IntColumn
    stream: IdColumn
    """GPU stream of device events, else -1."""
    device: IdColumn
    """GPU index of device events, else -1."""
    correlation: IntColumn
    """Ties a device event to the runtime call that launched it; -1 where absent."""
    external_id: IntColumn
    """Ties a device event or runtime call to its CPU operator; -1 where absent."""
    bytes: IntColumn
    """Bytes moved by a memcpy or memset, else -1."""
    shapes: IdColumn
    """"Input Dims" of an operator as an id into names (compact JSON text), else -1."""
    collectives: Collectives

    @property
    def size(self) -> int:
        """Number of events."""
        return int(self.start_ns.shape[0])

    @cached_property
    def end_ns(self) -> IntColumn:
        """End of each event, ns; added up once and read only."""
        ends = self.start_ns + self.duration_ns
        ends.flags.writeable = False
        return ends

    @cached_property
    def span_ns(self) -> tuple[int, int]:
        """Start of the first and end of the last event."""
        return int(self.start_ns[0]), int(np.max(self.start_ns + self.duration_ns))

    def name_of(self, row: int) -> str:
        """Name of the event in ``row``."""
        return self.names[int(self.name[row])]

    def category_mask(self, *categories: str) -> NDArray[np.bool_]:
        """Which events have one of these categories (lower case)."""
        wanted = np.array([c in categories for c in self.categories], dtype=bool)
        return wanted[self.category]

    def name_ids(self, predicate: Callable[[str], bool]) -> IdColumn:
        """Ids of all names for which ``predicate(name)``, a pure function, is true: names are classified, not events."""
        return np.flatnonzero(self._chosen(predicate)).astype(np.int32)

    def name_mask(self, predicate: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Which events have a name for which ``predicate(name)``, a pure function, is true."""
        return self._chosen(predicate)[self.name]

    def _chosen(self, predicate: Callable[[str], bool]) -> NDArray[np.bool_]:
        return np.fromiter(map(remembered(predicate), self.names), bool, len(self.names))


def sorted_order(start: IntColumn, duration: IntColumn) -> NDArray[np.int64]:
    """Row order by start, longer events first; the file's order where both are equal."""
    order = np.argsort(start, kind="stable")
    ties = np.flatnonzero(np.diff(start[order]) == 0)
    if ties.size:
        at = np.unique(np.concatenate([ties, ties + 1]))
        rows = order[at]
        order[at] = rows[np.lexsort((rows, -duration[rows], start[rows]))]
    return order
