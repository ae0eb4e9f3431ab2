"""What is known of a job's end."""

from __future__ import annotations

import msgspec

from ddpdoctor.measure.hangfacts import HangFacts, Standing
from ddpdoctor.rundir.ends import JobEnd


class Verdict(msgspec.Struct, frozen=True):
    """What stopped, and where each rank stands; as it is, that nothing is known to have stopped."""

    facts: HangFacts = msgspec.field(default_factory=HangFacts)
    standing: list[Standing] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)
    ended_by: str | None = None
    """The signal by which somebody ended the job, if nothing worse stopped it; "" if nobody knows which. ``standing`` is then
    where ranks were last seen."""
    requested: bool = False
    """Whether a launcher noted that signal: it was asked to end the job."""
    job: JobEnd = JobEnd()
    """The job's end, by its launchers."""
