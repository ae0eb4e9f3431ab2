"""The machines while the measured steps ran: processors, memory, and threads that had to wait for a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.facts import HostFacts
from ddpdoctor.measure.graph import Graph, measured_steps
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.telemetry import HostTelemetry

from .columns import during, mean, steps_span
from .cores import Cores


class _Host(msgspec.Struct, frozen=True):
    """What was read of one host, means while its steps ran; None where it was not."""

    name: str = ""
    cores: float | None = None
    """Those that the job may use."""
    cpu_percent: float | None = None
    memory_used_share: float | None = None
    swap_bytes_per_s: float | None = None
    io_wait_percent: float | None = None

    @property
    def idle_cores(self) -> float | None:
        known = self.cores is not None and self.cpu_percent is not None
        return (self.cores or 0.0) * (1 - (self.cpu_percent or 0.0) / 100) if known else None


def host_facts(
    hosts: Mapping[str, HostTelemetry], logs: Sequence[RankLog], graph: Graph, cores_used: Cores | None
) -> HostFacts:
    """Cores of the busiest host, memory of the one that swaps most, I/O of the one that waits most for it, from telemetry; run
    delay and threads of all ranks, from the step logs."""
    read = [_read(name, host, [log for log in logs if log.host == name]) for name, host in hosts.items()]
    fullest = max(
        read, key=lambda host: (host.swap_bytes_per_s or 0, host.memory_used_share or 0), default=_Host()
    )
    chosen = cores_used.host if cores_used else None
    busiest = max(read, key=lambda host: (host.name == chosen, host.cpu_percent or 0), default=_Host())
    return HostFacts(
        cores=busiest.cores,
        ranks_per_host=float(sum(log.host == busiest.name for log in logs)) or None if read else None,
        cpu_percent=busiest.cpu_percent,
        idle_cores=busiest.idle_cores,
        job_cores=cores_used.job if cores_used else None,
        run_delay_share=_run_delay_share(graph),
        threads_per_rank=_threads_per_rank(logs),
        memory_used_share=fullest.memory_used_share,
        swap_bytes_per_s=fullest.swap_bytes_per_s,
        io_wait_percent=max(
            (of.io_wait_percent for of in read if of.io_wait_percent is not None), default=None
        ),
    )


def _read(name: str, host: HostTelemetry, logs: Sequence[RankLog]) -> _Host:
    stated, span = host.header.get("host_facts") or {}, steps_span(logs)

    def mean_of(field: str) -> float | None:
        return mean(during(host.host_column(field), span))

    cores = stated.get("cpu_count_usable") or stated.get("cpu_count_logical")
    used = mean_of("memory_used_bytes")
    whole = stated.get("memory_total_bytes") or mean_of("memory_total_bytes")
    swapped = [mean_of(f"swap_{way}_bytes_per_s") for way in ("in", "out")]
    return _Host(
        name,
        cores=float(cores) if cores else None,
        cpu_percent=mean_of("cpu_percent"),
        memory_used_share=used / whole if used and whole else None,
        swap_bytes_per_s=_sum(swapped),
        io_wait_percent=mean_of("iowait_percent"),
    )


def _sum(values: Sequence[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _threads_per_rank(logs: Sequence[RankLog]) -> float | None:
    """Threads with which torch computes, median rank."""
    counts = [(log.record.info.get("threads") or {}).get("torch") for log in logs]
    known = [count for count in counts if count]
    return float(np.median(known)) if known else None


def _run_delay_share(graph: Graph) -> float | None:
    """Share of the step in which the training thread was ready but had no CPU, on the worst rank, over those of the
    measured steps in which its counters were read."""
    shares = []
    measured = measured_steps(graph.groups)
    for steps in graph.steps:
        chosen = np.array([int(number) in measured for number in steps.steps], bool) & ~np.isnan(
            steps.run_delay
        )
        length = float((steps.end[chosen] - steps.start[chosen]).sum())
        if length > 0:
            shares.append(float(steps.run_delay[chosen].sum()) / length)
    return max(shares, default=None)
