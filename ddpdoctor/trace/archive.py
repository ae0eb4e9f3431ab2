"""Reads and writes ``.columns`` files, in which the cache and ``ddpdoctor digest`` store one rank's columns.

A file is a ZIP archive (each member has a checksum) of ``head.json`` and two Parquet tables, ``events.parquet`` and
``collectives.parquet``, with the columns of :class:`RankTrace` and :class:`Collectives`. Each column is checked when it is read, because
the file may come from an untrusted source.
"""

from __future__ import annotations

import io
import struct
import zlib
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace.columns import LIMIT_NS, MAX_DURATION_NS, Collectives, RankTrace, TraceMeta, column_types
from ddpdoctor.trace.sources import MAX_RANKS, host_of_name, rank_of_name

if TYPE_CHECKING:  # its import takes longer than that of this package
    import zipfile

_ABSENT = -1
"""Value of an absent id or number, see :mod:`.columns`."""
_RANK_SOURCES = ("distributedInfo", "file name", "run directory", "")
_CLOCKS = ("epoch", "relative")
_MAX_TEXT = 1 << 14
"""Most characters of a note, path or version; the longest path has 4,096."""
_MAX_NOTES = 100
"""A reader adds at most one note of each of a dozen kinds."""
NUMBERS_OF_DEVICES = ("computeMajor", "computeMinor")
"""Keys of ``deviceProperties`` that must be integers."""


class InvalidTraceError(ValueError):
    """A column or the metadata has an impossible value; the text says which."""


def check_trace(trace: RankTrace) -> None:
    """Raises :class:`InvalidTraceError` if ``trace`` has values that no reader produces."""
    if not trace.size:
        raise InvalidTraceError("it holds no event")
    _check_range("start_ns", trace.start_ns, -LIMIT_NS, LIMIT_NS, trace.size)
    _check_range("duration_ns", trace.duration_ns, 0, MAX_DURATION_NS, trace.size)
    if (np.diff(trace.start_ns) < 0).any():
        raise InvalidTraceError("its events are not in the order of their times")
    names, collectives = len(trace.names), trace.collectives
    for column, least, count in (
        ("name", 0, names),
        ("category", 0, len(trace.categories)),
        ("lane", 0, trace.size),
        ("shapes", _ABSENT, names),
    ):
        _check_range(column, getattr(trace, column), least, count - 1, trace.size)
    for column in ("stream", "device", "correlation", "external_id", "bytes"):
        _check_range(column, getattr(trace, column), _ABSENT, None, trace.size)
    rows = len(collectives.event)
    _check_range("event", collectives.event, 0, trace.size - 1, rows)
    for column in ("operation", "group", "dtype"):
        _check_range(column, getattr(collectives, column), _ABSENT, names - 1, rows)
    for column in ("group_size", "sequence", "in_elements", "out_elements"):
        _check_range(column, getattr(collectives, column), _ABSENT, None, rows)
    _check_meta(trace.meta)


def _check_range(column: str, values: NDArray[Any], least: int, most: int | None, rows: int) -> None:
    if len(values) != rows:
        raise InvalidTraceError(f"the column {column} has {len(values)} rows, not {rows}")
    if rows and (values.min() < least or (most is not None and values.max() > most)):
        raise InvalidTraceError(f"the column {column} holds values that it cannot have")


def _check_meta(meta: TraceMeta) -> None:
    texts = (meta.source, meta.backend, meta.host, meta.torch_version, meta.nccl_version, *meta.notes)
    numbers = [device.get(name) for device in meta.devices for name in NUMBERS_OF_DEVICES]
    checks = {
        "rank": meta.rank is None or 0 <= meta.rank < MAX_RANKS,
        "world size": meta.world_size is None or 0 <= meta.world_size < MAX_RANKS,
        "origin of the rank": meta.rank_from in _RANK_SOURCES,
        "clock": meta.clock in _CLOCKS,
        "text": all(text is None or len(text) <= _MAX_TEXT for text in texts),
        "number of notes": len(meta.notes) <= _MAX_NOTES,
        "number of a device": all(n is None or (type(n) is int and 0 <= n < MAX_RANKS) for n in numbers),
    }
    for what, is_valid in checks.items():
        if not is_valid:
            raise InvalidTraceError(f"its {what} cannot be so")


SCHEMA = "ddpdoctor.columns/3"
"""Incremented if the same trace gives different columns, or the same columns a different file."""
SUFFIX = ".columns"

_DECODE_ERRORS = (
    *(KeyError, ValueError, NotImplementedError, RuntimeError, TypeError, EOFError),
    *(msgspec.MsgspecError, RecursionError, zlib.error, struct.error),
)
_HEAD_FREE_BYTES, _MAX_HEAD_RATIO = 8 << 20, 50
"""Largest size of ``head.json``; a larger one is accepted up to this multiple of its compressed size (typical: 5 to 10)."""
_FREE_ROWS = 1_000_000
"""A table may have this many rows plus one per byte of its file; rows of real traces take ten bytes."""


class _Head(msgspec.Struct):
    schema: str
    meta: TraceMeta
    names: list[str]
    categories: list[str]


def is_archive(path: str) -> bool:
    """Whether ``path`` has the suffix of a ``.columns`` file."""
    return path.endswith(SUFFIX)


def write_archive(target: BinaryIO, trace: RankTrace) -> None:
    """Writes ``trace``. Equal traces give equal bytes. Raises OSError."""
    import zipfile

    head = _Head(SCHEMA, trace.meta, trace.names, trace.categories)
    with zipfile.ZipFile(target, "w") as archive:
        packed = zipfile.ZipInfo("head.json")
        packed.compress_type = zipfile.ZIP_DEFLATED
        archive.writestr(packed, msgspec.json.encode(head), compresslevel=1)
        archive.writestr(zipfile.ZipInfo("events.parquet"), _parquet(trace))
        archive.writestr(zipfile.ZipInfo("collectives.parquet"), _parquet(trace.collectives))


def read_archive(source: BinaryIO, path: str) -> RankTrace:
    """Reads the trace in ``source``, an open file at ``path``.

    Raises OSError, and :class:`UnusableInput` if it is not a ``.columns`` file, is damaged, or has another schema.
    """
    import zipfile

    try:
        with zipfile.ZipFile(source) as archive:
            data = _member(archive, "head.json", _HEAD_FREE_BYTES, _MAX_HEAD_RATIO)
            schema = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("schema", msgspec.Raw(b'""'))
            if (written := msgspec.json.decode(schema, type=str)) != SCHEMA:
                raise UnusableInput(
                    f"{path} holds {written or 'no'} columns, this version of ddpdoctor reads {SCHEMA}: "
                    "digest the trace again with this version."
                )
            head = msgspec.json.decode(data, type=_Head)
            events = _arrays(_member(archive, "events.parquet"), RankTrace)
            collectives = _arrays(_member(archive, "collectives.parquet"), Collectives)
        trace = RankTrace(
            meta=head.meta,
            names=head.names,
            categories=head.categories,
            collectives=Collectives(**collectives),
            **events,
        )
        check_trace(trace)
        return trace
    except (*_DECODE_ERRORS, zipfile.BadZipFile) as error:
        why = f" ({error})" if isinstance(error, InvalidTraceError) else ""
        raise UnusableInput(
            f"{path} is not a complete file of columns{why}: digest the trace again."
        ) from error


def _parquet(table: object) -> bytes:
    import polars

    target, types = io.BytesIO(), _types(type(table))
    frame = polars.DataFrame({column: np.asarray(getattr(table, column)) for column in types}, schema=types)
    frame.write_parquet(target, compression="zstd", compression_level=1, statistics=False)
    return target.getvalue()


def _member(archive: zipfile.ZipFile, name: str, free_bytes: int = 0, growth: int = 1) -> bytes:
    """Content of a member. Raises ValueError if it is larger than ``free_bytes`` and than ``growth`` times its compressed size."""
    info = archive.getinfo(name)
    if info.file_size > max(free_bytes, growth * info.compress_size):
        raise ValueError(f"{name} is compressed more than it can be")
    return archive.read(info)


def _types(table: type) -> dict[str, Any]:
    """Polars type of each column in a file, from the declarations in ``table``. A column in memory may be narrower."""
    import polars

    types = {np.int32: polars.Int32, np.int64: polars.Int64}
    return {column: types[type_] for column, type_ in column_types(table).items()}


def _arrays(parquet: bytes, table: type) -> dict[str, Any]:
    """Reads the columns of ``table`` from Parquet. Raises ValueError if columns, types or values are not exactly as expected."""
    import polars

    try:
        if dict(polars.read_parquet_schema(io.BytesIO(parquet))) != _types(table):
            raise ValueError("other columns")
        rows = polars.scan_parquet(io.BytesIO(parquet)).select(polars.len()).collect().item()
        if rows > _FREE_ROWS + len(parquet):
            raise ValueError("more rows than it has bytes")
        frame = polars.read_parquet(io.BytesIO(parquet))
    except (polars.exceptions.PolarsError, polars.exceptions.PanicException) as error:
        raise ValueError(str(error)) from error
    if any(frame.null_count().row(0)):
        raise ValueError("values are missing")
    return {column: np.array(frame[column].to_numpy()) for column in frame.columns}


def rank_and_source(path: str, given: int | None, stated: int | None = None) -> tuple[int | None, str]:
    """(Rank of the file at ``path``, source as in :attr:`.TraceMeta.rank_from`). The rank is ``given``, else ``stated`` in the file, else
    derived from the file name."""
    for rank, source in (
        (given, "run directory"),
        (stated, "distributedInfo"),
        (rank_of_name(path), "file name"),
    ):
        if rank is not None:
            return rank, source
    return None, ""


def relocated(meta: TraceMeta, path: str, rank: int | None) -> TraceMeta:
    """``meta`` for the same content at another ``path``, with ``rank`` if given.

    Rank and host that were derived from the old path are derived again from the new one. A ``.columns`` file keeps those of the original
    trace.
    """
    number, origin, host = meta.rank, meta.rank_from, meta.host
    if rank is not None or not (is_archive(path) or origin == "distributedInfo"):
        number, origin = rank_and_source(path, rank)
    if not is_archive(path) and host == host_of_name(meta.source):
        host = host_of_name(path)
    notes = tuple(
        path + note[len(meta.source) :] if note.startswith(meta.source) else note for note in meta.notes
    )
    return replace(meta, source=path, rank=number, rank_from=origin, host=host, notes=notes)
