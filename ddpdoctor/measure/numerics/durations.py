"""Durations as text."""

from __future__ import annotations

_UNITS_NS = {"h": 3.6e12, "min": 6e10}
"""Units longer than a second, the longest first."""
_FROM = 1.5
"""Multiple of a unit from which on it is used: "80 min" rather than "1.3 h"."""


def format_duration(ns: float) -> str:
    """A duration for a sentence: "1.5 s", "58 min", "3.2 h"."""
    unit, size_ns = next(((u, s) for u, s in _UNITS_NS.items() if ns >= _FROM * s), ("s", 1e9))
    return f"{float(f'{ns / size_ns:.2g}'):g} {unit}"
