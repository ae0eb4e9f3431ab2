"""Numbers and times in a Chrome trace: microseconds as text with up to three decimals become nanoseconds without rounding twice."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np

from ddpdoctor.trace.columns import LIMIT_NS, IntColumn


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


EXACT_BELOW_US = float(2**43)
"""Below this a double's spacing is ≤ 2**-10 µs, so the nearest double lies within 0.49 ns of a µs value with three decimals
and rounds back to it. Kineto's ``baseTimeNanoseconds`` is at most three months back: 7.9e12 µs < 2**43."""
MISSING_NS = np.iinfo(np.int64).min
"""Stands where a time is no number, or none that can be."""
_LIMIT_US = float(LIMIT_NS // 1000)
"""The same limit in the unit of the file."""
_DECIMALS = 3
"""Decimals of a number of µs that are whole nanoseconds."""
_SCALE = 10 ** np.arange(_DECIMALS, -1, -1)
"""What makes nanoseconds of the digits, by how many of them are decimals."""
_WHOLE = msgspec.json.Decoder(list[int])
_DOUBLES = msgspec.json.Decoder(list[float])


class InexactTimesError(ValueError):
    """These numbers have lost their nanoseconds as doubles: decode the text instead."""


def from_numbers(values: list[Any], *, rounded: bool = False) -> IntColumn:
    """Times in ns from decoded numbers in µs; :data:`MISSING_NS` where a value is no number.

    Raises :class:`InexactTimesError` where a double cannot carry the nanoseconds, unless they may be ``rounded``.
    """
    try:
        array = np.fromiter(values, np.float64, len(values))
    except (TypeError, ValueError, OverflowError):
        array = np.array([_number(v) for v in values], dtype=np.float64)
    bad = ~(np.abs(array) < _LIMIT_US)
    if bad.any():
        array = np.where(bad, 0.0, array)
    beyond = array.size and np.abs(array).max() >= EXACT_BELOW_US
    if beyond and not rounded and set(map(type, values)) != {int}:
        raise InexactTimesError
    whole = np.floor(array)
    result: IntColumn = whole.astype(np.int64) * 1000 + np.rint((array - whole) * 1000).astype(np.int64)
    if bad.any():
        result[bad] = MISSING_NS
    return result


def from_text(values: Sequence[bytes | msgspec.Raw]) -> IntColumn:
    """Times in ns from the digits of the file, in µs; :data:`MISSING_NS` where the text is no number.

    The digits are decoded as whole numbers, without their points; the numbers as doubles, good to a quarter of a µs, tell
    where the points stood.
    """
    text = b"[" + b",".join(values) + b"]"
    try:
        if b"e" in text or b"E" in text:
            raise ValueError
        about_us = np.array(_DOUBLES.decode(text), np.float64)
        digits = np.array(_WHOLE.decode(text.replace(b".", b"")), np.int64)
        if len(digits) != len(values):
            raise ValueError
    except (ValueError, OverflowError):  # text among them, "null", or a leading zero
        return np.fromiter(map(_text_ns, values), np.int64, len(values))
    ratio = np.ones(len(values))
    np.divide(digits, about_us, out=ratio, where=about_us != 0)
    decimals = np.rint(np.log10(ratio)).astype(np.int64)
    scale = _SCALE[np.clip(decimals, 0, _DECIMALS)]
    plain = (decimals <= _DECIMALS) & (np.abs(digits) < LIMIT_NS // scale)
    result: IntColumn = digits * scale
    for row in np.flatnonzero(~plain).tolist():
        result[row] = _text_ns(values[row])
    return result


def _number(value: Any) -> float:
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            return float("nan")
    return float("nan")


def _text_ns(text: bytes | msgspec.Raw) -> int:
    try:
        exact = (Decimal(bytes(text).decode("ascii", "replace").strip('"')) * 1000).to_integral_value()
        return int(exact) if abs(exact) < LIMIT_NS else MISSING_NS
    except (ArithmeticError, ValueError):
        return MISSING_NS
