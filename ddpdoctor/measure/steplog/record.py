"""The lines of steps.jsonl and samples.jsonl, checked while they are decoded: types, ranges, lengths, finiteness.

Anybody may have written a run directory: a number that no rank can have recorded makes its line a broken one.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MOST_NUMBER = 2**53
"""Of a step, and of anything counted: what a float64 still holds exactly."""
_MOST_NS = 2**62
"""Of epoch times, the year 2116: sums with durations stay in 64 bits."""
_MOST_DURATION_NS = 2**53
"""104 days."""
_MOST_TEXT = 4096
_MOST_ENTRIES = 1 << 16

Number = Annotated[int, Meta(ge=0, le=MOST_NUMBER)]
Epoch = Annotated[int, Meta(ge=0, le=_MOST_NS)]
Offset = Annotated[int, Meta(ge=-_MOST_DURATION_NS, le=_MOST_DURATION_NS)]
Duration = Annotated[int, Meta(ge=0, le=_MOST_DURATION_NS)]
Id = Annotated[int, Meta(ge=-1, le=MOST_NUMBER)]
Text = Annotated[str, Meta(max_length=_MOST_TEXT)]
Offsets = Annotated[list[Offset], Meta(max_length=_MOST_ENTRIES)]
_Sample = Annotated[list[Offset], Meta(min_length=2, max_length=3)]


class Reduction(msgspec.Struct):
    """What one DDP module did in a backward pass; ``base`` is when its forward had ended, ``ready`` counts from it."""

    m: Id
    sync: bool = False
    ready: Offsets = []
    base: Offset | None = None


class Event(msgspec.Struct):
    """Something that happened in a step; ``s`` and ``base`` are epoch ns once the log is read."""

    k: Text
    s: Offset
    d: Duration
    w: Id = -1
    l: Id = -1  # noqa: E741
    n: Id = -1
    e: Id = -1
    q: Id = -1
    end: bool = False
    m: Id = -1
    sync: bool | None = None
    ready: Offsets = []
    base: Offset | None = None
    also: Annotated[list[Reduction], Meta(max_length=_MOST_ENTRIES)] = []
    o: Id = -1
    op: Text = ""
    pg: Text = ""
    b: Annotated[float, Meta(ge=0, le=2.0**62)] | None = None
    is_async: bool = msgspec.field(default=False, name="async")
    src: Id | None = None
    dst: Id | None = None

    def move(self, offset_ns: int) -> None:
        """Shift all times."""
        self.s += offset_ns
        if self.base is not None:
            self.base += offset_ns
        for reduction in self.also:
            if reduction.base is not None:
                reduction.base += offset_ns

    @property
    def reductions(self) -> list[Reduction]:
        """The DDP modules whose gradients were reduced in this backward pass."""
        own = Reduction(self.m, bool(self.sync), self.ready, self.base)
        return [each for each in [own, *self.also] if each.sync and each.m >= 0]

    @property
    def stop(self) -> int:
        """End, in the unit and origin of ``s``."""
        return self.s + self.d


class Line(msgspec.Struct):
    """Any line of steps.jsonl or samples.jsonl."""

    step: Number | None = None
    t: Annotated[list[Epoch], Meta(max_length=2)] | Epoch | None = None
    ev: Annotated[list[Event], Meta(max_length=_MOST_ENTRIES)] = []
    marks: Annotated[list[Text], Meta(max_length=64)] = []
    runq: Duration | None = None
    cpu: Duration | None = None
    where: Id | None = None
    file: Text = ""
    line: Id | None = 0
    function: Text = ""
    note: Text | None = None
    s: Annotated[list[_Sample], Meta(max_length=_MOST_ENTRIES)] = []
    device: Number | None = None
    at: Duration = 0
    times: Annotated[list[tuple[Text, Offset]], Meta(max_length=_MOST_ENTRIES)] = []
