"""Names that somebody may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MIN_SIMILARITY = 0.6
"""Of difflib's ratio: its own default, at which ``num_wokers`` finds ``num_workers``."""
_MAX_NAMES = 3


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question to append to a refusal, with those of ``known`` that are like ``name``; "" where none is."""
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, _MAX_NAMES, _MIN_SIMILARITY)
    # Of a dotted name the last part alone, under another heading.
    end = name.rpartition(".")[2]
    near = near or [each for each in names if "." in each and each.rpartition(".")[2] == end][:_MAX_NAMES]
    if not near:
        return ""
    *first, last = near
    return f" Did you mean {', '.join(first)} or {last}?" if first else f" Did you mean {last}?"
