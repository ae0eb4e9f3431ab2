"""Lengths of time in words."""

from __future__ import annotations


def lasting(ns: float) -> str:
    """A time for a sentence: "1.5 s", "58 min", "3.2 h"."""
    unit, size = next(((u, s) for u, s in (("h", 3.6e12), ("min", 6e10)) if ns >= 1.5 * s), ("s", 1e9))
    return f"{float(f'{ns / size:.2g}'):g} {unit}"
