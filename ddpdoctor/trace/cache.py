"""Parsed columns kept between runs, in the user's cache folder: a second analysis of the same file skips its
JSON.

An entry is found by a hash of the file's whole content, so it is never another file's; it is written aside
and renamed into place, so readers and writers may share the folder; one that cannot be read is ignored and
made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tempfile
import zipfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import ddpdoctor
from ddpdoctor.trace.columns import Collectives, Lane, RankTrace, TraceMeta
from ddpdoctor.trace.ranks import host_of_name, rank_of_name
from ddpdoctor.trace.read import load_trace
from ddpdoctor.trace.remote import is_url

SCHEMA = 1
"""Raised whenever the same file gives other columns than before."""
LIMIT_BYTES = 8 << 30
"""The least recently used entries go beyond this size."""

_EVENT_COLUMNS = (
    *("name", "category", "lane", "start_ns", "duration_ns", "stream", "device"),
    *("correlation", "external_id", "bytes", "shapes"),
)


class _Head(msgspec.Struct):
    meta: TraceMeta
    names: list[str]
    categories: list[str]
    lanes: list[Lane]


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/ddpdoctor/traces``, by default below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ddpdoctor" / "traces"


def cached_load(path: str, rank: int | None = None) -> RankTrace:
    """As :func:`load_trace`, from the cache where it holds this file's columns, and into it where it does
    not.

    A URL is always read: telling whether it changed would take as long. Trouble with the cache is never an
    error.
    """
    if is_url(path):
        return load_trace(path, rank)
    try:
        entry = _entry(path)
    except (
        OSError,
        RuntimeError,
    ):  # unreadable, or no home folder: load_trace says what is wrong, if anything is
        return load_trace(path, rank)
    trace = _read(entry)
    if trace is not None:
        return replace(trace, meta=_placed(trace.meta, path, rank))
    trace = load_trace(path, rank)
    with contextlib.suppress(OSError):
        _write(entry, trace)
    return trace


def _entry(path: str) -> Path:
    digest = hashlib.blake2b(f"{SCHEMA} {ddpdoctor.__version__}".encode(), digest_size=20)
    with Path(path).open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return cache_folder() / f"{digest.hexdigest()}.columns"


def _placed(meta: TraceMeta, path: str, rank: int | None) -> TraceMeta:
    """``meta`` of the same content at another place: rank and host that came from the place are found
    anew."""
    number, origin = meta.rank, meta.rank_from
    if rank is not None:
        number, origin = rank, "run directory"
    elif origin != "distributedInfo":
        number = rank_of_name(path)
        origin = "" if number is None else "file name"
    host = host_of_name(path) if meta.host == host_of_name(meta.source) else meta.host
    notes = tuple(note.replace(meta.source, path) for note in meta.notes)
    return replace(meta, source=path, rank=number, rank_from=origin, host=host, notes=notes)


def _read(entry: Path) -> RankTrace | None:
    try:
        with zipfile.ZipFile(entry) as archive:  # checks each member's CRC
            head = msgspec.json.decode(archive.read("head.json"), type=_Head)
            events = _arrays(archive.read("events.parquet"))
            collectives = _arrays(archive.read("collectives.parquet"))
        os.utime(entry)
        return RankTrace(
            meta=head.meta,
            names=head.names,
            categories=head.categories,
            lanes=head.lanes,
            collectives=Collectives(**collectives),
            **events,
        )
    except FileNotFoundError:
        return None
    except Exception:  # a damaged entry can fail in any layer; it will be replaced
        return None


def _arrays(parquet: bytes) -> dict[str, Any]:
    import polars

    frame = polars.read_parquet(io.BytesIO(parquet))
    return {column: np.array(frame[column].to_numpy()) for column in frame.columns}


def _write(entry: Path, trace: RankTrace) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    head = msgspec.json.encode(_Head(trace.meta, trace.names, trace.categories, trace.lanes))
    handle, aside = tempfile.mkstemp(dir=entry.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as stream, zipfile.ZipFile(stream, "w") as archive:
            archive.writestr("head.json", head, zipfile.ZIP_DEFLATED, 1)
            archive.writestr("events.parquet", _parquet(trace, _EVENT_COLUMNS))
            archive.writestr(
                "collectives.parquet", _parquet(trace.collectives, tuple(f.name for f in fields(Collectives)))
            )
        Path(aside).replace(entry)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
    _prune(entry.parent)


def _parquet(table: object, columns: tuple[str, ...]) -> bytes:
    import polars

    target = io.BytesIO()
    frame = polars.DataFrame({column: getattr(table, column) for column in columns})
    frame.write_parquet(target, compression="zstd", compression_level=1, statistics=False)
    return target.getvalue()


def _prune(folder: Path) -> None:
    """Removes the entries that were used longest ago until the rest is within :data:`LIMIT_BYTES`."""
    entries = []
    for file in folder.iterdir():
        with contextlib.suppress(OSError):  # another process may be pruning too
            status = file.stat()
            entries.append((status.st_mtime, status.st_size, file))
    total = sum(size for _, size, _ in entries)
    for _, size, file in sorted(entries):
        if total <= LIMIT_BYTES:
            return
        file.unlink(missing_ok=True)
        total -= size
