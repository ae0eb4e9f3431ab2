"""One step of one rank as a live view needs it: its times, the wait for data, the arrival, and what its host did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import msgspec

from ddpdoctor.rundir import EventField, EventKind, LineField, renamed

_Nanoseconds = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]


class LivePhase(str, Enum):
    """What the training thread was in, by the events of its step; their names are what a live view prints."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    SYNC = "sync"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    OTHER = "other"
    """In no event: Python between the phases, logging, metrics."""


_PHASES: Mapping[str, LivePhase] = {
    EventKind.DATA: LivePhase.DATA,
    EventKind.ITERATION: LivePhase.DATA,
    EventKind.FORWARD: LivePhase.FORWARD,
    EventKind.BROADCAST: LivePhase.SYNC,
    EventKind.EVALUATION: LivePhase.EVALUATION,
    EventKind.BACKWARD: LivePhase.BACKWARD,
    EventKind.OPTIMIZER: LivePhase.OPTIMIZER,
    EventKind.COLLECTIVE: LivePhase.SYNC,
    EventKind.BARRIER: LivePhase.SYNC,
    EventKind.WAIT: LivePhase.SYNC,
    EventKind.SAVE: LivePhase.CHECKPOINT,
    EventKind.LOAD: LivePhase.CHECKPOINT,
}
"""Of each kind of event; of the others, such as a garbage collection, the phase goes on in which they fell."""


@dataclass(frozen=True, slots=True)
class LiveStep:
    """One step of one rank. Times in ns; absent parts None."""

    number: int
    start_ns: int
    end_ns: int
    full: bool = False
    """Whether its events were recorded."""
    data_wait_ns: int | None = None
    samples: int | None = None
    arrival_ns: int | None = None
    """Epoch ns at which this rank's last gradient was ready: on a GPU, when the host had issued it."""
    phases_ns: tuple[tuple[LivePhase, int], ...] = ()
    """The step's time by the phase that the training thread was in; it adds up to the step."""

    @property
    def duration_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


class _Event(msgspec.Struct, rename=renamed(EventField)):
    """What is read of an event of a step; :mod:`ddpdoctor.measure.steplog` reads all of it."""

    kind: str
    start_ns: _Nanoseconds = 0
    duration_ns: _Nanoseconds = 0
    count: _Nanoseconds | None = None
    exhausted: bool = False
    synced: bool | None = None
    ready_ns: list[_Nanoseconds] = []
    forward_end_ns: _Nanoseconds | None = None


class LiveLine(msgspec.Struct, rename=renamed(LineField)):
    """A step, or the end of the recording."""

    step: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] | None = None
    time_ns: tuple[_Nanoseconds, _Nanoseconds] | int | None = None
    # No bounds for the integer alone: msgspec 0.22 crashes in the garbage collection after it decoded such a union.
    thin: bool = False
    events: list[_Event] = []
    end: bool = False

    def as_step(self) -> LiveStep | None:
        """The step that the line tells of; None where it tells of something else."""
        if self.step is None or not isinstance(self.time_ns, tuple) or self.time_ns[0] > self.time_ns[1]:
            return None
        if self.thin:
            return LiveStep(self.step, *self.time_ns)
        waits, samples, arrival = None, None, None
        for event in self.events:
            if event.kind == EventKind.DATA and not event.exhausted:
                waits = (waits or 0) + event.duration_ns
                samples = (samples or 0) + event.count if event.count is not None else samples
            elif (
                event.kind == EventKind.BACKWARD
                and event.synced
                and event.ready_ns
                and event.forward_end_ns is not None
            ):
                arrival = self.time_ns[0] + event.forward_end_ns + max(event.ready_ns)
        phases = _phases(self.events, self.time_ns[1] - self.time_ns[0])
        return LiveStep(self.step, *self.time_ns, True, waits, samples, arrival, phases)


decode_line = msgspec.json.Decoder(LiveLine).decode


def _phases(events: list[_Event], length_ns: int) -> tuple[tuple[LivePhase, int], ...]:
    """Each moment of the step counts to the event that began last of those it lies in: a collective within a forward is no forward."""
    known = [(event.start_ns, event.duration_ns, _PHASES.get(event.kind)) for event in events]
    spent: dict[LivePhase, int] = {}
    around: list[tuple[int, LivePhase]] = []
    """End and phase of the events that the moment lies in, the outermost first."""
    at = 0

    def go_on(until_ns: int) -> None:
        nonlocal at
        while at < until_ns:
            while around and around[-1][0] <= at:
                around.pop()
            end, phase = around[-1] if around else (until_ns, LivePhase.OTHER)
            moment = min(end, until_ns)
            spent[phase] = spent.get(phase, 0) + moment - at
            at = moment

    for start, duration, phase in sorted(known, key=lambda each: (each[0], -each[1])):
        if phase is not None and duration > 0:
            go_on(min(start, length_ns))
            around.append((start + duration, phase))
    go_on(length_ns)
    return tuple(spent.items())
