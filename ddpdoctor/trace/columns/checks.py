"""Whether columns from a file hold what columns of a trace can hold: whoever wrote the file may have written anything."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.trace.sources import MOST_RANKS

from .table import RankTrace, TraceMeta

LIMIT_NS = 2**62
"""No time lies further from its origin, which may be 1970: that would be after the year 2115. Two of them still add up to
what 64 bits can hold."""
LONGEST_NS = 2**60
"""No event takes longer: that would be 36 years."""
_ABSENT = -1
"""What stands where a trace does not say, see :mod:`.table`."""
_ORIGINS = ("distributedInfo", "file name", "run directory", "")
_CLOCKS = ("epoch", "relative")
_LONGEST_TEXT = 1 << 14
"""Characters of a note, a path or a version: the longest path has 4,096."""
_MOST_NOTES = 100
"""A reader gives at most one note of each kind, and there are a dozen kinds."""
NUMBERS_OF_DEVICES = ("computeMajor", "computeMinor")
"""Keys of ``deviceProperties`` that are calculated with."""


class UnsoundTraceError(ValueError):
    """Something in the columns cannot be; the text says what."""


def check_trace(trace: RankTrace) -> None:
    """Raises :class:`UnsoundTraceError` where ``trace`` holds what no profiler and no reader of ours gives."""
    _check_times(trace)
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


def _check_times(trace: RankTrace) -> None:
    if not trace.size:
        raise UnsoundTraceError("it holds no event")
    _check_range("start_ns", trace.start_ns, -LIMIT_NS, LIMIT_NS, trace.size)
    _check_range("duration_ns", trace.duration_ns, 0, LONGEST_NS, trace.size)
    if (np.diff(trace.start_ns) < 0).any():
        raise UnsoundTraceError("its events are not in the order of their times")


def _check_range(column: str, values: NDArray[Any], least: int, most: int | None, rows: int) -> None:
    if len(values) != rows:
        raise UnsoundTraceError(f"the column {column} has {len(values)} rows, not {rows}")
    if rows and (values.min() < least or (most is not None and values.max() > most)):
        raise UnsoundTraceError(f"the column {column} holds values that it cannot have")


def _check_meta(meta: TraceMeta) -> None:
    texts = (meta.source, meta.backend, meta.host, meta.torch_version, meta.nccl_version, *meta.notes)
    numbers = [device.get(name) for device in meta.devices for name in NUMBERS_OF_DEVICES]
    sound = {
        "rank": meta.rank is None or 0 <= meta.rank < MOST_RANKS,
        "world size": meta.world_size is None or 0 <= meta.world_size < MOST_RANKS,
        "origin of the rank": meta.rank_from in _ORIGINS,
        "clock": meta.clock in _CLOCKS,
        "text": all(text is None or len(text) <= _LONGEST_TEXT for text in texts),
        "number of notes": len(meta.notes) <= _MOST_NOTES,
        "number of a device": all(n is None or (type(n) is int and 0 <= n < MOST_RANKS) for n in numbers),
    }
    for what, is_sound in sound.items():
        if not is_sound:
            raise UnsoundTraceError(f"its {what} cannot be so")
