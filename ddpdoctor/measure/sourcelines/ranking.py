"""The user's source lines, ranked."""

from __future__ import annotations

from collections.abc import Mapping

from ddpdoctor.measure.facts import Where

Frame = tuple[str, int, str]
"""File, line and function."""
_MOST = 3


def ranked(found: Mapping[Frame, float]) -> list[Where]:
    """The lines of most weight, most first, each with its share of all."""
    total = sum(found.values())
    most = sorted(found.items(), key=lambda item: -item[1])[:_MOST]
    return [
        Where(file, line, function, share=count / total if total else None)
        for (file, line, function), count in most
    ]
