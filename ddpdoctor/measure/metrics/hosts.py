"""Facts about the hosts while the measured steps ran: CPU, memory, and threads that waited for a core.

Work that is moved, not removed (to a loader's workers, or transfers during the backward pass), still needs CPU time. A job that uses J
cores of a host in steps of length T does ``J x T`` of work per step. If I more cores are idle, a step takes at least

    T x J / (J + I)

Work that overlaps with computation needs a core that the computation does not use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.facts import HostFacts, ProgramFacts
from ddpdoctor.measure.graph import Graph, measured_steps
from ddpdoctor.measure.numerics import Array, Intervals, Ints, Mask, holds, subtract, union
from ddpdoctor.measure.steplog import WARM_UP_STEPS, RankLog, disturbed
from ddpdoctor.measure.telemetry import Column, HostTelemetry
from ddpdoctor.rundir import MAX_PROGRAMS, MIN_PROGRAM_CORES


def time_of_steps(logs: Sequence[RankLog]) -> Intervals | None:
    """Return when the steps after the warm-up ran in one host's logs, epoch ns by the host's wall clock; None without steps. Steps in which
    opening, closing or saving the profiler took a second or more are excluded."""
    steps = [step for log in logs for step in log.steps[WARM_UP_STEPS:]]
    if not steps:
        return None
    begins, ends = np.array([step.recorded_ns for step in steps], np.int64).T
    kept = np.array([not disturbed(step) for step in steps])
    # Includes a reading at the end of the last step.
    whole = union([begins.min()], [ends.max() + 1])
    return subtract(whole, union(begins[~kept], ends[~kept])) if kept.any() else whole


def during(column: Column, time: Intervals | None) -> Column:
    """Return the readings within ``time``; all if it is None."""
    times, values = column
    inside = within(times, time)
    return times[inside], values[inside]


def within(times: Ints, time: Intervals | None) -> Mask:
    """Return the mask of the ``times`` within ``time``; all True if it is None."""
    return np.ones(len(times), bool) if time is None else holds(time, times)


def readings(column: Column) -> Array:
    """Return the values without missing readings."""
    values: Array = column[1][~np.isnan(column[1])]
    return values


def mean(column: Column) -> float | None:
    """Return the mean reading; None without readings."""
    values = readings(column)
    return float(values.mean()) if len(values) else None


def largest(column: Column) -> float | None:
    """Return the largest reading; None without readings."""
    values = readings(column)
    return float(values.max()) if len(values) else None


class Cores(msgspec.Struct, frozen=True):
    """Number of cores in use and idle on one host, means while the steps ran."""

    job: float
    """Used by the job's ranks and their workers."""
    idle: float
    """Idle cores that the job may use; an upper bound if it may not use the whole host, because others' use of its cores is unknown."""
    ranks: int
    computing: float | None
    """Computing threads of all its ranks; None if unknown."""
    host: str = ""
    others: float | None = None
    """Used by other processes; None if a rank's use is unknown, or the job may not use the whole host."""

    def shortest_step(self, step: float) -> float:
        """Return a lower bound of a step's length if no work is removed from it."""
        return step * self.job / (self.job + self.idle)

    @property
    def hidden_share(self) -> float:
        """Share (0 to 1) of a transfer by host threads that can overlap with computation, limited by free cores; 1 if the number of
        threads is unknown."""
        if self.computing is None:
            return 1.0
        return float(np.clip((self.job + self.idle - self.computing) / self.ranks, 0.0, 1.0))


def host_cores(hosts: Mapping[str, HostTelemetry], logs: Sequence[RankLog]) -> Cores | None:
    """Return the cores of the host with the smallest share of idle cores; None without telemetry while the steps ran."""
    names = [name for name in dict.fromkeys(log.host for log in logs) if name in hosts]
    found = [_cores_of_host(hosts[name], [log for log in logs if log.host == name]) for name in names]
    known = [cores for cores in found if cores is not None]
    return max(known, key=lambda cores: cores.shortest_step(1.0), default=None)


def _cores_of_host(host: HostTelemetry, logs: Sequence[RankLog]) -> Cores | None:
    read, span = _host_readings(host, logs), time_of_steps(logs)
    if span is None or not read.cores or read.cpu_percent is None:
        return None
    of_ranks = [mean(during(host.rank_column(log.rank, "cpu_percent"), span)) for log in logs]
    known = [each / 100 for each in of_ranks if each is not None]
    whole = _may_use_whole(host, logs)
    if not whole and len(known) < len(logs):
        return None
    busy = read.cores * read.cpu_percent / 100
    job = sum(known) if len(known) == len(logs) else busy
    threads = _threads(logs)
    # Upper bound of the cores that all ranks together can use, from affinity and CPU limit.
    limit = (host.header.get("host_facts") or {}).get("cgroup_cpu_limit_cores") or read.cores
    allowed = min(read.cores, limit, sum(log.record.info.get("cpu_affinity") or read.cores for log in logs))
    return Cores(
        job=max(job, 1e-3),
        idle=float(max(0.0, read.cores - busy if whole else allowed - job)),
        ranks=len(logs),
        computing=sum(threads) if len(threads) == len(logs) else None,
        host=logs[0].host,
        others=max(0.0, busy - job) if whole and len(known) == len(logs) else None,
    )


def _may_use_whole(host: HostTelemetry, logs: Sequence[RankLog]) -> bool:
    """Whether no rank is limited to a part of the host's cores, so that the job can use all idle cores."""
    stated = host.header.get("host_facts") or {}
    logical = stated.get("cpu_count_logical")
    own = {log.record.info.get("cpu_affinity") for log in logs} | {stated.get("cpu_count_usable")}
    limit = stated.get("cgroup_cpu_limit_cores")
    return own <= {None, logical} and (limit is None or bool(logical and limit >= logical))


def host_facts(
    hosts: Mapping[str, HostTelemetry], logs: Sequence[RankLog], graph: Graph, cores_used: Cores | None
) -> HostFacts:
    """Return the facts about hosts. From telemetry: cores of the busiest host, memory of the host that swaps most, I/O wait of the host
    that waits most. From the step logs: run delay and threads of the ranks."""
    read = {
        name: _host_readings(host, [log for log in logs if log.host == name]) for name, host in hosts.items()
    }
    nothing = HostFacts()
    fullest = max(
        read.values(), key=lambda of: (of.swap_bytes_per_s or 0, of.memory_used_share or 0), default=nothing
    )
    chosen = cores_used.host if cores_used else None
    busiest = max(read, key=lambda name: (name == chosen, read[name].cpu_percent or 0), default="")
    threads = _threads(logs)
    waits = [of.io_wait_percent for of in read.values() if of.io_wait_percent is not None]
    # Run delay and CPU time of the rank with the most, over the measured steps with that record.
    measured = list(measured_steps(graph.groups))
    delays, cpu_ms = [], []
    for steps in graph.steps:
        inside = np.isin(steps.steps, measured)
        with_delay = inside & ~np.isnan(steps.run_delay)
        if length_ns := float((steps.end - steps.start)[with_delay].sum()):
            delays.append(float(steps.run_delay[with_delay].sum()) / length_ns)
        cpu_ns = steps.cpu[inside & ~np.isnan(steps.cpu)]
        if len(cpu_ns):
            cpu_ms.append(float(cpu_ns.mean()) / 1e6)
    return replace(
        read.get(busiest, nothing),
        run_delay_share=max(delays, default=None),
        thread_cpu_ms=max(cpu_ms, default=None),
        threads_per_rank=float(np.median(threads)) if threads else None,
        memory_used_share=fullest.memory_used_share,
        swap_bytes_per_s=fullest.swap_bytes_per_s,
        io_wait_percent=max(waits, default=None),
        other_cores=cores_used.others if cores_used else None,
        other_programs=_other_programs(hosts[busiest], [log for log in logs if log.host == busiest])
        if busiest
        else [],
    )


def _other_programs(host: HostTelemetry, logs: Sequence[RankLog]) -> list[ProgramFacts]:
    """Programs other than the ranks and their workers that used the most CPU while the steps of the host's ranks (``logs``) ran."""
    times, readings = host.other_programs()
    inside = within(times, time_of_steps(logs))
    used = [
        each for each, counts in zip(readings, inside.tolist(), strict=True) if counts and each is not None
    ]
    sums: dict[tuple[str, float | None], list[float]] = {}
    all_cores = (host.header.get("host_facts") or {}).get("cpu_count_logical") or math.inf
    for program in chain.from_iterable(used):
        if not 0 <= program["cores"] <= all_cores:
            continue  # a damaged file
        total = sums.setdefault((program["name"], program.get("rank")), [0.0, 0.0])
        total[0] += program["cores"]
        total[1] = max(total[1], program["processes"])
    means = [
        ProgramFacts(name=name, cores=cores / len(used), processes=most, rank=rank)
        for (name, rank), (cores, most) in sums.items()
    ]
    large = [each for each in means if each.cores >= MIN_PROGRAM_CORES]
    return sorted(large, key=lambda each: -each.cores)[:MAX_PROGRAMS]


def _host_readings(host: HostTelemetry, logs: Sequence[RankLog]) -> HostFacts:
    """Facts of one host, means while the steps of its ranks (``logs``) ran."""
    stated, span = host.header.get("host_facts") or {}, time_of_steps(logs)

    def mean_of(field: str) -> float | None:
        return mean(during(host.host_column(field), span))

    cores = stated.get("cpu_count_usable") or stated.get("cpu_count_logical")
    cpu_percent, used = mean_of("cpu_percent"), mean_of("memory_used_bytes")
    whole = stated.get("memory_total_bytes") or mean_of("memory_total_bytes")
    swapped = [mean_of(f"swap_{way}_bytes_per_s") for way in ("in", "out")]
    known = [each for each in swapped if each is not None]
    return HostFacts(
        cores=float(cores) if cores else None,
        numa_nodes=float(stated["numa_nodes"]) if stated.get("numa_nodes") else None,
        ranks_per_host=float(len(logs)) or None,
        cpu_percent=cpu_percent,
        idle_cores=float(cores) * (1 - cpu_percent / 100)
        if cores and cpu_percent is not None and _may_use_whole(host, logs)
        else None,
        memory_used_share=used / whole if used and whole else None,
        swap_bytes_per_s=sum(known) if known else None,
        io_wait_percent=mean_of("iowait_percent"),
    )


def _threads(logs: Sequence[RankLog]) -> list[float]:
    """Number of torch's threads of each rank that recorded it."""
    counts = [(log.record.info.get("threads") or {}).get("torch") for log in logs]
    return [float(count) for count in counts if count]
