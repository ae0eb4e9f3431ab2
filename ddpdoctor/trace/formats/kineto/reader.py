"""Recognises and reads a file, and collects what it says about its rank, its job and its damage."""

from __future__ import annotations

import gc
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace.archive import NUMBERS_OF_DEVICES, rank_and_source
from ddpdoctor.trace.classify import DEVICE
from ddpdoctor.trace.columns import LIMIT_NS, RankTrace, TraceMeta
from ddpdoctor.trace.formats import HEAD_BYTES, Candidate
from ddpdoctor.trace.sources import GZIP, LFS_POINTER, MAX_RANKS, ZSTD, Source, host_of_name

from .build import ColumnBuilder
from .stream import MAX_EVENT_BYTES, EventStream
from .times import as_int

_EXPORT_MARK = b'"otherData":{"producer":"ddpdoctor"'
"""Text in a timeline that ``ddpdoctor export`` wrote, which is not a recording."""
_KEYS = (b'"traceEvents"', b'"baseTimeNanoseconds"', b'"deviceProperties"', b'"distributedInfo"')
"""Top-level keys, at least one of which is near the beginning of each trace."""
_FIRST_EVENT_BYTES = 4096
"""Number of first bytes that contain the first event, or the mark of an exported timeline."""


def recognises(candidate: Candidate) -> bool:
    """See :class:`ddpdoctor.trace.formats.Format`.

    A file whose content cannot be inspected, or that is a Git LFS pointer, is recognised by its name alone.
    """
    named = ".json" in Path(candidate.path).name.lower()
    head = candidate.head
    if head is None or head.startswith((LFS_POINTER, ZSTD)):
        return named
    if head.startswith(GZIP):
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, HEAD_BYTES)
        except zlib.error:
            return named
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text.startswith(b"["):
        return b'"ph"' in text[:_FIRST_EVENT_BYTES] or (named and not text[1:].strip(b" \t\r\n]"))
    if not text.startswith(b"{") or _EXPORT_MARK in text[:_FIRST_EVENT_BYTES]:
        return False
    is_cut = len(head) == HEAD_BYTES
    return any(key in text for key in _KEYS) or (is_cut and "trace" in candidate.path.lower())


def read(path: str, rank: int | None) -> RankTrace:
    """See :class:`ddpdoctor.trace.formats.Format`. Plain, gzip or zstd."""
    stream = EventStream(Source(path))
    builder = ColumnBuilder()
    with _without_garbage_collection():
        for batch in stream.batches():
            builder.add(batch, stream)
    base_ns = base_time_ns(stream)
    builder.drop_times_outside(base_ns)
    if not builder.rows:
        raise UnusableInput(_no_rows(path, stream, builder))
    if is_own_timeline(stream.top):
        raise UnusableInput(
            f"{path} is a timeline that ddpdoctor exported: name the run or the traces it was made from."
        )
    if builder.lanes.is_ascend:
        # Its NPU events have no categories, so the job would look like a job on CPUs.
        raise UnusableInput(
            f"{path} is a timeline of Ascend's torch_npu.profiler: what ran on the NPU has names of its own there, which ddpdoctor "
            "does not know."
        )
    trace = builder.finish(meta_of(path, rank, base_ns, stream, builder), base_ns)
    if is_not_pytorch(stream.top, trace.categories, trace.names):
        raise UnusableInput(
            f"{path} is not a PyTorch profiler trace: it has no torch operator, kernel, collective or "
            "profiler step."
        )
    return trace


def _no_rows(path: str, stream: EventStream, builder: ColumnBuilder) -> str:
    if stream.too_deep:
        return f"{path} cannot be read: it is nested too deeply."
    if stream.source.read_error:
        why = f"it {stream.source.read_error}"
    elif builder.events:
        why = "none of its events has a begin and a duration"
    else:
        why = "its list of events is empty"
    return f"{path} holds no profiler events: {why}."


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Context without garbage collection: decoding allocates a million objects, all freed by reference counts."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_KINETO_KEYS = frozenset(
    {"deviceProperties", "distributedInfo", "baseTimeNanoseconds", "pytorch_version", "torch_version"}
)
"""Top-level keys that only Kineto writes."""
_CATEGORY = re.compile(
    r"(?:^|[_ ])(?:cpu_op|op|kernel|runtime|driver|user_annotation|python_function|cpu_instant_event|memcpy|memset"
    r"|ac2g|fwdbwd|async_npu)s?$"
)
"""Suffixes of the vendors' categories: cuda_runtime, xpu_driver, npu_kernel, hpu_op ..."""
_NAME = re.compile(
    r"aten::|c10d|autograd::|torch|ProfilerStep|(?:nccl|rccl|gloo|xccl|hccl|mpi|ucc):|ncclKernel|ncclDevKernel"
    r"|Optimizer\.|DistributedDataParallel|enumerate\(DataLoader\)|(?:cuda|hip)(?:Launch|Memcpy|Stream|Event|Device)"
)
_EXPORT_PRODUCER = "ddpdoctor"


def is_own_timeline(top: Mapping[str, Any]) -> bool:
    """Whether the top-level keys ``top`` are those of a timeline that ``ddpdoctor export`` wrote."""
    other = top.get("otherData")
    return isinstance(other, dict) and other.get("producer") == _EXPORT_PRODUCER


def is_not_pytorch(top: Mapping[str, Any], categories: Collection[str], names: Iterable[str]) -> bool:
    """Whether neither top-level keys, nor (normalised) categories, nor event names of a trace are PyTorch's."""
    if not _KINETO_KEYS.isdisjoint(top) or not DEVICE.isdisjoint(categories):
        return False
    return not any(map(_CATEGORY.search, categories)) and not any(map(_NAME.match, names))


_EPOCH_FROM_NS = 1_000_000_000_000_000_000
"""Times from September 2001 on count as ns since 1970. Smaller ones are from a monotonic clock, which counts from the machine's boot."""
_MAX_TEXT = 1 << 10
"""Most characters of a host, backend or version text that are kept."""
_MAX_OBJECTS = 100_000
"""Most process groups or devices that are kept; a job has at most a few per rank."""
_UNKNOWN = (None, "", -1, "-1")
"""Values that mean "not known"."""


def base_time_ns(stream: EventStream) -> int:
    """``baseTimeNanoseconds``, to which all times in the file are relative; 0 if it is absent or out of range."""
    base_ns = as_int(stream.top.get("baseTimeNanoseconds"))
    return base_ns if 0 <= base_ns < LIMIT_NS else 0


def meta_of(
    path: str, rank: int | None, base_ns: int, stream: EventStream, builder: ColumnBuilder
) -> TraceMeta:
    """Metadata of the file at ``path``. Call after the file has been read to its end. ``rank`` overrides the file's rank."""
    top = stream.top
    job = top.get("distributedInfo")
    job = job if isinstance(job, dict) else {}
    earliest_ns = builder.earliest_ns() or 0
    stated = own if (own := as_int(job.get("rank"))) in range(MAX_RANKS) else None
    number, rank_from = rank_and_source(path, rank, stated)
    nccl = job.get("nccl_version") or top.get("nccl_version")
    return TraceMeta(
        source=path,
        rank=number,
        rank_from=rank_from,
        world_size=world if (world := as_int(job.get("world_size"))) in range(MAX_RANKS) else None,
        backend=_text(job.get("backend")),
        host=_text(top.get("host_name")) or host_of_name(path),
        process_groups=_objects(job.get("pg_config")),
        devices=tuple(map(_device, _objects(top.get("deviceProperties")))),
        clock="epoch" if base_ns + earliest_ns >= _EPOCH_FROM_NS else "relative",
        torch_version=_text(top.get("pytorch_version") or top.get("torch_version")),
        nccl_version=_text(str(nccl) if isinstance(nccl, (str, int, float)) and nccl else None),
        truncated=_truncated(stream),
        notes=tuple(_notes(path, stream, builder)),
    )


def _notes(path: str, stream: EventStream, builder: ColumnBuilder) -> Iterator[str]:
    yield from _notes_of_text(path, stream, builder.rows)
    yield from _notes_of_events(path, stream, builder)
    job = stream.top.get("distributedInfo")
    stated = {"baseTimeNanoseconds": (stream.top, LIMIT_NS)}
    if isinstance(job, dict):
        stated |= {"rank": (job, MAX_RANKS), "world_size": (job, MAX_RANKS)}
    for key, (place, limit) in stated.items():
        if place.get(key) not in _UNKNOWN and as_int(place[key]) not in range(limit):
            yield f"{path}: its {key} cannot be {str(place[key])[:40]} and is ignored."


def _truncated(stream: EventStream) -> str | None:
    """Why the end of the list of events is missing; None if the list is complete."""
    return (stream.source.read_error or "ends before its list of events does") if stream.truncated else None


def _notes_of_text(path: str, stream: EventStream, rows: int) -> Iterator[str]:
    if why := _truncated(stream):
        yield f"{path} is truncated: it {why}, after {rows:,} complete events, and any step may lack some. Copy or record it again."
    if stream.damages:
        places = "in one place" if stream.damages == 1 else f"in {stream.damages} places"
        yield f"{path} is damaged {places}: unreadable parts are skipped, {rows:,} complete events are used."
    if stream.oversized:
        yield f"{path} holds {stream.oversized} event(s) longer than {MAX_EVENT_BYTES >> 20} MiB: they were skipped."
    if stream.top_unread:
        yield f"{path} holds too much text before its events to be read: its rank may be unknown."
    if stream.tail_unread:
        yield f"{path} holds too much text behind its events to be read: its rank and the base of its times may be unknown."
    if stream.repaired:
        yield f"{path} holds text that is not valid JSON (such as NaN or raw backslashes): it was repaired."


def _notes_of_events(path: str, stream: EventStream, builder: ColumnBuilder) -> Iterator[str]:
    if stream.lost_events:
        yield f"{path}: {stream.lost_events} malformed event(s) were skipped."
    if builder.events_without_duration:
        yield f"{path}: {builder.events_without_duration} event(s) without a usable duration (such as a negative one) count as instants."
    if builder.events_without_name:
        yield f"{path}: {builder.events_without_name} event(s) without a name: what they did is unknown."
    if builder.events_without_time:
        yield f"{path}: {builder.events_without_time} event(s) without a usable time were skipped."


def _text(value: Any) -> str | None:
    return value[:_MAX_TEXT] if isinstance(value, str) and value else None


def _objects(value: Any) -> tuple[dict[str, Any], ...]:
    listed = value[:_MAX_OBJECTS] if isinstance(value, list) else []
    return tuple(v for v in listed if isinstance(v, dict))


def _device(properties: dict[str, Any]) -> dict[str, Any]:
    """The device properties that have a valid type."""
    kept = {key: value for key, value in properties.items() if isinstance(value, (str, int, float))}
    for key in NUMBERS_OF_DEVICES:
        if key in kept and (number := as_int(kept.pop(key))) in range(MAX_RANKS):
            kept[key] = number
    return kept
