"""Which hang was the last of a job, and how long it had no progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.rundir.stepevents import LONG_PHASES, Phase
from ddpdoctor.rundir.stops import HostStop, Standstill

if TYPE_CHECKING:
    from .evidence import RankEvidence

_UNLIMITED_PHASES = LONG_PHASES | {Phase.DEBUGGER}
"""Phases that may take any length of time."""
_LEAST_SILENCE_S = 30.0
"""Shortest silence that is a hang if a job was killed before its hang monitor reported one: compilers and caches take as long."""
_LEAST_SILENT_STEPS = 5.0
"""The same limit in units of the run's longest step, which includes checkpoints and evaluations."""
_MOST_SILENCE_S = 366 * 86_400.0
"""Longest plausible silence; longer ones are ignored."""
_NOTED_NS = 5_000_000_000
"""Longest time from a step's end until a hang monitor notes that the job goes on, with the difference between the hosts' clocks."""


def without_earlier_hangs(hosts: Sequence[HostStop]) -> list[HostStop]:
    """``hosts`` without the records of hangs that were over when a later one began. Each host has the record of the last hang that its own
    hang monitor reported, and not every host's reports each hang."""
    not_resumed = [host.stall for host in hosts if host.stall and not _has_resumed(host.stall)]
    began_ns = min((stall.get("silent_since_ns") or 0 for stall in not_resumed), default=0)
    return [replace(host, stall=None) if _was_over(host.stall or {}, began_ns) else host for host in hosts]


def _has_resumed(stall: Mapping[str, Any]) -> bool:
    return stall.get("state") == Standstill.RESUMED


def _was_over(stall: Mapping[str, Any], at_ns: int) -> bool:
    looked_ns = stall.get("looked_ns")
    return _has_resumed(stall) and looked_ns is not None and looked_ns - _NOTED_NS <= at_ns


def hang_s(
    stalls: Sequence[Mapping[str, Any]],
    ranks: Mapping[int, RankEvidence],
    logs: Sequence[RankLog],
    *,
    killed: bool,
) -> float | None:
    """Seconds without progress; None if there was progress or a phase that takes long. Only the hang monitor's ``stall.json`` is used,
    unless the job was killed: the ranks' last records may then be newer."""
    seen = [(each.seen_ns, each.step_since_ns) for each in ranks.values() if killed]
    stood_s = [(at - since) / 1e9 for at, since in seen if at is not None and since is not None]
    if stalls:
        stood = [stall for stall in stalls if not _has_resumed(stall) and not stall.get("paused_in")]
        if len(stood) < len(stalls):
            return None
        silences_s = [*(float(stall.get("silent_s") or 0.0) for stall in stood), *stood_s]
        return max((silent_s for silent_s in silences_s if 0 <= silent_s < _MOST_SILENCE_S), default=0.0)
    if not killed or not ranks:
        return None
    longest = max((step.length_ns / 1e9 for log in logs for step in log.steps), default=0.0)
    going_on = any(each.phase in _UNLIMITED_PHASES for each in ranks.values())
    if going_on or not stood_s or max(stood_s) < max(_LEAST_SILENCE_S, _LEAST_SILENT_STEPS * longest):
        return None
    return max(stood_s)
