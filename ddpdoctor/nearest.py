"""Suggestions for misspelled names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MIN_SIMILARITY = 0.6
"""Minimum ratio of difflib, its default."""
_MAX_NAMES = 3


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ " Did you mean ...?" with the names in ``known`` similar to ``name``, to append to an error message; "" if there are none."""
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, _MAX_NAMES, _MIN_SIMILARITY)
    # Else dotted names with the same last part.
    end = name.rpartition(".")[2]
    near = near or [each for each in names if "." in each and each.rpartition(".")[2] == end][:_MAX_NAMES]
    if not near:
        return ""
    *first, last = near
    return f" Did you mean {', '.join(first)} or {last}?" if first else f" Did you mean {last}?"
