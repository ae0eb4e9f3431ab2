"""Devices as facts: from the kernels in the windows, and from what NVML read beside the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ddpdoctor.measure.facts import GpuFacts
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.telemetry import HostTelemetry
from ddpdoctor.measure.window import Window

from .kernels import device_numbers
from .nvml import gpu_readings


def gpu_facts(
    windows: Sequence[Window], logs: Sequence[RankLog], hosts: Mapping[str, HostTelemetry]
) -> GpuFacts:
    """What the devices did, median rank, and how their clocks, memory, links and errors were; None without either."""
    on_device = [window for window in windows if window.on_device]
    ranks = [device_numbers(window) for window in on_device]
    readings = gpu_readings(logs, hosts)
    return GpuFacts(
        busy_share=_median([rank.busy_share for rank in ranks]),
        idle_share=_median([rank.idle_share for rank in ranks]),
        kernels_per_step=_median([rank.kernels_per_step for rank in ranks]),
        optimizer_kernels_share=_median([rank.optimizer_kernels_share for rank in ranks]),
        median_kernel_us=_median([rank.median_kernel_us for rank in ranks]),
        tensor_core_share=_median([rank.tensor_core_share for rank in ranks]),
        matmul_share=_median([rank.matmul_share for rank in ranks]),
        pageable_copy_ms=_median([rank.pageable_copy_ms for rank in ranks]),
        copy_bytes_per_step=_median([rank.copy_bytes_per_step for rank in ranks]),
        compute_capability=_least_capability(on_device),
        utilization_percent=readings.utilization_percent,
        memory_used_share=readings.memory_used_share,
        throttled_ranks=readings.throttled_ranks,
        throttle_reasons=readings.throttle_reasons,
        throttled_share=readings.throttled_share,
        sm_clock_share=readings.sm_clock_share,
        narrow_link_ranks=readings.narrow_link_ranks,
        pcie_width=readings.pcie_width,
        pcie_width_max=readings.pcie_width_max,
        error_ranks=readings.error_ranks,
        errors=readings.errors,
        temperature_max_celsius=readings.temperature_max_celsius,
    )


def _median(values: Sequence[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _least_capability(windows: Sequence[Window]) -> float | None:
    """CUDA's compute capability of the oldest device."""
    versions = [
        float(f"{device['computeMajor']}.{device.get('computeMinor', 0)}")
        for window in windows
        for device in window.trace.meta.devices
        if device.get("computeMajor") is not None
    ]
    return min(versions, default=None)
