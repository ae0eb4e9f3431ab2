"""The machines while the measured steps ran: processors, memory, and threads that had to wait for a CPU.

Cores of the busiest host: what the job uses of them, what stands idle, and what that leaves for work done beside a step. Work
that is moved, and not removed (a loader's workers, transfers beside the backward pass), still takes its time on a CPU. A job
that uses J cores in steps of length T does ``J x T`` of work in each. Given all cores that it has or that stand idle, J + I, it
cannot be quicker than

    T x J / (J + I)

And what is to run beside a computation needs a core that the computation leaves free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.facts import HostFacts
from ddpdoctor.measure.graph import Graph, measured_steps
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.telemetry import HostTelemetry

from .columns import during, mean, steps_span


class Cores(msgspec.Struct, frozen=True):
    """Of one host, means while the steps ran."""

    job: float
    """Used by the job's ranks and their workers."""
    idle: float
    ranks: int
    computing: float | None
    """Threads with which its ranks compute, all together; None where unknown."""
    host: str = ""

    def least_step(self, step: float) -> float:
        """What a step of this length takes at least where no work is removed from it."""
        return step * self.job / (self.job + self.idle)

    @property
    def hidden_share(self) -> float:
        """Part (0 to 1) of a transfer by threads of the host for which the computation beside it leaves a core; 1 where the
        number of threads is unknown."""
        if self.computing is None:
            return 1.0
        return float(np.clip((self.job + self.idle - self.computing) / self.ranks, 0.0, 1.0))


def host_cores(hosts: Mapping[str, HostTelemetry], logs: Sequence[RankLog]) -> Cores | None:
    """The host with the smallest part of its cores to spare; None where telemetry tells of none while the steps ran."""
    here: dict[str, list[RankLog]] = {}
    for log in logs:
        here.setdefault(log.host, []).append(log)
    found = [_of_host(hosts[name], own) for name, own in here.items() if name in hosts]
    known = [cores for cores in found if cores is not None]
    return max(known, key=lambda cores: cores.least_step(1.0), default=None)


def _of_host(host: HostTelemetry, logs: Sequence[RankLog]) -> Cores | None:
    stated = host.header.get("host_facts") or {}
    usable = stated.get("cpu_count_usable") or stated.get("cpu_count_logical")
    span = steps_span(logs)
    if not usable or span is None:
        return None
    percent = mean(during(host.host_column("cpu_percent"), span))
    if percent is None:
        return None
    of_ranks = [mean(during(host.rank_column(log.rank, "cpu_percent"), span)) for log in logs]
    known = [each / 100 for each in of_ranks if each is not None]
    busy = float(usable) * percent / 100
    job = sum(known) if len(known) == len(logs) else busy
    stated_threads = [(log.record.info.get("threads") or {}).get("torch") for log in logs]
    threads = [float(count) for count in stated_threads if count]
    return Cores(
        job=max(job, 1e-3),
        idle=max(0.0, float(usable) - busy),
        ranks=len(logs),
        computing=sum(threads) if len(threads) == len(logs) else None,
        host=logs[0].host,
    )


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
