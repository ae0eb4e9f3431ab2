"""What a trace says about its rank and its machine, from the keys around its events; and notes on what was lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddpdoctor.trace.columns import LIMIT_NS, NUMBERS_OF_DEVICES, TraceMeta
from ddpdoctor.trace.sources import MOST_RANKS, host_of_name, rank_of_name

from .build import ColumnBuilder
from .numbers import as_int
from .stream import LONGEST_EVENT_BYTES, EventStream

_EPOCH_FROM_NS = 1_000_000_000_000_000_000
"""Times later than this (September 2001) count from 1970: a machine's own clock starts at its boot."""
_LONGEST_TEXT = 1 << 10
"""Characters of a host's, a backend's or a version's name that are kept."""
_MOST_OBJECTS = 100_000
"""Process groups and devices that are kept: a job has one of them for each of its ranks, at most a few."""
_UNSAID = (None, "", -1, "-1")
"""What stands for "not known"."""


def base_time_ns(stream: EventStream) -> int:
    """What all times of a file are counted from, 0 where it does not say, or says what cannot be."""
    base_ns = as_int(stream.top.get("baseTimeNanoseconds"))
    return base_ns if 0 <= base_ns < LIMIT_NS else 0


def meta_of(
    path: str, rank: int | None, base_ns: int, stream: EventStream, builder: ColumnBuilder
) -> TraceMeta:
    """What the file at ``path`` says, read to its end; ``rank`` is what its reader knows better."""
    top = stream.top
    job = top.get("distributedInfo")
    job = job if isinstance(job, dict) else {}
    earliest_ns = builder.earliest_ns() or 0
    number, rank_from = _rank(path, rank, job)
    host = top.get("host_name")
    return TraceMeta(
        source=path,
        rank=number,
        rank_from=rank_from,
        world_size=_ranks(job.get("world_size")),
        backend=_text(job.get("backend")),
        host=_text(host) or host_of_name(path),
        process_groups=_objects(job.get("pg_config")),
        devices=tuple(map(_device, _objects(top.get("deviceProperties")))),
        clock="epoch" if base_ns + earliest_ns >= _EPOCH_FROM_NS else "relative",
        torch_version=_text(top.get("pytorch_version") or top.get("torch_version")),
        nccl_version=_version(job.get("nccl_version") or top.get("nccl_version")),
        notes=tuple(_notes(path, stream, builder)),
    )


def _rank(path: str, rank: int | None, job: dict[str, Any]) -> tuple[int | None, str]:
    if rank is not None:
        return rank, "run directory"
    if (own := as_int(job.get("rank"))) in range(MOST_RANKS):
        return own, "distributedInfo"
    if (named := rank_of_name(path)) is not None:
        return named, "file name"
    return None, ""


def _version(value: Any) -> str | None:
    return str(value)[:_LONGEST_TEXT] if isinstance(value, (str, int, float)) and value else None


def _notes(path: str, stream: EventStream, builder: ColumnBuilder) -> Iterator[str]:
    if stream.truncated:
        why = stream.source.broken or "ends before its list of events does"
        yield f"{path} {why}: its {builder.rows} whole events are used, the rest is lost."
    if stream.damages:
        places = "in one place" if stream.damages == 1 else f"in {stream.damages} places"
        yield f"{path} is damaged {places}: unreadable parts are skipped, {builder.rows} whole events are used."
    if stream.oversized:
        yield f"{path} holds {stream.oversized} event(s) longer than {LONGEST_EVENT_BYTES >> 20} MiB: they were skipped."
    if stream.top_unread:
        yield f"{path} holds too much text before its events to be read: its rank may be unknown."
    if stream.tail_unread:
        yield f"{path} holds too much text behind its events to be read: its rank and the base of its times may be unknown."
    if stream.repaired:
        yield f"{path} holds text that is not valid JSON (such as NaN or raw backslashes): it was repaired."
    if stream.lost_events:
        yield f"{path}: {stream.lost_events} malformed event(s) were skipped."
    if builder.without_duration:
        yield f"{path}: {builder.without_duration} event(s) without a usable duration (such as a negative one) count as instants."
    if builder.without_name:
        yield f"{path}: {builder.without_name} event(s) without a name: what they did is unknown."
    if builder.without_time:
        yield f"{path}: {builder.without_time} event(s) without a usable time were skipped."
    job = stream.top.get("distributedInfo")
    stated = {"baseTimeNanoseconds": (stream.top, LIMIT_NS)}
    if isinstance(job, dict):
        stated |= {"rank": (job, MOST_RANKS), "world_size": (job, MOST_RANKS)}
    for key, (place, limit) in stated.items():
        if place.get(key) not in _UNSAID and as_int(place[key]) not in range(limit):
            yield f"{path}: its {key} cannot be {str(place[key])[:40]} and is ignored."


def _ranks(value: Any) -> int | None:
    number = as_int(value)
    return number if number in range(MOST_RANKS) else None


def _text(value: Any) -> str | None:
    return value[:_LONGEST_TEXT] if isinstance(value, str) and value else None


def _objects(value: Any) -> tuple[dict[str, Any], ...]:
    listed = value[:_MOST_OBJECTS] if isinstance(value, list) else []
    return tuple(v for v in listed if isinstance(v, dict))


def _device(properties: dict[str, Any]) -> dict[str, Any]:
    """The properties of a device whose values are of a kind that such properties have."""
    kept = {key: value for key, value in properties.items() if isinstance(value, (str, int, float))}
    for key in NUMBERS_OF_DEVICES:
        if key in kept and (number := as_int(kept.pop(key))) in range(MOST_RANKS):
            kept[key] = number
    return kept
