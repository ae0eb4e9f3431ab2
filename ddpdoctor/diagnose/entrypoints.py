"""Which installed packages bring rules: entry points of the group ``ddpdoctor.rules``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from typing import Any

GROUP = "ddpdoctor.rules"
"""Entry point group: each value is a path, or a function that returns one, of a folder of rules."""
_EGG = ".egg"
_METADATA = (".dist-info", ".egg-info", _EGG)


def rule_packages() -> list[Any]:
    """The entry points of the group.

    Hardly any environment has one, and :mod:`importlib.metadata` costs more than reading all rules: it is asked only
    where the group's name stands in some package's metadata, or where packages may lie elsewhere than in folders.
    """
    if not _may_be_there():
        return []
    import importlib.metadata

    return list(importlib.metadata.entry_points(group=GROUP))


def _may_be_there() -> bool:
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_distributions")]
    if finders != [PathFinder]:
        return True
    try:
        return any(
            GROUP.encode() in text for folder in set(sys.path) for text in _declarations(folder or ".")
        )
    except OSError:
        return True


def _declarations(folder: str) -> Iterator[bytes]:
    """Content of each ``entry_points.txt`` of the packages in ``folder``. OSError where it is no folder."""
    if not os.path.lexists(folder):
        return
    with os.scandir(folder) as entries:
        places = [entry.path for entry in entries if entry.name.lower().endswith(_METADATA)]
    if folder.lower().endswith(_EGG):
        places.append(folder)
    for place in places:
        inside = "EGG-INFO" if place.lower().endswith(_EGG) else ""
        try:
            with open(os.path.join(place, inside, "entry_points.txt"), "rb") as file:  # noqa: PTH118, PTH123
                yield file.read()
        except (FileNotFoundError, NotADirectoryError):
            continue
