"""Microseconds as the file has them → nanoseconds, exact."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np

from ddpdoctor.trace.columns import LIMIT_NS, IntColumn

EXACT_BELOW_US = float(2**43)
"""Below this a double's spacing is ≤ 2**-10 µs, so the nearest double lies within 0.49 ns of a µs value with three decimals
and rounds back to it. Kineto's ``baseTimeNanoseconds`` is at most three months back: 7.9e12 µs < 2**43."""
MISSING_NS = np.iinfo(np.int64).min
"""Stands where a time is no number, or none that can be."""
_LIMIT_US = float(LIMIT_NS // 1000)
"""The same limit in the unit of the file."""
_SHORT_DIGITS = 18
"""Digits of a whole number that fits 64 bits whatever they are."""


class InexactTimesError(ValueError):
    """These numbers have lost their nanoseconds as doubles: decode the text instead."""


def from_numbers(values: list[Any]) -> IntColumn:
    """Times in ns from decoded numbers in µs; :data:`MISSING_NS` where a value is no number.

    Raises :class:`InexactTimesError` where a double cannot carry the nanoseconds.
    """
    try:
        array = np.fromiter(values, np.float64, len(values))
    except (TypeError, ValueError, OverflowError):
        array = np.array([_number(v) for v in values], dtype=np.float64)
    bad = ~(np.abs(array) < _LIMIT_US)
    if bad.any():
        array = np.where(bad, 0.0, array)
    if array.size and np.abs(array).max() >= EXACT_BELOW_US and set(map(type, values)) != {int}:
        raise InexactTimesError
    whole = np.floor(array)
    result: IntColumn = whole.astype(np.int64) * 1000 + np.rint((array - whole) * 1000).astype(np.int64)
    if bad.any():
        result[bad] = MISSING_NS
    return result


def from_text(values: list[bytes]) -> IntColumn:
    """Times in ns from the digits of the file, in µs; :data:`MISSING_NS` where the text is no number."""
    return np.fromiter(map(_text_ns, values), np.int64, len(values))


def _number(value: Any) -> float:
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            return float("nan")
    return float("nan")


def _text_ns(text: bytes) -> int:
    whole, _, fraction = text.partition(b".")
    if (
        whole.isdigit()
        and len(whole) <= _SHORT_DIGITS - 3
        and (len(fraction) <= 3 and (not fraction or fraction.isdigit()))
    ):
        return int(whole) * 1000 + (int((fraction + b"000")[:3]) if fraction else 0)
    try:
        exact = (Decimal(text.decode("ascii", "replace").strip('"')) * 1000).to_integral_value()
        return int(exact) if abs(exact) < LIMIT_NS else MISSING_NS
    except (ArithmeticError, ValueError):
        return MISSING_NS
