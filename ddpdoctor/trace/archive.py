"""One rank's columns as one file: what the cache keeps and what ``ddpdoctor digest`` writes.

A ZIP archive (each member has a checksum) of ``head.json`` and two Parquet tables, ``events.parquet`` and
``collectives.parquet``, whose columns are those of :class:`RankTrace` and :class:`Collectives`.
"""

from __future__ import annotations

import io
from dataclasses import fields, replace
from typing import Any, BinaryIO

import msgspec
import numpy as np

from ddpdoctor.errors import UnusableInput
from ddpdoctor.rundir import reason_of
from ddpdoctor.trace.columns import Collectives, Lane, RankTrace, TraceMeta
from ddpdoctor.trace.ranks import host_of_name, rank_of_name
from ddpdoctor.trace.remote import is_url, open_url
from ddpdoctor.trace.source import open_binary

SCHEMA = "ddpdoctor.columns/2"
"""Raised whenever the same trace gives other columns, or the same columns another file, than before."""
SUFFIX = ".columns"

_EVENT_COLUMNS = (
    *("name", "category", "lane", "start_ns", "duration_ns", "stream", "device"),
    *("correlation", "external_id", "bytes", "shapes"),
)
_COLLECTIVE_COLUMNS = tuple(f.name for f in fields(Collectives))
_BROKEN = (KeyError, ValueError, NotImplementedError, msgspec.MsgspecError)


class _Head(msgspec.Struct):
    schema: str
    meta: TraceMeta
    names: list[str]
    categories: list[str]
    lanes: list[Lane]


def is_archive(path: str) -> bool:
    """Whether ``path`` is named like a file of columns."""
    return path.endswith(SUFFIX)


def write_archive(target: BinaryIO, trace: RankTrace) -> None:
    """Writes ``trace``; the same trace gives the same bytes. Raises OSError."""
    import zipfile

    head = _Head(SCHEMA, trace.meta, trace.names, trace.categories, trace.lanes)
    with zipfile.ZipFile(target, "w") as archive:
        packed = zipfile.ZipInfo("head.json")
        packed.compress_type = zipfile.ZIP_DEFLATED
        archive.writestr(packed, msgspec.json.encode(head), compresslevel=1)
        archive.writestr(zipfile.ZipInfo("events.parquet"), _parquet(trace, _EVENT_COLUMNS))
        archive.writestr(
            zipfile.ZipInfo("collectives.parquet"), _parquet(trace.collectives, _COLLECTIVE_COLUMNS)
        )


def read_archive(source: BinaryIO, path: str) -> RankTrace:
    """The trace in ``source``, which lies at ``path``. Raises OSError, or :class:`UnusableInput` where it is no
    such file, is damaged, or is of another version.
    """
    import zipfile

    try:
        with zipfile.ZipFile(source) as archive:
            data = archive.read("head.json")
            schema = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("schema", msgspec.Raw(b'""'))
            if (written := msgspec.json.decode(schema, type=str)) != SCHEMA:
                raise UnusableInput(
                    f"{path} holds {written or 'no'} columns, this version of ddpdoctor reads {SCHEMA}: "
                    "digest the trace again with this version."
                )
            head = msgspec.json.decode(data, type=_Head)
            events = _arrays(archive.read("events.parquet"))
            collectives = _arrays(archive.read("collectives.parquet"))
        return RankTrace(
            meta=head.meta,
            names=head.names,
            categories=head.categories,
            lanes=head.lanes,
            collectives=Collectives(**collectives),
            **events,
        )
    except (*_BROKEN, zipfile.BadZipFile, TypeError) as error:
        raise UnusableInput(f"{path} is no whole file of columns: digest the trace again.") from error


def load_archive(path: str, rank: int | None = None) -> RankTrace:
    """The trace that ``ddpdoctor digest`` wrote to ``path``, a local path or URL; ``rank`` overrides its own.
    Raises :class:`UnusableInput`."""
    try:
        with open_url(path) if is_url(path) else open_binary(path) as stream:
            trace = read_archive(io.BytesIO(stream.read()), path)
    except OSError as error:
        raise UnusableInput(f"{path} cannot be read: {reason_of(error).lower()}.") from None
    return replace(trace, meta=placed(trace.meta, path, rank))


def placed(meta: TraceMeta, path: str, rank: int | None) -> TraceMeta:
    """``meta`` of the same content at another place, read as ``rank`` if given: rank and host that came from the
    trace's place are found anew, but for a digest, which keeps what was found where the trace lay."""
    number, origin, host = meta.rank, meta.rank_from, meta.host
    if rank is not None:
        number, origin = rank, "run directory"
    elif not is_archive(path) and origin != "distributedInfo":
        number = rank_of_name(path)
        origin = "" if number is None else "file name"
    if not is_archive(path) and host == host_of_name(meta.source):
        host = host_of_name(path)
    notes = tuple(note.replace(meta.source, path) for note in meta.notes)
    return replace(meta, source=path, rank=number, rank_from=origin, host=host, notes=notes)


def _parquet(table: object, columns: tuple[str, ...]) -> bytes:
    import polars

    target = io.BytesIO()
    frame = polars.DataFrame({column: getattr(table, column) for column in columns})
    frame.write_parquet(target, compression="zstd", compression_level=1, statistics=False)
    return target.getvalue()


def _arrays(parquet: bytes) -> dict[str, Any]:
    import polars

    try:
        frame = polars.read_parquet(io.BytesIO(parquet))
    except polars.exceptions.PolarsError as error:
        raise ValueError(str(error)) from error
    return {column: np.array(frame[column].to_numpy()) for column in frame.columns}
