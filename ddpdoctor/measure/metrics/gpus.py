"""Facts about devices from the kernels in the windows, and from NVML's readings during the run (clocks, memory, links, errors)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.facts import GpuFacts
from ddpdoctor.measure.numerics import Intervals, Ints, Mask, covered, total, union_of
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.telemetry import HostTelemetry
from ddpdoctor.measure.window import Window, event_union, in_steps, launched_inside, optimizer_updates
from ddpdoctor.trace import classify

from .communication import communicating
from .hosts import during, largest, mean, readings, time_of_steps, within

_FAULTS = frozenset(("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown"))
"""Clock-event reasons due to heat or the power supply (NVML, nvmlClocksEventReasons)."""
_SLOWDOWNS = _FAULTS | {"sw_power_cap", "sync_boost"}
"""Reasons for which a busy GPU runs slower than it could. Healthy GPUs reach the power cap at full load."""
_THROTTLED_SHARE = 0.2
"""Share of a GPU's samples from which on it is throttled. Short power caps are normal on healthy GPUs."""
_LOWER_CLOCK = 0.95
"""A GPU with a mean SM clock below this part of the other GPUs' median is slower than they are. Clocks of equal GPUs at one power cap
differ by 1 to 3 %."""
_BUS_ID_CHARACTERS = 10
"""Number of last characters of a PCI bus id that are compared: ``00:1e.0`` and the last two digits of the domain, of which NVML writes
eight digits and torch four."""


PROGRAM_XIDS = frozenset(("13", "31", "43", "45", "68", "109"))
"""Xids due to an error or the end of a process that uses the GPU, while the GPU stays healthy: Graphics Engine Exception, GPU memory
page fault, GPU stopped processing, preemptive cleanup, video processor exception, context switch timeout. These are the Xids that
NVIDIA's device plugin for Kubernetes does not count against a GPU (internal/rm/health.go, "Application errors: the GPU should still be
healthy"). All others, such as 48, 63, 64, 69, 74, 79, 94, 95, 119 and 140, are errors of the GPU, its links or its driver
(https://docs.nvidia.com/deploy/xid-errors/)."""


class _LoweredClocks(NamedTuple):
    """The samples of a GPU in which its clocks were lowered."""

    share: float
    """Share of all samples."""
    reasons: frozenset[str]


class _Gpu(msgspec.Struct, frozen=True):
    rank: int
    utilization_percent: float | None
    memory_used_share: float | None
    sm_clock_mhz: float | None
    temperature_celsius: float | None
    """The highest reading."""
    slowed: _LoweredClocks
    """For any reason."""
    faulty: _LoweredClocks
    """For reasons due to heat or the power supply."""
    pcie_width: float
    """The largest reading, because an idle GPU narrows its link to save power. NaN if unknown."""
    pcie_width_max: float


def _nvml_facts(logs: Sequence[RankLog], hosts: Mapping[str, HostTelemetry]) -> GpuFacts:
    """Facts from NVML's readings of the ranks' GPUs; all None without readings."""
    gpus = _read_gpus(logs, hosts)
    if not gpus:
        return GpuFacts()
    errors = device_errors(logs, hosts)
    used = [gpu.utilization_percent for gpu in gpus if gpu.utilization_percent is not None]
    clocks = [gpu.sm_clock_mhz for gpu in gpus if gpu.sm_clock_mhz is not None]
    throttled = {gpu.rank: gpu.slowed for gpu in gpus if gpu.slowed.share >= _THROTTLED_SHARE}
    faulty = {gpu.rank: gpu.faulty for gpu in gpus if gpu.faulty.share >= _THROTTLED_SHARE}
    narrow = [gpu for gpu in gpus if gpu.pcie_width < gpu.pcie_width_max]
    return GpuFacts(
        utilization_percent=float(np.mean(used)) if used else None,
        memory_used_share=_largest([gpu.memory_used_share for gpu in gpus]),
        throttled_ranks=sorted(throttled),
        throttle_reasons=sorted(frozenset().union(*(of.reasons for of in throttled.values()))),
        throttled_share=max((of.share for of in throttled.values()), default=0.0),
        heat_or_power_ranks=sorted(faulty),
        heat_or_power_reasons=sorted(frozenset().union(*(of.reasons for of in faulty.values()))),
        heat_or_power_share=max((of.share for of in faulty.values()), default=0.0),
        sm_clock_share=_slowest_share(clocks),
        narrow_link_ranks=sorted(gpu.rank for gpu in narrow),
        pcie_width=narrow[-1].pcie_width if narrow else None,
        pcie_width_max=narrow[-1].pcie_width_max if narrow else None,
        error_ranks=sorted(errors),
        errors=[f"rank {rank}: {problem}" for rank, problems in errors.items() for problem in problems],
        temperature_max_celsius=_largest([gpu.temperature_celsius for gpu in gpus]),
    )


def _slowest_share(clocks: Sequence[float]) -> float | None:
    """The lowest clock relative to the median of the others; None without two."""
    slowest = int(np.argmin(clocks)) if len(clocks) > 1 else -1
    return clocks[slowest] / float(np.median(np.delete(clocks, slowest))) if slowest >= 0 else None


def throttled_beyond_others(logs: Sequence[RankLog], hosts: Mapping[str, HostTelemetry]) -> list[int]:
    """Return the ranks whose GPUs' clocks were lowered, and for more of the run, or further, than those of the other ranks. Only such
    clocks can explain that a rank computes longer than the others: at full load, all GPUs of a job may run at their power cap."""
    gpus = _read_gpus(logs, hosts)
    found = []
    for gpu in gpus:
        others = [other for other in gpus if other is not gpu]
        if gpu.slowed.share < _THROTTLED_SHARE or not others:
            continue
        clocks = [other.sm_clock_mhz for other in others if other.sm_clock_mhz is not None]
        is_slower = bool(clocks) and (gpu.sm_clock_mhz or np.inf) < _LOWER_CLOCK * float(np.median(clocks))
        usual = float(np.median([other.slowed.share for other in others]))
        if is_slower or gpu.slowed.share - usual >= _THROTTLED_SHARE:
            found.append(gpu.rank)
    return found


def device_errors(logs: Sequence[RankLog], hosts: Mapping[str, HostTelemetry]) -> dict[int, list[str]]:
    """Return rank → errors of its GPU that NVML counted during the run, as parts of sentences; only ranks with errors."""
    found = {rank: _problems(hosts[host], index) for rank, (host, index) in rank_gpus(logs, hosts).items()}
    return {rank: problems for rank, problems in found.items() if problems}


def program_errors(
    logs: Sequence[RankLog], hosts: Mapping[str, HostTelemetry]
) -> dict[int, list[tuple[int, str]]]:
    """Return rank → Xids due to programs on its GPU during the run: when the sample was taken (epoch ns), and a part of a sentence. Only
    ranks with such Xids. The program may be another process on the same GPU."""
    found = {}
    for rank, (host, index) in rank_gpus(logs, hosts).items():
        xids = [(at_ns, f"Xid {xid}") for at_ns, xid in _xids(hosts[host], index) if xid in PROGRAM_XIDS]
        if xids:
            found[rank] = xids
    return found


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def rank_gpus(logs: Sequence[RankLog], hosts: Mapping[str, HostTelemetry]) -> dict[int, tuple[str, int]]:
    """Return rank → (host, NVML index); only ranks for which both are known."""
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
    """NVML index of a rank's GPU: by UUID or PCI bus id, else that of the only GPU, else the CUDA index if all GPUs are visible."""
    for gpu in gpus:
        if _same_gpu(gpu, info):
            return int(gpu["index"])
    if len(gpus) == 1:
        return int(gpus[0]["index"])
    cuda_index = int(str(info["device"]).partition(":")[2] or 0)
    hidden = (info.get("environment") or {}).get("CUDA_VISIBLE_DEVICES")
    return cuda_index if not hidden and cuda_index < len(gpus) else None


def _same_gpu(gpu: dict[str, Any], info: dict[str, Any]) -> bool:
    """Whether NVML's ``gpu`` is the one in the rank's record."""
    uuid, pci = str(info.get("device_uuid") or ""), str(info.get("device_pci") or "").lower()
    own = str(gpu.get("uuid") or "")
    bus = str(gpu.get("pci_bus_id") or "").lower()
    return bool(uuid and own and own.removeprefix("GPU-") == uuid.removeprefix("GPU-")) or bool(
        pci and bus and bus.endswith(pci[-_BUS_ID_CHARACTERS:])
    )


def _read_gpus(logs: Sequence[RankLog], hosts: Mapping[str, HostTelemetry]) -> list[_Gpu]:
    """The readings of all ranks' GPUs; without ranks whose GPU is unknown."""
    spans = {name: time_of_steps([log for log in logs if log.host == name]) for name in hosts}
    placed = rank_gpus(logs, hosts).items()
    return [_read_gpu(rank, hosts[host], index, spans[host]) for rank, (host, index) in placed]


def _read_gpu(rank: int, host: HostTelemetry, index: int, span: Intervals | None) -> _Gpu:
    """The readings of one GPU; means and shares are over the time of the steps."""
    used, whole = memory_of_gpu(host, index)
    reasons = host.gpu_values(index, "throttle_reasons")
    width = largest(host.gpu_column(index, "pcie_width"))
    return _Gpu(
        rank,
        utilization_percent=mean(during(host.gpu_column(index, "gpu_utilization_percent"), span)),
        memory_used_share=used / whole if whole and used is not None else None,
        sm_clock_mhz=mean(during(host.gpu_column(index, "sm_clock_mhz"), span)),
        temperature_celsius=largest(host.gpu_column(index, "temperature_celsius")),
        slowed=_with_reasons(_SLOWDOWNS, *reasons, span),
        faulty=_with_reasons(_FAULTS, *reasons, span),
        pcie_width=np.nan if width is None else width,
        pcie_width_max=float(_static_info(host, index).get("pcie_width_max") or np.nan),
    )


def _static_info(host: HostTelemetry, index: int) -> dict[str, Any]:
    return next((gpu for gpu in host.gpus if gpu.get("index") == index), {})


def memory_of_gpu(host: HostTelemetry, index: int) -> tuple[float | None, float | None]:
    """Return peak and total memory of the GPU with this NVML index, bytes; None if not read."""
    whole = _static_info(host, index).get("memory_total_bytes")
    return largest(host.gpu_column(index, "memory_used_bytes")), float(whole) if whole else None


def _with_reasons(
    chosen: frozenset[str], times: Ints, samples: list[Any], span: Intervals | None
) -> _LoweredClocks:
    """The samples in ``span`` with any of the ``chosen`` reasons."""
    inside = [samples[place] for place in np.flatnonzero(within(times, span)).tolist()]
    known = [chosen.intersection(sample) for sample in inside if isinstance(sample, list)]
    slowed = [reasons for reasons in known if reasons]
    return _LoweredClocks(len(slowed) / len(known) if known else 0.0, frozenset().union(*slowed))


def _problems(host: HostTelemetry, index: int) -> list[str]:
    """Memory errors during the run, and errors of the GPU or its driver (Xid), as parts of sentences."""
    problems = []
    ecc = readings(host.gpu_column(index, "ecc_uncorrected_total"))
    if len(ecc) > 1 and ecc[-1] > ecc[0]:
        problems.append(f"{int(ecc[-1] - ecc[0])} uncorrectable memory errors during the run")
    xids = sorted({str(xid) for _, xid in _xids(host, index) if xid not in PROGRAM_XIDS})
    return [*problems, f"Xid {', '.join(xids)}"] if xids else problems


def _xids(host: HostTelemetry, index: int) -> Iterator[tuple[int, str]]:
    """Each Xid of the run, with the time of its sample (epoch ns)."""
    times, samples = host.gpu_values(index, "xid_errors")
    for at_ns, sample in zip(times.tolist(), samples, strict=True):
        if isinstance(sample, list):
            yield from ((at_ns, str(xid)) for xid in sample)


_MATMUL = (
    "gemm", "gemv", "conv", "cutlass", "cudnn", "implicit", "wgrad", "dgrad", "xmma", "nvjet", "fmha", "flash", "Cijk_"
)  # fmt: skip
"""Parts of the names of kernels that multiply matrices: cuBLAS (gemm, xmma, nvjet), cuDNN, CUTLASS, FlashAttention and rocBLAS (Cijk_)."""
_LAYOUT = ("nchwToNhwc", "nhwcToNchw")
"""Parts of the names of cuDNN's kernels that convert the memory layout of images."""
_OTHER_CUDNN = ("cudnn::bn_", "cudnn::ops::", *_LAYOUT)
"""Parts of the names of cuDNN's kernels that multiply no matrices: batch normalization, scaling, layouts."""
_TENSOR = re.compile(
    r"tensorop|(?<!x)mma|884|1688|16816|s161616|nvjet|fmha|flash|_f16|tf32|bf16|i8816|_i8|e4m3|e5m2",
    re.IGNORECASE,
)
"""Parts of the names of matrix multiplications on tensor cores: instructions (mma, wgmma), their shapes (16816 is m16n8k16), and types
that only tensor cores multiply. xmma, a library of cuBLAS and cuDNN, multiplies on either kind of cores."""
_TENSILE = re.compile(r"Cijk_[A-Za-z]+_[A-Za-z]+_(?:[HBI]|F8|B8).*_MI[0-9]+x[0-9]+")
"""Names of rocBLAS's and hipBLASLt's kernels (Tensile) on matrix cores (``MI``: the shape of the instruction) of types narrower than 32
bits: half (H), bfloat16 (B), 8-bit floats and integers."""


def _window_facts(window: Window, profiled_ratio: float) -> dict[str, float | None]:
    """Facts by name from the window of one rank with a device. ``profiled_ratio``: see :func:`gpu_facts`. Kernels of collectives do not
    count as computation."""
    trace, steps = window.trace, max(len(window.steps), 1)
    span_ns = max(window.span[1] - window.span[0], 1)
    own = in_steps(window)
    compute = own & trace.category_mask("kernel") & ~classify.communication_kernels(trace)
    matmul = compute & trace.name_mask(
        lambda name: _contains_any(name, _MATMUL) and not _contains_any(name, _OTHER_CUDNN)
    )
    tensor = matmul & trace.name_mask(
        lambda name: _TENSOR.search(name) is not None or _TENSILE.match(name) is not None
    )
    layout = compute & trace.name_mask(lambda name: _contains_any(name, _LAYOUT))
    count, compute_ns, matmul_ns, tensor_ns, layout_ns = (
        int(compute.sum()),
        *(float(trace.duration_ns[rows].sum()) for rows in (compute, matmul, tensor, layout)),
    )
    stepping = optimizer_updates(trace)
    of_optimizer = float((compute & launched_inside(trace, stepping)).sum()) / max(count, 1)
    busy = union_of(window.compute, communicating(window))
    return {
        "busy_share": min(1.0, profiled_ratio * total(window.compute) / span_ns),
        "idle_share": 1.0 - min(1.0, profiled_ratio * min(1.0, float(covered(busy, *window.span)) / span_ns)),
        "kernels_per_step": count / steps,
        "optimizer_kernels_share": of_optimizer if len(stepping[0]) else None,
        "median_kernel_us": float(np.median(trace.duration_ns[compute])) / 1e3 if count else None,
        "tensor_core_share": tensor_ns / matmul_ns if matmul_ns else None,
        "matmul_share": matmul_ns / compute_ns if compute_ns else None,
        "layout_share": layout_ns / compute_ns if compute_ns else None,
        **_copies(window, own, steps),
    }


def _contains_any(name: str, parts: Sequence[str]) -> bool:
    return any(part in name for part in parts)


def _copies(window: Window, own: Mask, steps: int) -> dict[str, float | None]:
    """Facts about host-to-device copies among the steps' ``own`` events: ms per step in copies from pageable memory (None if the copies'
    names do not show the kind of memory) and bytes per step. {} without such copies."""
    trace = window.trace
    to_device = own & trace.category_mask("gpu_memcpy")
    to_device &= trace.name_mask(lambda name: classify.memcpy_kind(name) == "HtoD")
    pageable = to_device & trace.name_mask(lambda name: "pageable" in name.lower())
    pinned = to_device & trace.name_mask(lambda name: "pinned" in name.lower())
    if not to_device.any():
        return {}
    moved, named = trace.bytes[to_device], bool((pageable | pinned).any())
    return {
        "pageable_copy_ms": total(event_union(trace, pageable)) / steps / 1e6 if named else None,
        "copy_bytes_per_step": float(moved[moved > 0].sum()) / steps,
    }


def gpu_facts(
    windows: Sequence[Window],
    logs: Sequence[RankLog],
    hosts: Mapping[str, HostTelemetry],
    profiled_ratio: float = 1.0,
) -> GpuFacts:
    """Return the facts about devices: their work in the windows (median rank), and their clocks, memory, links and errors.
    ``profiled_ratio``: length of a profiled step / length of an unprofiled step."""
    on_device = [window for window in windows if window.on_device]
    ranks = [_window_facts(window, profiled_ratio) for window in on_device]
    return replace(
        _nvml_facts(logs, hosts),
        **{name: _median([rank.get(name) for rank in ranks]) for name in {*chain(*ranks)}},
        compute_capability=min(map(float, _capabilities(on_device)), default=None),
        shared_ranks=_shared_ranks(on_device, logs),
        per_host=min((len(host.gpus) for host in hosts.values() if host.gpus), default=None),
    )


def _shared_ranks(windows: Sequence[Window], logs: Sequence[RankLog]) -> list[int] | None:
    """Ranks that share a GPU with another rank; None if the GPUs of fewer than two ranks are known.

    A rank's record has the current device, but the model may be on another, so the window must have kernels on this device only. MIG
    instances (on AMD: partitions) may all have the UUID of the whole GPU.
    """
    used = {
        window.rank: np.unique(window.trace.device[window.trace.category_mask("kernel")])
        for window in windows
    }
    ranks: dict[str, list[int]] = {}
    for log in logs:
        info, devices = log.record.info, used.get(log.rank, np.empty(0))
        uuid, whole = info.get("device_uuid"), "MIG" not in str(info.get("device_name"))
        if (
            uuid
            and whole
            and info.get("cuda")
            and [f"cuda:{device}" for device in devices] == [info.get("device")]
        ):
            ranks.setdefault(uuid, []).append(log.rank)
    known = list(ranks.values())
    shared = sorted(rank for together in known if len(together) > 1 for rank in together)
    return shared if sum(map(len, known)) > 1 else None


def _median(values: Sequence[float | None]) -> float | None:
    """Median of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _capabilities(windows: Sequence[Window]) -> Iterator[str]:
    for window in windows:
        for device in window.trace.meta.devices:
            if device.get("computeMajor") is not None:
                yield f"{device['computeMajor']}.{device.get('computeMinor', 0)}"
