"""Interning of texts, and numbering of lanes: the threads and streams of a trace's events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from ddpdoctor.trace.columns import IdColumn

from .stream import Event


class Interner(defaultdict[Any, int]):
    """Gives each new key the next number; a lookup runs in C."""

    def __init__(self) -> None:
        super().__init__()
        self.default_factory = self.__len__

    def ids(self, keys: list[Any]) -> IdColumn:
        """[keys] the number of each key. Raises TypeError if one is a list or a dict."""
        return np.fromiter(map(self.__getitem__, keys), np.int32, len(keys))


_MAX_TEXT = 1 << 10
"""Longest process or thread id that is kept, in characters."""
_ASCEND = "Ascend Hardware"
MAX_LANES = 100_000
"""Limit of threads and streams; a job that starts a thread in every step has some thousands."""


class LaneTable:
    """Numbers the pairs (pid, tid) in order of appearance."""

    def __init__(self) -> None:
        self._lanes = Interner()
        self.is_ascend = False
        """Whether a process has the name that torch_npu's profiler gives the NPU."""

    def ids(self, pairs: list[tuple[Any, Any]]) -> IdColumn:
        """[events] provisional lane ids, which index the table that :meth:`finish` returns."""
        try:
            return self._lanes.ids(pairs)
        except TypeError:  # a pid or tid that is a list or an object
            return self._lanes.ids([(_text(pid), _text(tid)) for pid, tid in pairs])

    def __len__(self) -> int:
        return len(self._lanes)

    def read_metadata(self, metadata: Iterable[Event]) -> None:
        """Reads process names from metadata events ("ph": "M")."""
        self.is_ascend = self.is_ascend or any(
            event.name == "process_name" and event.args is not None and event.args.name == _ASCEND
            for event in metadata
        )

    def finish(self) -> IdColumn:
        """[provisional ids] final lane of each; the ids 7 and "7" are the same thread."""
        index: dict[tuple[str, str], int] = {}
        table = [index.setdefault((_text(p), _text(t)), len(index)) for p, t in self._lanes]
        return np.array(table, dtype=np.int32)


def _text(value: Any) -> str:
    """A number or text as text; "" for other types."""
    return str(value)[:_MAX_TEXT] if isinstance(value, (str, int, float)) else ""
