"""One rank's columns as one file: what the cache keeps and what ``ddpdoctor digest`` writes.

A ZIP archive (each member has a checksum) of ``head.json`` and two Parquet tables, ``events.parquet`` and
``collectives.parquet``, whose columns are those of :class:`RankTrace` and :class:`Collectives`.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from typing import Any, BinaryIO

import msgspec
import numpy as np

from ddpdoctor.errors import UnusableInput

from .checks import UnsoundTraceError, check_trace
from .table import Collectives, RankTrace, TraceMeta

SCHEMA = "ddpdoctor.columns/3"
"""Raised whenever the same trace gives other columns, or the same columns another file, than before."""
SUFFIX = ".columns"

_EVENT_COLUMNS = (
    *("name", "category", "lane", "start_ns", "duration_ns", "stream", "device"),
    *("correlation", "external_id", "bytes", "shapes"),
)
_COLLECTIVE_COLUMNS = Collectives.__struct_fields__
_BROKEN = (
    *(KeyError, ValueError, NotImplementedError, RuntimeError, TypeError, EOFError),
    *(msgspec.MsgspecError, RecursionError, zlib.error, struct.error),
)
_HEAD_FREE_BYTES, _MOST_HEAD_GROWTH = 8 << 20, 50
"""How large a head may be, and else how many times its compressed size: text of this kind has 5 to 10 times."""
_FREE_ROWS = 1_000_000
"""A table may have so many rows, and beyond them one for each of its bytes: those of traces take ten bytes each."""


class _Head(msgspec.Struct):
    schema: str
    meta: TraceMeta
    names: list[str]
    categories: list[str]


def is_archive(path: str) -> bool:
    """Whether ``path`` is named like a file of columns."""
    return path.endswith(SUFFIX)


def write_archive(target: BinaryIO, trace: RankTrace) -> None:
    """Writes ``trace``; the same trace gives the same bytes. Raises OSError."""
    head = _Head(SCHEMA, trace.meta, trace.names, trace.categories)
    with zipfile.ZipFile(target, "w") as archive:
        packed = zipfile.ZipInfo("head.json")
        packed.compress_type = zipfile.ZIP_DEFLATED
        archive.writestr(packed, msgspec.json.encode(head), compresslevel=1)
        archive.writestr(zipfile.ZipInfo("events.parquet"), _parquet(trace, _EVENT_COLUMNS))
        archive.writestr(
            zipfile.ZipInfo("collectives.parquet"), _parquet(trace.collectives, _COLLECTIVE_COLUMNS)
        )


def read_archive(source: BinaryIO, path: str) -> RankTrace:
    """The trace in ``source``, which lies at ``path``.

    Raises OSError, or :class:`UnusableInput` where it is no such file, is damaged, or is of another version.
    """
    try:
        with zipfile.ZipFile(source) as archive:
            data = _member(archive, "head.json", _HEAD_FREE_BYTES, _MOST_HEAD_GROWTH)
            schema = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("schema", msgspec.Raw(b'""'))
            if (written := msgspec.json.decode(schema, type=str)) != SCHEMA:
                raise UnusableInput(
                    f"{path} holds {written or 'no'} columns, this version of ddpdoctor reads {SCHEMA}: "
                    "digest the trace again with this version."
                )
            head = msgspec.json.decode(data, type=_Head)
            events = _arrays(_member(archive, "events.parquet"), RankTrace, _EVENT_COLUMNS)
            collectives = _arrays(_member(archive, "collectives.parquet"), Collectives, _COLLECTIVE_COLUMNS)
        trace = RankTrace(
            meta=head.meta,
            names=head.names,
            categories=head.categories,
            collectives=Collectives(**collectives),
            **events,
        )
        check_trace(trace)
        return trace
    except (*_BROKEN, zipfile.BadZipFile) as error:
        why = f" ({error})" if isinstance(error, UnsoundTraceError) else ""
        raise UnusableInput(
            f"{path} is not a complete file of columns{why}: digest the trace again."
        ) from error


def _parquet(table: object, columns: tuple[str, ...]) -> bytes:
    import polars

    target = io.BytesIO()
    types = _types(type(table), columns)
    frame = polars.DataFrame({column: np.asarray(getattr(table, column)) for column in columns}, schema=types)
    frame.write_parquet(target, compression="zstd", compression_level=1, statistics=False)
    return target.getvalue()


def _member(archive: zipfile.ZipFile, name: str, free_bytes: int = 0, growth: int = 1) -> bytes:
    """Content of a member, if it is no more than ``growth`` times its compressed size or ``free_bytes``."""
    info = archive.getinfo(name)
    if info.file_size > max(free_bytes, growth * info.compress_size):
        raise ValueError(f"{name} is compressed more than it can be")
    return archive.read(info)


def _types(table: type, columns: tuple[str, ...]) -> dict[str, Any]:
    """Each column's type in a file, as ``table`` declares it; whoever made the columns may have chosen a narrower one."""
    import polars

    return {
        column: polars.Int32 if table.__annotations__[column] == "IdColumn" else polars.Int64
        for column in columns
    }


def _arrays(parquet: bytes, table: type, columns: tuple[str, ...]) -> dict[str, Any]:
    """The columns of ``table`` from a Parquet file that holds them, whole and of their types, and nothing else."""
    import polars

    try:
        if dict(polars.read_parquet_schema(io.BytesIO(parquet))) != _types(table, columns):
            raise ValueError("other columns")
        rows = polars.scan_parquet(io.BytesIO(parquet)).select(polars.len()).collect().item()
        if rows > _FREE_ROWS + len(parquet):
            raise ValueError("more rows than it has bytes")
        frame = polars.read_parquet(io.BytesIO(parquet))
    except (polars.exceptions.PolarsError, polars.exceptions.PanicException) as error:
        raise ValueError(str(error)) from error
    if any(frame.null_count().row(0)):
        raise ValueError("values are missing")
    return {column: np.array(frame[column].to_numpy()) for column in columns}
