"""Axes: round tick values, positions, and thinning of long series."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence

import msgspec

Numbers = Sequence[float | None]


class Tick(msgspec.Struct, frozen=True):
    """A mark on an axis: where (per cent along a width, pixels along a height) and what it says."""

    at: float
    label: str


def nice_ticks(top: float, wanted: int = 4, unit: float = 1.0) -> list[float]:
    """Round values from 0 to at most ``top``: about ``wanted`` steps of 1, 2 or 5 times a power of ten
    ``unit``s.
    """
    if not math.isfinite(top) or top <= 0:
        return [0.0]
    step = _round_step(top / unit / wanted) * unit
    return [step * index for index in range(math.floor(top / step * 1.0001) + 1)]


def _round_step(raw: float) -> float:
    """1, 2 or 5 times a power of ten, about ``raw`` or the next above."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)


def percent_of(value: float, whole: float) -> float:
    """Position of ``value`` on a width of ``whole``, in per cent, short enough for a small file."""
    return round(100 * value / whole, 2) if whole > 0 else 0.0


def index_ticks(numbers: Sequence[float], wanted: int = 5) -> list[Tick]:
    """Ticks at round values for evenly spaced points whose own, increasing numbers are ``numbers``."""
    if not numbers:
        return []
    first, last = numbers[0], numbers[-1]
    width = max(len(numbers) - 1, 1)
    marks = [first + value for value in nice_ticks(last - first, wanted)]
    if first != 0 and last > 0:
        step = marks[1] - marks[0] if len(marks) > 1 else 1.0
        # Counted from the first one: numbers that a file gives may be far from 0.
        step, least = _round_step(last / max(1, round(last / step))), first + step / 2
        places = range(math.floor(least / step), math.floor(last / step) + 1)
        marks = [first] + [step * place for place in places if least < step * place <= last]
    if all(isinstance(number, int) for number in numbers):
        marks = [mark for mark in marks if mark == round(mark)]
    ticks = []
    for mark in marks:
        after = min(bisect.bisect_left(numbers, mark), len(numbers) - 1)
        before = max(after - 1, 0)
        gap = numbers[after] - numbers[before]
        index = after - ((numbers[after] - mark) / gap if gap > 0 else 0)
        ticks.append(Tick(percent_of(index, width), f"{mark:,.10g}"))
    return ticks


def recorded(values: Numbers) -> list[float]:
    """The finite numbers among ``values``."""
    return [value for value in values if value is not None and math.isfinite(value)]


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
    found = (recorded(values[group]) for group in groups(len(values), most))
    return [by(numbers) if numbers else None for numbers in found]


def mean(values: list[float]) -> float:
    """Arithmetic mean of a non-empty list."""
    return sum(values) / len(values)


def padded(values: Numbers, length: int) -> list[float | None]:
    """``values`` cut or filled with "not recorded" to ``length``, with everything that is no number taken
    out.
    """
    clean = [value if value is not None and math.isfinite(value) else None for value in values[:length]]
    return clean + [None] * (length - len(clean))
