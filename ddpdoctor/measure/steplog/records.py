"""The lines of steps.jsonl, samples.jsonl and workers.jsonl, checked while they are decoded: types, ranges, lengths, finiteness.

A run directory is untrusted input: a line with a number that no rank can have recorded is a broken line. Also defines :class:`Step`, as
recorded or moved to another clock.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ddpdoctor.measure.places import Where
from ddpdoctor.rundir import EventField, EventKind, LineField, WorkerField, renamed

MOST_NUMBER = 2**53
"""Of a step, and of any count: the largest that a float64 represents exactly."""
_MOST_NS = 2**62
"""Of epoch times, the year 2116: sums with durations stay in 64 bits."""
_MOST_DURATION_NS = 2**53
"""104 days."""
_MOST_TEXT = 4096
"""Characters of a name or a path: Linux takes no longer one."""
MOST_CALLERS = 32
"""Most callers of a line that are read: the hook records fewer."""
_MOST_ENTRIES = 1 << 16
"""Of a list in one line; the hook keeps far fewer events of a step."""

_ALWAYS_RECORDED = (EventKind.SAVE, EventKind.LOAD, EventKind.MORE)
"""Kinds of events that are recorded in all steps, and the count of those beyond the most of a step."""

Number = Annotated[int, Meta(ge=0, le=MOST_NUMBER)]
Epoch = Annotated[int, Meta(ge=0, le=_MOST_NS)]
Offset = Annotated[int, Meta(ge=-_MOST_DURATION_NS, le=_MOST_DURATION_NS)]
Duration = Annotated[int, Meta(ge=0, le=_MOST_DURATION_NS)]
Id = Annotated[int, Meta(ge=-1, le=MOST_NUMBER)]
Text = Annotated[str, Meta(max_length=_MOST_TEXT)]
Offsets = Annotated[tuple[Offset, ...], Meta(max_length=_MOST_ENTRIES)]
_Line = tuple[Text, int | None, Text]
_Sample = Annotated[list[Offset], Meta(min_length=2, max_length=3)]


class Reduction(msgspec.Struct, frozen=True, gc=False, rename=renamed(EventField)):
    """What one DDP module did in a backward pass; ``ready_ns`` counts from when its forward had ended."""

    module: Id
    synced: bool = False
    ready_ns: Offsets = ()
    forward_end_ns: Offset | None = None

    @property
    def counts(self) -> bool:
        """Whether gradients of a known module were reduced."""
        return self.synced and self.module >= 0


class Event(msgspec.Struct, frozen=True, gc=False, rename=renamed(EventField)):
    """Something that happened in a step, see :class:`ddpdoctor.rundir.EventKind` and ``EventField``.

    Its times are ns after the start of its step, as on disk, so that they stay valid where a step is moved to another clock
    (:meth:`.Step.start_of`). A missing number is -1.
    """

    kind: Text
    start_ns: Offset
    duration_ns: Duration
    where: Id = -1
    loader: Id = -1
    count: Id = -1
    elements: Id = -1
    batches_ready: Id = -1
    asleep_ns: Id = -1
    exhausted: bool = False
    module: Id = -1
    synced: bool | None = None
    ready_ns: Offsets = ()
    forward_end_ns: Offset | None = None
    also: Annotated[tuple[Reduction, ...], Meta(max_length=_MOST_ENTRIES)] = ()
    optimizer: Id = -1
    operation: Text = ""
    group: Text = ""
    message_bytes: Annotated[float, Meta(ge=0, le=2.0**62)] | None = None
    is_async: bool = False
    source: Id | None = None
    destination: Id | None = None

    def later(self, by_ns: int) -> Event:
        """The same event of a step that begins so much later."""
        return msgspec.structs.replace(
            self,
            start_ns=self.start_ns - by_ns,
            forward_end_ns=_minus(self.forward_end_ns, by_ns),
            also=tuple(
                msgspec.structs.replace(each, forward_end_ns=_minus(each.forward_end_ns, by_ns))
                for each in self.also
            ),
        )

    @property
    def end_ns(self) -> int:
        """Its end, ns after the start of its step."""
        return self.start_ns + self.duration_ns

    @property
    def gives_batch(self) -> bool:
        """Whether a loader gave a batch, and was not at its end."""
        return self.kind == EventKind.DATA and not self.exhausted

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        """The DDP modules whose gradients were reduced in this backward pass."""
        own: tuple[Reduction, ...] = ()
        if self.synced and self.module >= 0:
            own = (Reduction(self.module, True, self.ready_ns, self.forward_end_ns),)
        return (*own, *(each for each in self.also if each.counts)) if self.also else own

    @property
    def gradients_ready_ns(self) -> int:
        """When the last gradient of this backward pass was ready by the reducer's times, but no later than the end of the pass; ns
        after the start of its step."""
        ready = [
            (each.forward_end_ns if each.forward_end_ns is not None else self.start_ns) + max(each.ready_ns)
            for each in self.reductions
            if each.ready_ns
        ]
        return min(max(ready, default=self.end_ns), self.end_ns)


def _minus(value: int | None, by: int) -> int | None:
    return None if value is None else value - by


class LogRecord(msgspec.Struct, rename=renamed(LineField)):
    """A line of steps.jsonl or samples.jsonl of any kind, see :class:`ddpdoctor.rundir.LineField`."""

    step: Number | None = None
    time_ns: Annotated[list[Epoch], Meta(max_length=2)] | Epoch | None = None
    events: Annotated[tuple[Event, ...], Meta(max_length=_MOST_ENTRIES)] = ()
    marks: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()
    run_delay_ns: Duration | None = None
    cpu_ns: Duration | None = None
    where: Id | None = None
    file: Text = ""
    line: Id | None = 0
    function: Text = ""
    caller: Id | None = None
    end: bool = False
    through: Annotated[tuple[_Line, ...], Meta(max_length=64)] = ()
    note: Text | None = None
    samples: Annotated[list[_Sample], Meta(max_length=_MOST_ENTRIES)] = []
    held: Annotated[tuple[Duration, ...], Meta(max_length=_MOST_ENTRIES)] = ()
    closer: Annotated[list[_Sample], Meta(max_length=_MOST_ENTRIES)] = []
    looked_ns: Duration = 0
    evaluated: Number | None = None
    saved: Number | None = None
    device: Number | None = None
    device_start_ns: Duration = 0
    device_times_ns: Annotated[tuple[tuple[Text, Offset], ...], Meta(max_length=_MOST_ENTRIES)] = ()


EVALUATED = "evaluated"
"""Mark that the reader adds to a step: all models of the job were in evaluation mode."""


class Step(msgspec.Struct, frozen=True, gc=False):
    """One step of one rank. Its own times are epoch ns, those of its events ns after its start."""

    number: int
    start_ns: int
    end_ns: int
    events: tuple[Event, ...]
    marks: tuple[str, ...]
    run_delay_ns: int | None
    cpu_ns: int | None
    moved_ns: int = 0
    """How far it was moved from the host's wall clock, see :mod:`ddpdoctor.measure.align`."""

    @property
    def length_ns(self) -> int:
        """From its start to its end."""
        return self.end_ns - self.start_ns

    @property
    def in_full(self) -> bool:
        """Whether all its events were recorded. Of most steps of a long job only the times and checkpoints are kept, which do not show
        whether or how often anything else happens."""
        return any(event.kind not in _ALWAYS_RECORDED for event in self.events)

    @property
    def recorded_ns(self) -> tuple[int, int]:
        """Start and end by the wall clock of its host, which telemetry and traces read, epoch ns."""
        return self.start_ns - self.moved_ns, self.end_ns - self.moved_ns

    def start_of(self, event: Event) -> int:
        """When one of its events began, epoch ns."""
        return self.start_ns + event.start_ns

    def end_of(self, event: Event) -> int:
        """When one of its events ended, epoch ns."""
        return self.start_ns + event.end_ns

    def shifted(self, by_ns: int) -> Step:
        """The same step on a clock that is ``by_ns`` ahead."""
        return msgspec.structs.replace(
            self, start_ns=self.start_ns + by_ns, end_ns=self.end_ns + by_ns, moved_ns=self.moved_ns + by_ns
        )

    def marked(self, mark: str) -> Step:
        """The same step with one more mark."""
        return msgspec.structs.replace(self, marks=(*self.marks, mark))


class DeviceTimes(msgspec.Struct, frozen=True):
    """When a step's work ran on its device, on that device's own clock."""

    start_ns: int
    """Since the first step that was timed."""
    marks: tuple[tuple[str, int], ...]
    """``fwd``, ``fwd_end``, ``bwd``, ``ready`` (the rank's own gradients are done), ``bwd_end``, ``opt``, ``opt_end`` and at
    last ``end``, each ns after ``start_ns``."""

    @property
    def length_ns(self) -> int:
        """From the step's start to its last mark."""
        return self.marks[-1][1]

    def named(self, name: str) -> list[int]:
        """ns after ``start_ns`` of the marks of this name, in order."""
        return [at for mark, at in self.marks if mark == name]


_MOST_OF_WORKERS = 1 << 14
"""Entries of a list in a line of workers.jsonl; the hook writes far fewer samples at a time."""
_Process = Annotated[int, Meta(gt=0, lt=2**31)]
_WorkerSample = tuple[Offset, Id, Id, Annotated[int, Meta(ge=0, le=1)]]


class WorkerLine(
    msgspec.Struct,
    rename=renamed(WorkerField)
    | {name: renamed(LineField)[name] for name in ("where", "file", "line", "function", "caller")},
):
    """A line of workers.jsonl of any kind."""

    process: _Process | None = None
    worker: Number | None = None
    workers: Number = 1
    span_ns: tuple[Epoch, Epoch] = (0, 0)
    batches: Number = 0
    preparing_ns: Duration = 0
    squares_ms2: Annotated[float, Meta(ge=0, le=2.0**80)] = 0.0
    cpu_ns: Duration | None = None
    run_delay_ns: Duration | None = None
    samples: Annotated[tuple[_WorkerSample, ...], Meta(max_length=_MOST_OF_WORKERS)] = ()
    held: Annotated[tuple[Duration, ...], Meta(max_length=_MOST_OF_WORKERS)] = ()
    loader: Id | None = None
    processes: Annotated[tuple[_Process, ...], Meta(max_length=_MOST_OF_WORKERS)] = ()
    where: Id | None = None
    file: Text = ""
    line: Id | None = 0
    function: Text = ""
    caller: Id | None = None


class WorkerSample(msgspec.Struct, frozen=True, gc=False):
    """Where a worker was while it prepared a batch."""

    user: Where
    """The user's innermost line; without any, of a library or torch."""
    innermost: Where
    asleep: bool
    """Whether it waited, and neither computed nor was ready to."""
    waited_ns: int
    """For how long the sampling thread waited for the GIL, 0 below :data:`ddpdoctor.rundir.HELD_NS`."""
    weight_ns: float
    """The part of the time of preparing batches that it stands for."""


class WorkerLog(msgspec.Struct, frozen=True):
    """What one process did as a worker, but for its first batch."""

    number: int
    """Number of the worker in its loader."""
    workers: int
    """Number of workers of its loader."""
    loader: int | None
    """Id of that; None where it began before the recording."""
    batches: int
    preparing_ns: int
    """For how long it prepared them."""
    squares_ms2: float
    """Sum of the squares of the times of the batches, ms²."""
    cpu_ns: int | None
    run_delay_ns: int | None
    """Of that time: on a CPU, and ready to run without one; None where unknown."""
    span_ns: int
    """For how long it was recorded."""
    samples: tuple[WorkerSample, ...]
