"""Schemas of the lines of steps.jsonl, samples.jsonl and workers.jsonl, and :class:`Step`.

Types, ranges, lengths and finiteness are checked during decoding. A run directory is untrusted input: a line with an impossible number
is a broken line.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ddpdoctor.measure.places import Where
from ddpdoctor.rundir.stepevents import EventField, EventKind, LineField, WorkerField, renamed

MOST_NUMBER = 2**53
"""Largest step number or count: a float64 represents all integers up to it exactly."""
_MOST_NS = 2**62
"""Largest epoch time, in the year 2116: sums with durations stay within 64 bits."""
_MOST_DURATION_NS = 2**53
"""Longest duration: 104 days."""
_MOST_TEXT = 4096
"""Characters of a name or path: Linux's PATH_MAX."""
MOST_CALLERS = 32
"""Callers read per source line; the hook records fewer."""
_MOST_ENTRIES = 1 << 16
"""Entries of a list in one line; the hook keeps far fewer events per step."""

_ALWAYS_RECORDED = (EventKind.SAVE, EventKind.LOAD, EventKind.MORE)
"""Kinds of events recorded in every step. MORE is the number of events that were dropped because the step had too many."""

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
    """One DDP module's part of a backward pass. ``ready_ns`` are ns after the end of the module's forward."""

    module: Id
    synced: bool = False
    ready_ns: Offsets = ()
    forward_end_ns: Offset | None = None


class Event(msgspec.Struct, frozen=True, gc=False, rename=renamed(EventField)):
    """An event of a step, see :class:`ddpdoctor.rundir.stepevents.EventKind` and ``EventField``.

    Times are ns after the start of its step, as on disk, so they stay valid when the step is moved to another clock
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
    operation: Text = ""
    group: Text = ""
    message_bytes: Annotated[float, Meta(ge=0, le=2.0**62)] | None = None
    is_async: bool = False
    source: Id | None = None

    def rebased(self, by_ns: int) -> Event:
        """The event relative to a step start that is ``by_ns`` later."""
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
        """End, ns after the start of its step."""
        return self.start_ns + self.duration_ns

    @property
    def gives_batch(self) -> bool:
        """Whether it is a batch from a loader, not the end of the loader."""
        return self.kind == EventKind.DATA and not self.exhausted

    @property
    def shows_ready_batches(self) -> bool:
        """Whether it is a request to a loader with workers that says how many batches were ready."""
        return self.kind == EventKind.DATA and self.batches_ready >= 0

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        """The DDP modules whose gradients were reduced in this backward pass."""
        own: tuple[Reduction, ...] = ()
        if self.synced and self.module >= 0:
            own = (Reduction(self.module, True, self.ready_ns, self.forward_end_ns),)
        return (*own, *(each for each in self.also if each.synced and each.module >= 0)) if self.also else own

    @property
    def gradients_ready_ns(self) -> int:
        """When the last gradient of this backward pass was ready according to the reducer, at most the end of the pass; ns after the
        start of its step."""
        ready = [
            (each.forward_end_ns if each.forward_end_ns is not None else self.start_ns) + max(each.ready_ns)
            for each in self.reductions
            if each.ready_ns
        ]
        return min(max(ready, default=self.end_ns), self.end_ns)


def _minus(value: int | None, by: int) -> int | None:
    return None if value is None else value - by


class LogRecord(msgspec.Struct, rename=renamed(LineField)):
    """Any line of steps.jsonl or samples.jsonl, see :class:`ddpdoctor.rundir.stepevents.LineField`."""

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
"""Mark that the reader adds to a step in which all models of the job were in evaluation mode."""


class Step(msgspec.Struct, frozen=True, gc=False):
    """One step of one rank. Its times are epoch ns; those of its events are ns after its start."""

    number: int
    start_ns: int
    end_ns: int
    events: tuple[Event, ...]
    marks: tuple[str, ...]
    run_delay_ns: int | None
    cpu_ns: int | None
    moved_ns: int = 0
    """Offset from the host's wall clock, see :mod:`ddpdoctor.measure.align`."""

    @property
    def length_ns(self) -> int:
        """End minus start."""
        return self.end_ns - self.start_ns

    @property
    def in_full(self) -> bool:
        """Whether all its events were recorded. For most steps of a long job only times and checkpoints are kept."""
        return any(event.kind not in _ALWAYS_RECORDED for event in self.events)

    @property
    def recorded_ns(self) -> tuple[int, int]:
        """Start and end by its host's wall clock, which telemetry and traces use; epoch ns."""
        return self.start_ns - self.moved_ns, self.end_ns - self.moved_ns

    def start_of(self, event: Event) -> int:
        """Start of one of its events, epoch ns."""
        return self.start_ns + event.start_ns

    def end_of(self, event: Event) -> int:
        """End of one of its events, epoch ns."""
        return self.start_ns + event.end_ns

    def shifted(self, by_ns: int) -> Step:
        """The step on a clock that is ``by_ns`` ahead."""
        return msgspec.structs.replace(
            self, start_ns=self.start_ns + by_ns, end_ns=self.end_ns + by_ns, moved_ns=self.moved_ns + by_ns
        )

    def with_mark(self, mark: str) -> Step:
        """The step with one more mark."""
        return msgspec.structs.replace(self, marks=(*self.marks, mark))


class DeviceTimes(msgspec.Struct, frozen=True):
    """CUDA event times of a step, on the device's own clock."""

    start_ns: int
    """ns since the first timed step."""
    marks: tuple[tuple[str, int], ...]
    """``fwd``, ``fwd_end``, ``bwd``, ``ready`` (the rank's own gradients are ready), ``bwd_end``, ``opt``, ``opt_end`` and finally
    ``end``; ns after ``start_ns``."""

    @property
    def length_ns(self) -> int:
        """From the step's start to its last mark."""
        return self.marks[-1][1]

    def marks_named(self, name: str) -> list[int]:
        """Times of the marks with this name, in order; ns after ``start_ns``."""
        return [at for mark, at in self.marks if mark == name]


_MOST_OF_WORKERS = 1 << 14
"""Entries of a list in a line of workers.jsonl; the hook writes far fewer samples per line."""
_Process = Annotated[int, Meta(gt=0, lt=2**31)]
_WorkerSample = tuple[Offset, Id, Id, Annotated[int, Meta(ge=0, le=1)]]


class WorkerLine(
    msgspec.Struct,
    rename=renamed(WorkerField)
    | {name: renamed(LineField)[name] for name in ("where", "file", "line", "function", "caller")},
):
    """Any line of workers.jsonl."""

    process: _Process | None = None
    worker: Number | None = None
    span_ns: tuple[Epoch, Epoch] = (0, 0)
    batches: Number = 0
    preparing_ns: Duration = 0
    squares_ms2: Annotated[float, Meta(ge=0, le=2.0**80)] = 0.0
    bytes: Number | None = None
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
    """A stack sample of a data loader worker that was preparing a batch."""

    user: Where
    """Innermost line of the user's code; if there is none, of a library or torch."""
    innermost: Where
    asleep: bool
    """Whether it was off-CPU and not runnable."""
    waited_ns: int
    """How long the sampling thread waited for the GIL; 0 below :data:`ddpdoctor.rundir.stepevents.HELD_NS`."""
    weight_ns: float
    """Share of the batch preparation time that this sample represents."""


class WorkerLog(msgspec.Struct, frozen=True):
    """Records of one data loader worker process, without its first batch."""

    number: int
    """Index of the worker in its loader."""
    loader: int | None
    """Id of the loader; None if it was created before the recording."""
    batches: int
    preparing_ns: int
    """Time spent preparing batches."""
    squares_ms2: float
    """Sum of the squared batch preparation times, ms²."""
    bytes: int | None
    """Bytes of the batches' tensors; None if unknown."""
    cpu_ns: int | None
    run_delay_ns: int | None
    """CPU time and run-queue delay within ``preparing_ns``; None if unknown."""
    span_ns: int
    """Length of the recording."""
    samples: tuple[WorkerSample, ...]
