"""Where two answers differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

RELATIVE, ABSOLUTE = 1e-6, 1e-12
"""Floats this near are the same: a sum in another order rounds otherwise. All else is compared exactly."""
NOTHING = "(nothing)"
LONGEST = 160


@dataclass(frozen=True)
class Difference:
    """One place of a document. ``path`` is such as ``findings[0].where[1].line``; empty: the whole."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.path or 'all of it'}: {_shown(self.old)} → {_shown(self.new)}"


def differences(old: Any, new: Any, path: str = "") -> Iterator[Difference]:
    """All places where ``new`` is not what ``old`` was; :data:`NOTHING` stands for what only one of them has."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            inner = f"{path}.{key}" if path else key
            yield from differences(old.get(key, NOTHING), new.get(key, NOTHING), inner)
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield Difference(f"{path}.length", len(old), len(new))
        for number in range(max(len(old), len(new))):
            pair = [side[number] if number < len(side) else NOTHING for side in (old, new)]
            yield from differences(*pair, f"{path}[{number}]")
    elif not _same(old, new):
        yield Difference(path, old, new)


def _same(old: Any, new: Any) -> bool:
    if type(old) is float and type(new) is float:
        return math.isclose(old, new, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return type(old) is type(new) and old == new


def _shown(value: Any) -> str:
    text = value if value is NOTHING else repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
