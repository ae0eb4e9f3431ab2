"""NVTX ranges of one process: operators and annotations as rows, and what NCCL says of its calls."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from ddpdoctor.trace.columns import IntColumn

from .build import Rows, Table
from .database import MISSING, Batch, Database
from .payloads import Fields, Payloads
from .tables import NVTX
from .texts import ANNOTATION, LIBRARY, Range, read_text

_REMEMBERED = 1 << 16
"""Texts whose meaning is kept; those of operators have a number each."""


class Marks(msgspec.Struct):
    """Ranges that tell more than their time; times as in the file."""

    names: list[str] = msgspec.field(default_factory=list)
    start: list[int] = msgspec.field(default_factory=list)
    end: list[int] = msgspec.field(default_factory=list)
    thread: list[int] = msgspec.field(default_factory=list)
    payload: list[Fields] = msgspec.field(default_factory=list)
    """What the range carries, by its name; {} without."""

    def add(self, name: str, start: int, end: int, thread: int, payload: Fields) -> None:
        """Appends one."""
        self.names.append(name)
        self.start.append(start)
        self.end.append(end)
        self.thread.append(thread)
        self.payload.append(payload)


class Ranges(msgspec.Struct, frozen=True):
    """What the ranges of a process told besides their rows."""

    annotations: Marks
    calls: Marks
    """Of NCCL."""

    @classmethod
    def none(cls) -> Ranges:
        """To be filled."""
        return cls(Marks(), Marks())


def read_ranges(database: Database, where: str, values: tuple[int, ...], table: Table, found: Ranges) -> None:
    """Appends the process's ranges to ``table`` and, of some, what they tell besides to ``found``. Ranges that were still open when the
    recording ended have no length and are left out. Raises :class:`DamagedError`."""
    payloads = Payloads(database)
    known: dict[str, Range] = {}
    registered: dict[int, str] = {}
    own = f'({where}) AND e."end" >= e.start' if where else 'e."end" >= e.start'
    for batch in database.batches(
        NVTX, ("start", "end", "globalTid", "textId"), ("text",), ("binaryData",), own, values
    ):
        texts = list(_texts(database, batch, registered))
        told = [_range(text, known) for text in texts]
        table.add(_rows(batch, told))
        threads, starts, ends = (batch[name].tolist() for name in ("globalTid", "start", "end"))
        for i, one in enumerate(told):
            if one.category == ANNOTATION:
                found.annotations.add(one.name, starts[i], ends[i], threads[i], {})
            elif one.category == LIBRARY and one.name.startswith("nccl"):
                found.calls.add(one.name, starts[i], ends[i], threads[i], payloads.of(batch["binaryData"][i]))


def _range(text: str, known: dict[str, Range]) -> Range:
    """What ``text`` says; texts repeat where operators are not numbered."""
    one = known.get(text)
    if one is None:
        one = read_text(text)
        if len(known) < _REMEMBERED:
            known[text] = one
    return one


def _texts(database: Database, batch: Batch, registered: dict[int, str]) -> Iterator[str]:
    """The text of each range: its own, else the registered one that it refers to."""
    wanted = [
        number
        for number, text in zip(batch["textId"].tolist(), batch["text"], strict=True)
        if text is None and number != MISSING
    ]
    registered.update(database.strings([number for number in set(wanted) if number not in registered]))
    for number, text in zip(batch["textId"].tolist(), batch["text"], strict=True):
        yield text if text is not None else registered.get(number, "")


def _rows(batch: Batch, told: list[Range]) -> Rows:
    start: IntColumn = batch["start"]
    return Rows(
        category=[one.category for one in told],
        name=[one.name for one in told],
        start=start,
        duration=np.where((start != MISSING) & (batch["end"] != MISSING), batch["end"] - start, 0),
        thread=batch["globalTid"],
        shapes=[one.shapes for one in told],
    )
