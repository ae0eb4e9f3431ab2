"""Facts from telemetry: the hosts and the GPUs while the measured steps ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ddpdoctor.measure.facts import GpuFacts, HostFacts
from ddpdoctor.measure.graph import Graph
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.summary import TelemetrySeries
from ddpdoctor.measure.telemetry import Column, HostTelemetry

SLOWDOWNS = (
    "hw_slowdown",
    "hw_thermal_slowdown",
    "sw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "sw_power_cap",
    "sync_boost",
)
"""Clock-event reasons under which a busy GPU runs slower than it could (NVML, nvmlClocksEventReasons)."""
_THROTTLED_SHARE = 0.2
_MOST_POINTS = 300


def host_facts(hosts: Mapping[str, HostTelemetry], logs: Sequence[RankLog], graph: Graph) -> HostFacts:
    """The busiest host. Run delay comes from the step logs, the rest from telemetry."""
    delay = _run_delay_share(logs, graph)
    threads = [
        log.record.info.get("threads", {}).get("torch") for log in logs if log.record.info.get("threads")
    ]
    facts = HostFacts(
        run_delay_share=delay,
        threads_per_rank=float(np.median([t for t in threads if t])) if any(threads) else None,
    )
    if not hosts:
        return facts
    per_host = {name: _mean(of.host_column("cpu_percent")) for name, of in hosts.items()}
    known = {name: value for name, value in per_host.items() if value is not None}
    if not known:
        return facts
    name = max(known, key=lambda n: known[n])
    host = hosts[name]
    cores = (host.header.get("host_facts") or {}).get("cpu_count_usable") or (
        host.header.get("host_facts") or {}
    ).get("cpu_count_logical")
    memory = _mean(host.host_column("memory_used_bytes"))
    whole = (host.header.get("host_facts") or {}).get("memory_total_bytes") or _mean(
        host.host_column("memory_total_bytes")
    )
    here = sum(log.host == name for log in logs) or None
    return msgspec.structs.replace(
        facts,
        cores=float(cores) if cores else None,
        ranks_per_host=float(here) if here else None,
        cpu_percent=known[name],
        idle_cores=float(cores) * (1 - known[name] / 100) if cores else None,
        memory_used_share=memory / whole if memory and whole else None,
        swap_bytes_per_s=_sum(
            _mean(host.host_column("swap_in_bytes_per_s")), _mean(host.host_column("swap_out_bytes_per_s"))
        ),
        io_wait_percent=_mean(host.host_column("iowait_percent")),
    )


def _mean(column: Column) -> float | None:
    values = column[1][~np.isnan(column[1])]
    return float(values.mean()) if len(values) else None


def _sum(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _run_delay_share(logs: Sequence[RankLog], graph: Graph) -> float | None:
    """Share of the step in which the training thread was ready but had no CPU, on the worst rank, over those of the
    measured steps in which its counters were read."""
    shares = []
    measured = {int(s) for group in graph.groups for s in group.steps}
    for steps in graph.steps:
        chosen = np.array([int(s) in measured for s in steps.steps], bool) & ~np.isnan(steps.run_delay)
        if not chosen.any():
            continue
        length = float((steps.end[chosen] - steps.start[chosen]).sum())
        if length > 0:
            shares.append(float(steps.run_delay[chosen].sum()) / length)
    return max(shares) if shares else None


def rank_gpus(logs: Sequence[RankLog], hosts: Mapping[str, HostTelemetry]) -> dict[int, tuple[str, int]]:
    """Rank → (host, NVML index): by UUID or PCI bus id, else by the only GPU, else by CUDA index where all
    GPUs are visible."""
    found = {}
    for log in logs:
        host = hosts.get(log.host)
        info = log.record.info
        if host is None or not str(info.get("device") or "").startswith("cuda"):
            continue
        for gpu in host.gpus:
            if _same_gpu(gpu, info):
                found[log.rank] = (log.host, int(gpu["index"]))
                break
        else:
            index = int(str(info["device"]).partition(":")[2] or 0)
            hidden = (info.get("environment") or {}).get("CUDA_VISIBLE_DEVICES")
            if len(host.gpus) == 1:
                found[log.rank] = (log.host, int(host.gpus[0]["index"]))
            elif not hidden and index < len(host.gpus):
                found[log.rank] = (log.host, index)
    return found


def _same_gpu(gpu: dict[str, Any], info: dict[str, Any]) -> bool:
    uuid, pci = str(info.get("device_uuid") or ""), str(info.get("device_pci") or "").lower()
    own = str(gpu.get("uuid") or "")
    bus = str(gpu.get("pci_bus_id") or "").lower()
    return bool(uuid and own and own.removeprefix("GPU-") == uuid.removeprefix("GPU-")) or bool(
        pci and bus and bus.endswith(pci[-10:])
    )


def gpu_telemetry(facts: GpuFacts, logs: Sequence[RankLog], hosts: Mapping[str, HostTelemetry]) -> GpuFacts:
    """Adds what NVML saw of the ranks' GPUs."""
    placed = rank_gpus(logs, hosts)
    if not placed:
        return facts
    utilization, memory, hottest = [], [], []
    clocks: dict[int, float] = {}
    throttled: dict[int, float] = {}
    reasons: set[str] = set()
    narrow, broken, errors = [], [], []
    width = widest = None
    for rank, (name, index) in placed.items():
        host = hosts[name]
        static = next((g for g in host.gpus if g.get("index") == index), {})
        use = _mean(host.gpu_column(index, "gpu_utilization_percent"))
        utilization += [use] if use is not None else []
        used, whole = host.gpu_column(index, "memory_used_bytes")[1], static.get("memory_total_bytes")
        if whole and len(used) and not np.isnan(used).all():
            memory.append(float(np.nanmax(used)) / whole)
        clock = _mean(host.gpu_column(index, "sm_clock_mhz"))
        if clock is not None:
            clocks[rank] = clock
        heat = host.gpu_column(index, "temperature_celsius")[1]
        if len(heat) and not np.isnan(heat).all():
            hottest.append(float(np.nanmax(heat)))
        share, found = _slowdowns(host.gpu_values(index, "throttle_reasons")[1])
        if share >= _THROTTLED_SHARE:
            throttled[rank] = share
            reasons |= found
        now, most = _most(host.gpu_column(index, "pcie_width")), static.get("pcie_width_max")
        if now is not None and most and now < most:
            narrow.append(rank)
            width, widest = now, float(most)
        problems = _errors(host, index)
        if problems:
            broken.append(rank)
            errors += [f"rank {rank}: {problem}" for problem in problems]
    return msgspec.structs.replace(
        facts,
        utilization_percent=float(np.mean(utilization)) if utilization else None,
        memory_used_share=max(memory, default=None),
        throttled_ranks=sorted(throttled) or [],
        throttle_reasons=sorted(reasons),
        throttled_share=max(throttled.values(), default=0.0),
        sm_clock_share=min(clocks.values()) / float(np.median(list(clocks.values()))) if clocks else None,
        narrow_link_ranks=sorted(narrow),
        pcie_width=width,
        pcie_width_max=widest,
        error_ranks=sorted(broken),
        errors=errors,
        temperature_max_celsius=max(hottest, default=None),
    )


def _most(column: Column) -> float | None:
    """The widest link seen: an idle GPU narrows it to save power."""
    values = column[1][~np.isnan(column[1])]
    return float(values.max()) if len(values) else None


def _slowdowns(samples: list[Any]) -> tuple[float, set[str]]:
    known = [set(sample) & set(SLOWDOWNS) for sample in samples if isinstance(sample, list)]
    hit = [found for found in known if found]
    return (len(hit) / len(known) if known else 0.0), set().union(*hit) if hit else set()


def _errors(host: HostTelemetry, index: int) -> list[str]:
    problems = []
    ecc = host.gpu_column(index, "ecc_uncorrected_total")[1]
    known = ecc[~np.isnan(ecc)]
    if len(known) > 1 and known[-1] > known[0]:
        problems.append(f"{int(known[-1] - known[0])} uncorrectable memory errors during the run")
    xids = sorted(
        {
            str(x)
            for found in host.gpu_values(index, "xid_errors")[1]
            if isinstance(found, list)
            for x in found
        }
    )
    if xids:
        problems.append(f"Xid {', '.join(xids)}")
    return problems


def telemetry_series(hosts: Mapping[str, HostTelemetry], started_ns: int | None) -> list[TelemetrySeries]:
    """Curves for the report, thinned."""
    result = []
    for name, host in hosts.items():
        origin = started_ns or int(host.header.get("started_ns") or 0)
        result += _curve(name, "cpu_percent", "%", host.host_column("cpu_percent"), origin)
        result += _curve(name, "memory_used_bytes", "bytes", host.host_column("memory_used_bytes"), origin)
        for gpu in host.gpus:
            index = int(gpu["index"])
            for field, unit in (
                ("gpu_utilization_percent", "%"),
                ("memory_used_bytes", "bytes"),
                ("power_watts", "W"),
                ("sm_clock_mhz", "MHz"),
                ("temperature_celsius", "°C"),
            ):
                result += _curve(f"{name} GPU {index}", field, unit, host.gpu_column(index, field), origin)
    return result


def _curve(source: str, field: str, unit: str, column: Column, origin: int) -> list[TelemetrySeries]:
    times, values = column
    if not len(values) or np.isnan(values).all():
        return []
    stride = -(-len(values) // _MOST_POINTS)
    return [
        TelemetrySeries(
            source=source,
            field=field,
            unit=unit,
            t_s=[round(float(t - origin) / 1e9, 3) for t in times[::stride]],
            values=[None if np.isnan(v) else round(float(v), 3) for v in values[::stride]],
        )
    ]
