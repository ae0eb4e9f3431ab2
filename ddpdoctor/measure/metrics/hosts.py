"""The machines while the measured steps ran: processors, memory, and threads that had to wait for a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ddpdoctor.measure.facts import HostFacts
from ddpdoctor.measure.graph import Graph, measured_steps
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.telemetry import HostTelemetry

from .columns import mean
from .cores import Cores


def host_facts(
    hosts: Mapping[str, HostTelemetry], logs: Sequence[RankLog], graph: Graph, cores_used: Cores | None
) -> HostFacts:
    """The busiest host, from telemetry; run delay and threads of all ranks, from the step logs."""
    run_delay_share, threads_per_rank = _run_delay_share(graph), _threads_per_rank(logs)
    busiest = _busiest(hosts)
    if busiest is None:
        return HostFacts(run_delay_share=run_delay_share, threads_per_rank=threads_per_rank)
    name, cpu_percent = busiest
    host = hosts[name]
    stated = host.header.get("host_facts") or {}
    cores = stated.get("cpu_count_usable") or stated.get("cpu_count_logical")
    used = mean(host.host_column("memory_used_bytes"))
    whole = stated.get("memory_total_bytes") or mean(host.host_column("memory_total_bytes"))
    swapped = [mean(host.host_column(f"swap_{way}_bytes_per_s")) for way in ("in", "out")]
    ranks_here = sum(log.host == name for log in logs)
    return HostFacts(
        cores=float(cores) if cores else None,
        ranks_per_host=float(ranks_here) or None,
        cpu_percent=cpu_percent,
        idle_cores=float(cores) * (1 - cpu_percent / 100) if cores else None,
        job_cores=cores_used.job if cores_used else None,
        run_delay_share=run_delay_share,
        threads_per_rank=threads_per_rank,
        memory_used_share=used / whole if used and whole else None,
        swap_bytes_per_s=_sum(swapped),
        io_wait_percent=mean(host.host_column("iowait_percent")),
    )


def _busiest(hosts: Mapping[str, HostTelemetry]) -> tuple[str, float] | None:
    """(name, mean CPU utilisation in per cent) of the host with most of it; None where no host's was read."""
    percents = {name: mean(host.host_column("cpu_percent")) for name, host in hosts.items()}
    known = [(name, percent) for name, percent in percents.items() if percent is not None]
    return max(known, key=lambda host: host[1], default=None)


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
