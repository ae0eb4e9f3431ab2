"""Whether a person or a scheduler ended the job: a time limit, ``scancel``, Ctrl-C, a kill of all its processes."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import msgspec

from ddpdoctor.rundir import RankRecord
from ddpdoctor.rundir.ends import POLITE, JobEnd
from ddpdoctor.rundir.processes import is_running
from ddpdoctor.rundir.stops import HostStop

_ENDING = POLITE | {signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGKILL}
"""The same, with those of limits and of a kill, of a job that has ended by one of them."""
_SHELL = 128
"""Added to a signal's number in a shell's exit code."""


class Asked(msgspec.Struct, frozen=True):
    """How somebody ended the job, which had not ended by itself."""

    signal: int | None
    """By which it was asked to; None where it was killed as a whole, with whoever would have told."""
    at_ns: int | None = None
    """When the launcher got it; None where only the job's exit tells of it."""


def asked_to_end(
    job: JobEnd, records: Sequence[RankRecord], hosts: Sequence[HostStop], *, all_well: bool
) -> Asked | None:
    """By its launcher's own account, or by its exit: torchrun leaves with 1 whatever signal it got, and who is killed in the end with
    none. A job that then ends in order, and ``all_well``, all of its ranks with it, was not ended by it."""
    heard = [
        Asked(host.asked["signal"], host.asked.get("at_ns"))
        for host in hosts
        if host.asked and host.asked.get("signal") is not None
    ]
    if heard and not (job.code == 0 and all_well):
        return min(heard, key=lambda each: each.at_ns or 0)
    sent = _ENDING & {job.signal, (job.code or 0) - _SHELL, -(job.code or 0)}
    if sent:
        return Asked(int(min(sent)))
    killed = job.killed and records and all(is_running(record.info) is False for record in records)
    return Asked(None) if killed else None
