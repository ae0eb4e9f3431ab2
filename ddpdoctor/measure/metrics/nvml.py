"""What NVML read of the ranks' GPUs while the job ran: clocks, memory, links, errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ddpdoctor.measure.numerics import Ints
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.telemetry import HostTelemetry

from .columns import Span, during, mean, most, readings, steps_span

_SLOWDOWNS = frozenset(
    {
        "hw_slowdown",
        "hw_thermal_slowdown",
        "sw_thermal_slowdown",
        "hw_power_brake_slowdown",
        "sw_power_cap",
        "sync_boost",
    }
)
"""Clock-event reasons under which a busy GPU runs slower than it could (NVML, nvmlClocksEventReasons)."""
_THROTTLED_SHARE = 0.2
"""Of a GPU's samples, from which on it is throttled: short caps of power come and go on healthy GPUs."""
_BUS_ID_CHARACTERS = 10
"""Of a PCI bus id, from its end: ``00:1e.0`` and the last two digits of the domain, of which NVML writes eight, torch four."""


class GpuReadings(msgspec.Struct, frozen=True):
    """Over all ranks' GPUs, for the facts of the same names; all None where no GPU of a rank was read."""

    utilization_percent: float | None = None
    memory_used_share: float | None = None
    throttled_ranks: list[int] | None = None
    throttle_reasons: list[str] | None = None
    throttled_share: float | None = None
    sm_clock_share: float | None = None
    narrow_link_ranks: list[int] | None = None
    pcie_width: float | None = None
    pcie_width_max: float | None = None
    error_ranks: list[int] | None = None
    errors: list[str] | None = None
    temperature_max_celsius: float | None = None


class _Gpu(msgspec.Struct, frozen=True):
    """What was read of one rank's GPU."""

    rank: int
    utilization_percent: float | None
    memory_used_share: float | None
    sm_clock_mhz: float | None
    temperature_celsius: float | None
    """The hottest reading."""
    slowed_share: float
    """Share of the samples with a reason for slower clocks."""
    slowed_by: frozenset[str]
    pcie_width: float | None
    """The widest link seen: an idle GPU narrows it to save power."""
    pcie_width_max: float | None
    problems: list[str]

    @property
    def throttled(self) -> bool:
        return self.slowed_share >= _THROTTLED_SHARE

    @property
    def narrow(self) -> bool:
        """Whether its link is narrower than it could be."""
        width, widest = self.pcie_width, self.pcie_width_max
        return width is not None and bool(widest) and width < (widest or 0.0)


def gpu_readings(logs: Sequence[RankLog], hosts: Mapping[str, HostTelemetry]) -> GpuReadings:
    """What NVML read of the GPUs on which the ranks ran."""
    spans = {name: steps_span([log for log in logs if log.host == name]) for name in hosts}
    placed = rank_gpus(logs, hosts).items()
    gpus = [_read(rank, hosts[host], index, spans[host]) for rank, (host, index) in placed]
    if not gpus:
        return GpuReadings()
    used = [gpu.utilization_percent for gpu in gpus if gpu.utilization_percent is not None]
    clocks = [gpu.sm_clock_mhz for gpu in gpus if gpu.sm_clock_mhz is not None]
    throttled = [gpu for gpu in gpus if gpu.throttled]
    narrow = [gpu for gpu in gpus if gpu.narrow]
    return GpuReadings(
        utilization_percent=float(np.mean(used)) if used else None,
        memory_used_share=_largest([gpu.memory_used_share for gpu in gpus]),
        throttled_ranks=sorted(gpu.rank for gpu in throttled),
        throttle_reasons=sorted(frozenset().union(*(gpu.slowed_by for gpu in throttled))),
        throttled_share=max((gpu.slowed_share for gpu in throttled), default=0.0),
        sm_clock_share=min(clocks) / float(np.median(clocks)) if clocks else None,
        narrow_link_ranks=sorted(gpu.rank for gpu in narrow),
        pcie_width=narrow[-1].pcie_width if narrow else None,
        pcie_width_max=narrow[-1].pcie_width_max if narrow else None,
        error_ranks=sorted(gpu.rank for gpu in gpus if gpu.problems),
        errors=[f"rank {gpu.rank}: {problem}" for gpu in gpus for problem in gpu.problems],
        temperature_max_celsius=_largest([gpu.temperature_celsius for gpu in gpus]),
    )


def device_errors(logs: Sequence[RankLog], hosts: Mapping[str, HostTelemetry]) -> dict[int, list[str]]:
    """Rank → what NVML counted on its GPU during the run, parts of sentences; only of those with any."""
    found = {rank: _problems(hosts[host], index) for rank, (host, index) in rank_gpus(logs, hosts).items()}
    return {rank: problems for rank, problems in found.items() if problems}


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def rank_gpus(logs: Sequence[RankLog], hosts: Mapping[str, HostTelemetry]) -> dict[int, tuple[str, int]]:
    """Rank → (host, NVML index), where both are known."""
    placed = {}
    for log in logs:
        host = hosts.get(log.host)
        if host is None or not str(log.record.info.get("device") or "").startswith("cuda"):
            continue
        index = _index_of(log.record.info, host.gpus)
        if index is not None:
            placed[log.rank] = (log.host, index)
    return placed


def _index_of(info: dict[str, Any], gpus: list[dict[str, Any]]) -> int | None:
    """NVML index of a rank's GPU: by UUID or PCI bus id, else the only GPU, else the CUDA index where all GPUs are
    visible."""
    for gpu in gpus:
        if _same_gpu(gpu, info):
            return int(gpu["index"])
    if len(gpus) == 1:
        return int(gpus[0]["index"])
    cuda_index = int(str(info["device"]).partition(":")[2] or 0)
    hidden = (info.get("environment") or {}).get("CUDA_VISIBLE_DEVICES")
    return cuda_index if not hidden and cuda_index < len(gpus) else None


def _same_gpu(gpu: dict[str, Any], info: dict[str, Any]) -> bool:
    """Whether NVML's ``gpu`` is the one that the rank names."""
    uuid, pci = str(info.get("device_uuid") or ""), str(info.get("device_pci") or "").lower()
    own = str(gpu.get("uuid") or "")
    bus = str(gpu.get("pci_bus_id") or "").lower()
    return bool(uuid and own and own.removeprefix("GPU-") == uuid.removeprefix("GPU-")) or bool(
        pci and bus and bus.endswith(pci[-_BUS_ID_CHARACTERS:])
    )


def _read(rank: int, host: HostTelemetry, index: int, span: Span | None) -> _Gpu:
    """Everything of one GPU; means and shares while the steps ran."""
    static = next((gpu for gpu in host.gpus if gpu.get("index") == index), {})
    used, whole = most(host.gpu_column(index, "memory_used_bytes")), static.get("memory_total_bytes")
    slowed_share, slowed_by = _slowdowns(*host.gpu_values(index, "throttle_reasons"), span)
    widest = static.get("pcie_width_max")
    return _Gpu(
        rank,
        utilization_percent=mean(during(host.gpu_column(index, "gpu_utilization_percent"), span)),
        memory_used_share=used / whole if whole and used is not None else None,
        sm_clock_mhz=mean(during(host.gpu_column(index, "sm_clock_mhz"), span)),
        temperature_celsius=most(host.gpu_column(index, "temperature_celsius")),
        slowed_share=slowed_share,
        slowed_by=slowed_by,
        pcie_width=most(host.gpu_column(index, "pcie_width")),
        pcie_width_max=float(widest) if widest else None,
        problems=_problems(host, index),
    )


def _slowdowns(times: Ints, samples: list[Any], span: Span | None) -> tuple[float, frozenset[str]]:
    """Share of the samples in this time with a reason for slower clocks, and all these reasons."""
    low, high = span or (0, np.iinfo(np.int64).max)
    inside = [sample for at, sample in zip(times.tolist(), samples, strict=True) if low <= at <= high]
    known = [_SLOWDOWNS.intersection(sample) for sample in inside if isinstance(sample, list)]
    slowed = [reasons for reasons in known if reasons]
    return (len(slowed) / len(known) if known else 0.0), frozenset().union(*slowed)


def _problems(host: HostTelemetry, index: int) -> list[str]:
    """Memory errors that were counted during the run, and errors of the driver (Xid), as sentences' parts."""
    problems = []
    ecc = readings(host.gpu_column(index, "ecc_uncorrected_total"))
    if len(ecc) > 1 and ecc[-1] > ecc[0]:
        problems.append(f"{int(ecc[-1] - ecc[0])} uncorrectable memory errors during the run")
    samples = host.gpu_values(index, "xid_errors")[1]
    xids = sorted({str(xid) for sample in samples if isinstance(sample, list) for xid in sample})
    if xids:
        problems.append(f"Xid {', '.join(xids)}")
    return problems
