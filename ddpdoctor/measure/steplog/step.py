"""A step of one rank, as it was recorded or put on another clock."""

from __future__ import annotations

import msgspec

from .record import Event

EVALUATED = "evaluated"
"""A mark of a step that is given as it is read: all models of the job were in evaluation mode."""


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
    """By how much it was moved since it was recorded, see :mod:`ddpdoctor.measure.align`: leads back to the wall clock."""

    @property
    def length_ns(self) -> int:
        """From its start to its end."""
        return self.end_ns - self.start_ns

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
        """The same step on a clock that is ahead by this much."""
        return Step(
            self.number,
            self.start_ns + by_ns,
            self.end_ns + by_ns,
            self.events,
            self.marks,
            self.run_delay_ns,
            self.cpu_ns,
            self.moved_ns + by_ns,
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
