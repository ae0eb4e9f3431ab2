"""The job's DataLoaders, by number, and whose iterator is whose."""

from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple

from .built import line_of
from .numbered import MOST_LISTED, Numbered
from .source_lines import Lines
from .torch_objects import describe_loader


class Loaders:
    """The DataLoaders of this process, numbered in the order in which they are first iterated."""

    def __init__(self) -> None:
        self.known: Numbered[int] = Numbered()
        """Each with its number; the source line is the one that built it, or else first iterated it."""
        self._iterators: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
        self._last: Tuple[Callable[[], Any], int] = (lambda: None, -1)
        """The iterator asked for last (weakly), and its loader's number."""
        self.described: List[Dict[str, Any]] = []
        """By number, the first ones, for rank.json: made at the first iteration, for the job may keep the iterator only."""

    def number(self, loader: Any, where: Optional[int], lines: Lines) -> int:
        """The loader's number."""
        number = self.known.find(loader)
        if number is None:
            number = self.known.count
            built = line_of(loader, lines)
            line = where if built is None else built
            self.known.add(loader, line, number)
            if number < MOST_LISTED:
                self.described.append({"id": number, "where": line, **_description(loader)})
        return number

    def iterated(self, iterator: Any, number: int) -> None:
        """This iterator belongs to that loader."""
        self._iterators[iterator] = number

    def iterators(self) -> List[Tuple[Any, int]]:
        """Those alive, each with its loader's number; for threads other than the training thread, too."""
        return list(self._iterators.items())

    def of_iterator(self, iterator: Any) -> int:
        """The number of an iterator's loader, -1 where unknown."""
        if self._last[0]() is not iterator:
            self._last = weakref.ref(iterator), self._iterators.get(iterator, -1)
        return self._last[1]


def _description(loader: Any) -> Dict[str, Any]:
    try:
        return describe_loader(loader)
    except Exception:
        return {}  # told when the settings are written, if the loader is still there
