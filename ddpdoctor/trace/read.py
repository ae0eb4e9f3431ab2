"""One trace file → one :class:`RankTrace`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace.archive import is_archive, load_archive
from ddpdoctor.trace.build import ColumnBuilder, as_int
from ddpdoctor.trace.columns import RankTrace, TraceMeta
from ddpdoctor.trace.foreign import is_foreign, is_own_timeline
from ddpdoctor.trace.ranks import host_of_name, rank_of_name
from ddpdoctor.trace.remote import is_url, open_url
from ddpdoctor.trace.source import Source, open_binary
from ddpdoctor.trace.stream import EventStream

_EPOCH_FROM_NS = 1_000_000_000_000_000_000
"""Times later than this (September 2001) count from 1970: a machine's own clock starts at its boot."""
_VERSION_KEYS = ("schemaVersion", "roctracer_version", "displayTimeUnit")


def load_trace(path: str, rank: int | None = None) -> RankTrace:
    """Reads one profiler trace (JSON; plain, gzip or zstd; or its digest) from a local path or a URL that
    fsspec knows.

    ``rank`` overrides what the file says (a run directory knows better).
    Raises :class:`UnusableInput` with one sentence where no event can be read.
    """
    if is_archive(path):
        return load_archive(path, rank)
    stream = EventStream(Source(path, open_url if is_url(path) else open_binary))
    builder = ColumnBuilder()
    with _without_garbage_collection():
        for batch in stream.batches():
            builder.add(batch, stream)
    if not builder.rows:
        why = f"it {stream.source.broken}" if stream.source.broken else _no_rows(builder)
        raise UnusableInput(f"{path} holds no profiler events: {why}.")
    if is_own_timeline(stream.top):
        raise UnusableInput(
            f"{path} is a timeline that ddpdoctor exported: name the run or the traces that it was made of."
        )
    trace = builder.finish(_meta(path, rank, stream, builder))
    if is_foreign(stream.top, trace.categories, trace.names):
        raise UnusableInput(
            f"{path} is no trace of the PyTorch profiler: it holds no torch operator, kernel, collective or "
            "profiler step."
        )
    return trace


def _no_rows(builder: ColumnBuilder) -> str:
    if builder.events:
        return "none of its events has a begin and a duration"
    return "its list of events is empty"


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A decode allocates a million objects and frees them by reference count: collections would only cost
    time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _meta(path: str, rank: int | None, stream: EventStream, builder: ColumnBuilder) -> TraceMeta:
    top = stream.top
    job = top.get("distributedInfo")
    job = job if isinstance(job, dict) else {}
    base_ns = max(0, as_int(top.get("baseTimeNanoseconds")))
    earliest_ns = builder.earliest_ns() or 0
    number, rank_from = _rank(path, rank, job)
    host = top.get("host_name")
    return TraceMeta(
        source=path,
        rank=number,
        rank_from=rank_from,
        world_size=_absent(as_int(job.get("world_size"))),
        backend=_text(job.get("backend")),
        host=host if isinstance(host, str) else host_of_name(path),
        process_groups=_objects(job.get("pg_config")),
        devices=_objects(top.get("deviceProperties")),
        base_ns=base_ns,
        clock="epoch" if base_ns + earliest_ns >= _EPOCH_FROM_NS else "relative",
        torch_version=_text(top.get("pytorch_version") or top.get("torch_version")),
        versions=_versions(top, job),
        with_stack=bool(top.get("with_stack")) or builder.saw_stacks,
        record_shapes=bool(top.get("record_shapes")) or builder.saw_shapes,
        truncated=stream.truncated,
        notes=tuple(_notes(path, stream, builder)),
    )


def _rank(path: str, rank: int | None, job: dict[str, Any]) -> tuple[int | None, str]:
    if rank is not None:
        return rank, "run directory"
    if (own := as_int(job.get("rank"))) >= 0:
        return own, "distributedInfo"
    if (named := rank_of_name(path)) is not None:
        return named, "file name"
    return None, ""


def _versions(top: dict[str, Any], job: dict[str, Any]) -> dict[str, str]:
    found = {k: v for k, v in (*top.items(), *job.items()) if k.endswith("_version") or k in _VERSION_KEYS}
    return {k: str(v) for k, v in found.items() if isinstance(v, (str, int, float))}


def _notes(path: str, stream: EventStream, builder: ColumnBuilder) -> Iterator[str]:
    if stream.truncated:
        why = stream.source.broken or "ends before its list of events does"
        yield f"{path} {why}: its {builder.rows} whole events are used, what came after is lost."
    if stream.damages:
        places = "in one place" if stream.damages == 1 else f"in {stream.damages} places"
        yield f"{path} is damaged {places}: what cannot be read there is left out, {builder.rows} whole events are used."
    if stream.repaired:
        yield f"{path} holds text that is not valid JSON (such as NaN or raw backslashes): it was repaired."
    if stream.lost_events:
        yield f"{path}: {stream.lost_events} malformed event(s) were left out."
    if builder.without_duration:
        yield f"{path}: {builder.without_duration} event(s) without a usable duration (such as a negative one) count as instants."
    if builder.without_name:
        yield f"{path}: {builder.without_name} event(s) without a name: what they did cannot be told."
    if builder.without_time:
        yield f"{path}: {builder.without_time} event(s) without a usable time were left out."


def _absent(value: int) -> int | None:
    return value if value >= 0 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _objects(value: Any) -> tuple[dict[str, Any], ...]:
    return tuple(v for v in value if isinstance(v, dict)) if isinstance(value, list) else ()
