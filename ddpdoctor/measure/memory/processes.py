"""Memory of a rank's process and of its children, as the host's telemetry read it."""

from __future__ import annotations

import msgspec
import numpy as np

from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.telemetry import HostTelemetry

_PROCESS_FIELDS = ("process_memory_bytes", "process_rss_bytes")
"""The first that was read counts: not every system tells pages of files from others."""


class Held(msgspec.Struct, frozen=True):
    """Bytes over time."""

    times_ns: Array
    bytes_: Array

    def within(self, begin_ns: float, end_ns: float) -> Held:
        """The part that was read then."""
        inside = (self.times_ns >= begin_ns) & (self.times_ns <= end_ns)
        return Held(self.times_ns[inside], self.bytes_[inside])

    @property
    def most(self) -> float | None:
        """None where nothing was read."""
        return float(self.bytes_.max()) if len(self.bytes_) else None


NOTHING = Held(np.empty(0), np.empty(0))


def process_held(log: RankLog, host: HostTelemetry) -> Held:
    """Of the rank's own process."""
    for field in _PROCESS_FIELDS:
        times, held = _column(log, host, field)
        known = ~np.isnan(held)
        if known.any():
            return Held(times[known], held[known])
    return NOTHING


def workers_held(log: RankLog, host: HostTelemetry) -> Held:
    """Of its children together, while there are as many of them as there are mostly: where a pass over the data begins, workers
    come and go."""
    times, held = _column(log, host, "children_memory_bytes")
    _, children = _column(log, host, "num_children")
    numbers, often = np.unique(children[(children > 0) & ~np.isnan(held)], return_counts=True)
    if not len(numbers):
        return NOTHING
    usual = (children == numbers[often.argmax()]) & ~np.isnan(held)
    return Held(times[usual], held[usual])


def _column(log: RankLog, host: HostTelemetry, field: str) -> tuple[Array, Array]:
    """(times, values) of the process that was recorded, NaN of another: one that failed and was started again has another
    number."""
    times, values = host.rank_column(log.rank, field)
    pid = log.record.info.get("pid")
    if pid is not None:
        values = np.where(host.rank_column(log.rank, "pid")[1] == float(pid), values, np.nan)
    return times.astype(float), values


def host_free(host: HostTelemetry, begin_ns: float, end_ns: float) -> tuple[float | None, float | None]:
    """(limit, what was free of it at least between the two moments), bytes, by the control group where that is tighter."""
    stated = host.header.get("host_facts") or {}
    found = [
        (stated.get("memory_total_bytes"), host.host_column("memory_available_bytes")),
        (stated.get("cgroup_memory_limit_bytes"), host.host_column("cgroup_memory_free_bytes")),
    ]
    known = []
    for limit, (times, values) in found:
        inside = (times >= begin_ns) & (times <= end_ns) & ~np.isnan(values)
        if limit and inside.any():
            known.append((float(limit), float(values[inside].min())))
    return min(known, key=lambda pair: pair[1], default=(None, None))
