"""Arithmetic of axes: round tick values, positions, and thinning of long series."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence

import msgspec

Numbers = Sequence[float | None]


NEGLIGIBLE = 1e-200
"""Smaller absolute values are drawn as 0. No measured value is that small, and computing with it could overflow."""
_INDEX_TICKS = 5
"""Approximate number of ticks on an axis of step numbers."""


class Tick(msgspec.Struct, frozen=True):
    """A tick of an axis: position (per cent horizontally, pixels vertically) and label."""

    at: float
    label: str


def nice_ticks(top: float, wanted: int = 4, unit: float = 1.0) -> list[float]:
    """Round values from 0 to at most ``top`` in about ``wanted`` steps: 0, 20, 40 for 51.2. A step is 1, 2 or 5 times a power of ten,
    times ``unit``."""
    if not math.isfinite(top) or top < NEGLIGIBLE:
        return [0.0]
    step = unit * _nice(top / unit / wanted)
    return [step * index for index in range(math.floor(top / step * 1.0001) + 1)]


def _nice(raw: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least ``raw``, within 0.1 %."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)


def percent_of(value: float, whole: float) -> float:
    """``value`` in per cent of ``whole``, with two decimals."""
    return round(100 * value / whole, 2) if whole >= NEGLIGIBLE else 0.0


def index_ticks(numbers: Sequence[float]) -> list[Tick]:
    """Ticks at round values for evenly spaced points with the increasing numbers ``numbers``; positions in per cent."""
    if not numbers:
        return []
    marks = _tick_values(numbers[0], numbers[-1], _INDEX_TICKS)
    width = max(len(numbers) - 1, 1)
    if all(isinstance(number, int) for number in numbers):
        marks = [mark for mark in marks if mark == round(mark)]
    ticks = []
    for mark in marks:
        label = f"{mark:,.0f}" if mark == round(mark) else f"{mark:,.10g}"
        ticks.append(Tick(percent_of(index_of(numbers, mark), width), label))
    return ticks


def index_of(numbers: Sequence[float], value: float) -> float:
    """Interpolated index of ``value`` in the increasing ``numbers``: 1.5 is half-way between the second and the third."""
    after = min(bisect.bisect_left(numbers, value), len(numbers) - 1)
    before = max(after - 1, 0)
    gap = numbers[after] - numbers[before]
    return after - ((numbers[after] - value) / gap if gap > 0 else 0)


def _tick_values(first: float, last: float, wanted: int) -> list[float]:
    """``first`` and round values up to ``last``: 0, 20, ..., 100 for 0 to 100; 10, 50, 100 for 10 to 127."""
    from_zero = nice_ticks(last - first, wanted)
    if first == 0 or len(from_zero) == 1:
        return [first + value for value in from_zero]
    gap = from_zero[1]
    step = _nice(last / max(1, round(last / gap))) if last > 0 else gap
    # Only multiples after the first number are computed, because it may be as large as 10^12.
    before = math.floor((first + gap / 2) / step)
    multiples = (step * (before + index) for index in range(1, len(from_zero) + 2))
    return [first, *(value for value in multiples if first + gap / 2 < value <= last)]


def finite_or_none(value: float | None) -> float | None:
    """``value`` as drawn in charts: None if it is not finite, 0 if its absolute value is below :data:`NEGLIGIBLE`."""
    if value is None or not math.isfinite(value):
        return None
    return value if abs(value) >= NEGLIGIBLE else 0.0


def finite_values(values: Numbers) -> list[float]:
    """The finite numbers among ``values``."""
    return [number for value in values if (number := finite_or_none(value)) is not None]


def quantile(values: Sequence[float], share: float) -> float:
    """Nearest-rank quantile of a non-empty sequence."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def groups(length: int, max_groups: int) -> Iterator[slice]:
    """Slices that divide ``length`` items into at most ``max_groups`` groups of equal size; the last may be smaller."""
    size = max(1, math.ceil(length / max_groups))
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def thin(values: Numbers, max_points: int, reduce: Callable[[list[float]], float]) -> list[float | None]:
    """``values`` reduced to at most ``max_points`` points: ``reduce`` of each group, None for a group without finite numbers."""
    found = (finite_values(values[group]) for group in groups(len(values), max_points))
    return [reduce(numbers) if numbers else None for numbers in found]


def mean(values: list[float]) -> float:
    """Arithmetic mean of a non-empty list."""
    return sum(values) / len(values)


def padded(values: Numbers, length: int) -> list[float | None]:
    """``values`` truncated or filled with None to ``length``. Values that are not finite become None."""
    clean = [finite_or_none(value) for value in values[:length]]
    return clean + [None] * (length - len(clean))
