"""The result of this package."""

from __future__ import annotations

import msgspec

from ddpdoctor.measure.runfacts import HangFacts, Standing
from ddpdoctor.rundir.ends import JobEnd


class Verdict(msgspec.Struct, frozen=True):
    """What stopped the job, and the position of each rank. The defaults mean: not known to have stopped."""

    facts: HangFacts = msgspec.field(default_factory=HangFacts)
    standing: list[Standing] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)
    ended_by: str | None = None
    """The signal that ended the job from outside, if it had not failed before; "" if the signal is unknown. ``standing`` then has the last
    known positions."""
    requested: bool = False
    """Whether a launcher received and noted that signal."""
    job: JobEnd = JobEnd()
    """The job's end, by its launchers."""
