"""Converts numbers and times in a Chrome trace: µs with up to three decimals to exact integer ns."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np

from ddpdoctor.trace.columns import LIMIT_NS, IntColumn


def ints(values: list[Any]) -> IntColumn:
    """[values] as integers; -1 for any other value."""
    try:
        return np.fromiter(values, np.int64, len(values))
    except (TypeError, ValueError, OverflowError):
        return np.array([as_int(v) for v in values], dtype=np.int64)


def positive(values: list[Any]) -> IntColumn:
    """[values] as positive ids; -1 for any other value, including 0, which is Kineto's "none"."""
    ids = ints(values)
    ids[ids <= 0] = -1
    return ids


def as_int(value: Any) -> int:
    """``value``, a number or the text of one, as an integer; -1 if it is not a whole number."""
    try:
        number = int(value, 0) if isinstance(value, str) else value
    except ValueError:
        return -1
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    is_whole = isinstance(number, int) and not isinstance(number, bool)
    return number if is_whole and -1 <= number < 2**63 else -1


def stream_of(tid: Any) -> int:
    """Stream number of a thread id: 7 for 7, "7" and "stream 7" (old Kineto)."""
    return as_int(tid.removeprefix("stream").strip() if isinstance(tid, str) else tid)


EXACT_BELOW_US = float(2**43)
"""Below this, doubles are at most 2**-10 µs apart, so the nearest double is within 0.49 ns of a µs value with three decimals
and rounds back to it. Kineto's ``baseTimeNanoseconds`` is at most three months ago: 7.9e12 µs < 2**43."""
MISSING_NS = np.iinfo(np.int64).min
"""Marks a time that is not a number or out of range."""
_LIMIT_US = float(LIMIT_NS // 1000)
""":data:`LIMIT_NS` in µs."""
_DECIMALS = 3
"""Decimals of a time in µs that is a whole number of ns."""
_SCALE = 10 ** np.arange(_DECIMALS, -1, -1)
"""Factor from the digits to ns, by the number of decimals among them."""
_WHOLE = msgspec.json.Decoder(list[int])
_DOUBLES = msgspec.json.Decoder(list[float])


class InexactTimesError(ValueError):
    """The times are too large for doubles to represent the nanoseconds, so their text must be decoded instead."""


def from_numbers(values: list[Any], *, rounded: bool = False) -> IntColumn:
    """[values] times in ns from decoded numbers in µs; :data:`MISSING_NS` for a value that is not a number.

    Raises :class:`InexactTimesError` if a double cannot represent the nanoseconds, unless ``rounded``.
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
    """[values] times in ns from their text in µs; :data:`MISSING_NS` for a text that is not a number.

    Decodes the digits without the decimal point as integers. The number of decimals follows from the ratio to the numbers as doubles,
    which are exact to a quarter of a µs.
    """
    text = b"[" + b",".join(values) + b"]"
    try:
        if b"e" in text or b"E" in text:
            raise ValueError
        about_us = np.array(_DOUBLES.decode(text), np.float64)
        digits = np.array(_WHOLE.decode(text.replace(b".", b"")), np.int64)
        if len(digits) != len(values):
            raise ValueError
    except (ValueError, OverflowError):  # there are texts, "null", or leading zeros
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
