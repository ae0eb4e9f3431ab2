"""Whether a person or a scheduler ended the job: a time limit, ``scancel``, Ctrl-C, a kill of all its processes."""

from __future__ import annotations

import math
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import psutil

from ddpdoctor.rundir import RankRecord, boot_id
from ddpdoctor.rundir.stops import HostStop

POLITE = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
"""Signals by which a launcher, a scheduler or a person ends a job."""
_ENDING = POLITE | {signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGKILL}
"""The same, with those of limits and of a kill, of a job that has ended by one of them."""
_SHELL = 128
"""Added to a signal's number in a shell's exit code."""
_CLOCK_S = 60.0
"""By which the clock may have been set since a rank was started, without its process passing for another one."""


class Asked(msgspec.Struct, frozen=True):
    """How somebody ended the job, which had not ended by itself."""

    signal: int | None
    """By which it was asked to; None where it was killed as a whole, with whoever would have told."""
    at_ns: int | None = None
    """When the launcher got it; None where only the job's exit tells of it."""


def asked_to_end(
    manifest: Mapping[str, Any], records: Sequence[RankRecord], hosts: Sequence[HostStop]
) -> Asked | None:
    """By its launcher's own account, or by its exit: torchrun leaves with 1 whatever signal it got, and who is killed in the end with
    none. A job that then ends in order was not ended by it."""
    number, code = manifest.get("signal"), manifest.get("exit_code")
    heard = [
        Asked(host.asked["signal"], host.asked.get("at_ns"))
        for host in hosts
        if host.asked and host.asked.get("signal") is not None
    ]
    if heard and code != 0:
        return min(heard, key=lambda each: each.at_ns or 0)
    sent = _ENDING & {number, (code or 0) - _SHELL, -(code or 0)}
    if sent:
        return Asked(int(min(sent)))
    killed = not manifest.get("ended_ns") and records and all(map(_is_gone, records))
    return Asked(None) if killed else None


def _is_gone(record: RankRecord) -> bool:
    """Whether a rank's process was one of this machine, since it was started, and is no more."""
    info = record.info
    here = info.get("boot") == boot_id() and info.get("host") == socket.gethostname()
    if not here or not isinstance(info.get("pid"), int):
        return False
    try:
        process = psutil.Process(info["pid"])
        # One that nobody waits for stays as a zombie; another one may have got its number since.
        later_s = process.create_time() - (info.get("started_ns") or math.inf) / 1e9
        return process.status() == psutil.STATUS_ZOMBIE or later_s > _CLOCK_S
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False
