"""Whole numbers of a trace, whatever type it gives them: a wrong one costs one value, not the event."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddpdoctor.trace.columns import IntColumn


def ints(values: list[Any]) -> IntColumn:
    """Whole numbers as they are; -1 for anything else."""
    try:
        return np.fromiter(values, np.int64, len(values))
    except (TypeError, ValueError, OverflowError):
        return np.array([as_int(v) for v in values], dtype=np.int64)


def positive(values: list[Any]) -> IntColumn:
    """Ids: 0 is Kineto's "none"."""
    ids = ints(values)
    ids[ids <= 0] = -1
    return ids


def as_int(value: Any) -> int:
    """A whole number of a trace, which may be written as text; -1 where it is none."""
    try:
        number = int(value, 0) if isinstance(value, str) else value
    except ValueError:
        return -1
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    is_whole = isinstance(number, int) and not isinstance(number, bool)
    return number if is_whole and -1 <= number < 2**63 else -1


def stream_of(tid: Any) -> int:
    """Old Kineto's "stream 7", or the number itself."""
    return as_int(tid.removeprefix("stream").strip() if isinstance(tid, str) else tid)
