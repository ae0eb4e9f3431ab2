"""Axes: round tick values, positions, and thinning of long series."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence

import msgspec

Numbers = Sequence[float | None]


LEAST = 1e-200
"""Below, powers of ten lose their digits and divisions have no end; nothing that is measured is as small, and charts draw it as 0."""


class Tick(msgspec.Struct, frozen=True):
    """A mark on an axis: where (per cent along a width, pixels along a height) and what it says."""

    at: float
    label: str


def nice_ticks(top: float, wanted: int = 4, unit: float = 1.0) -> list[float]:
    """Round values from 0 to at most ``top``: about ``wanted`` steps of 1, 2 or 5 times a power of ten
    ``unit``s.
    """
    if not math.isfinite(top) or top < LEAST:
        return [0.0]
    step = unit * _nice(top / unit / wanted)
    return [step * index for index in range(math.floor(top / step * 1.0001) + 1)]


def _nice(raw: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that is at least ``raw``, but for rounding."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)


def percent_of(value: float, whole: float) -> float:
    """Position of ``value`` on a width of ``whole``, in per cent, short enough for a small file."""
    return round(100 * value / whole, 2) if whole >= LEAST else 0.0


def index_ticks(numbers: Sequence[float], wanted: int = 5) -> list[Tick]:
    """Ticks at round values for evenly spaced points whose own, increasing numbers are ``numbers``."""
    if not numbers:
        return []
    first, last = numbers[0], numbers[-1]
    width = max(len(numbers) - 1, 1)
    steps = nice_ticks(last - first, wanted)
    marks = [first + value for value in steps]
    if first != 0 and len(steps) > 1:
        step = _nice(last / max(1, round(last / steps[1]))) if last > 0 else steps[1]
        # From the first on, not from 0: the numbers may begin anywhere, at 10^12 as well.
        before = math.floor((first + steps[1] / 2) / step)
        multiples = (step * (before + index) for index in range(1, len(steps) + 2))
        marks = [first, *(value for value in multiples if first + steps[1] / 2 < value <= last)]
    if all(isinstance(number, int) for number in numbers):
        marks = [mark for mark in marks if mark == round(mark)]
    ticks = []
    for mark in marks:
        after = min(bisect.bisect_left(numbers, mark), len(numbers) - 1)
        before = max(after - 1, 0)
        gap = numbers[after] - numbers[before]
        index = after - ((numbers[after] - mark) / gap if gap > 0 else 0)
        label = f"{mark:,.0f}" if mark == round(mark) else f"{mark:,.10g}"
        ticks.append(Tick(percent_of(index, width), label))
    return ticks


def finite_or_none(value: float | None) -> float | None:
    """``value`` as a chart draws it: None where it is no number, 0 where it is as good as that."""
    if value is None or not math.isfinite(value):
        return None
    return value if abs(value) >= LEAST else 0.0


def finite_values(values: Numbers) -> list[float]:
    """The finite numbers among ``values``."""
    return [number for value in values if (number := finite_or_none(value)) is not None]


def quantile(values: Sequence[float], share: float) -> float:
    """The nearest-rank quantile of a non-empty sequence."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def groups(length: int, most: int) -> Iterator[slice]:
    """Cut ``length`` neighbours into at most ``most`` groups of equal size (the last may be smaller)."""
    size = max(1, math.ceil(length / most)) if most > 0 else 1
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def thin(values: Numbers, most: int, by: Callable[[list[float]], float]) -> list[float | None]:
    """At most ``most`` points, each ``by`` of its group; a group without a number stays without one."""
    found = (finite_values(values[group]) for group in groups(len(values), most))
    return [by(numbers) if numbers else None for numbers in found]


def mean(values: list[float]) -> float:
    """Arithmetic mean of a non-empty list."""
    return sum(values) / len(values)


def padded(values: Numbers, length: int) -> list[float | None]:
    """``values`` cut or filled with "not recorded" to ``length``, with everything that is no number taken
    out.
    """
    clean = [finite_or_none(value) for value in values[:length]]
    return clean + [None] * (length - len(clean))
