"""Metadata of communication events, as Kineto writes it on NCCL kernels and on ``record_param_comms``."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.trace.columns import Collectives

from .events import Arguments
from .numbers import as_int

_TEXT = ("operation", "group", "dtype")
_NUMBERS = ("group_size", "sequence", "in_elements", "out_elements")
_NARROW = frozenset({"event", "group_size", *_TEXT})
_COLUMNS = ("event", *_TEXT, *_NUMBERS)
_WHOLE = re.compile(r"\s*-?[0-9]{1,19}\s*")


class CollectiveRows:
    """Collects the communication events of a trace; there are few, so plain lists will do."""

    def __init__(self) -> None:
        self._rows: dict[str, list[int]] = {column: [] for column in _COLUMNS}

    def add(self, args: list[Arguments], first_row: int, names: dict[Any, int]) -> None:
        """Appends those of ``args`` that describe a communication; ``args[0]`` belongs to row ``first_row``."""
        for i, a in enumerate(args):
            if a.operation is None:
                continue
            self._rows["event"].append(first_row + i)
            for column in _TEXT:
                value = getattr(a, column)
                named = isinstance(value, (str, int, float))
                self._rows[column].append(names[str(value)] if named else -1)
            for column in _NUMBERS:
                self._rows[column].append(_number(getattr(a, column)))

    def only(self, kept: NDArray[np.bool_]) -> None:
        """Keeps the rows of those events that are ``kept``, numbered as if the others had never been."""
        position = np.cumsum(kept) - 1
        chosen = [i for i, event in enumerate(self._rows["event"]) if kept[event]]
        self._rows = {column: [values[i] for i in chosen] for column, values in self._rows.items()}
        self._rows["event"] = [int(position[event]) for event in self._rows["event"]]

    def finish(self, order: NDArray[np.int64]) -> Collectives:
        """The columns, with events numbered as in the sorted trace and in that order."""
        position = np.empty(order.size, dtype=np.int64)
        position[order] = np.arange(order.size)
        event = position[np.array(self._rows["event"], dtype=np.int64)]
        by_event = np.argsort(event, kind="stable")
        columns: dict[str, Any] = {"event": event[by_event].astype(np.int32)}
        for column in _COLUMNS[1:]:
            kind = np.int32 if column in _NARROW else np.int64
            values = np.array(self._rows[column], dtype=np.int64)[by_event]
            columns[column] = np.where(values > np.iinfo(kind).max, -1, values).astype(kind)
        return Collectives(**columns)


def _number(value: Any) -> int:
    """A whole number, decimal where it is written as text; -1 where it is none."""
    if isinstance(value, str):
        return as_int(int(value)) if _WHOLE.fullmatch(value) else -1
    return as_int(value)
