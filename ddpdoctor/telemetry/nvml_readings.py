"""Which NVML call gives which field, in which unit: tables that ``nvml.NvmlSampler`` works through.

Every function takes the ``pynvml`` module and a device handle and returns one value a field, in the order of
the reading's ``fields``; it raises whatever NVML raises. Field semantics: NVML API reference,
https://docs.nvidia.com/deploy/nvml-api/ (groups "Device Queries", "NvLink Methods", "Field Value Queries").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Values = tuple[object, ...]


@dataclass(frozen=True)
class Reading:
    """One NVML query and the fields it fills."""

    fields: tuple[str, ...]
    read: Callable[[Any, Any], Values]


THROTTLE_REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clocks_setting",
}


def first_available(nv: Any, names: tuple[str, ...], *arguments: object) -> Any:
    """The result of the first function that both bindings and driver know: NVML renames them at times."""
    for name in names:
        function = getattr(nv, name, None)
        if function is None:
            continue
        try:
            return function(*arguments)
        except nv.NVMLError as error:
            if error.value != nv.NVML_ERROR_FUNCTION_NOT_FOUND:
                raise
    raise nv.NVMLError(nv.NVML_ERROR_FUNCTION_NOT_FOUND)


def _call(name: str, *arguments: object, scale: float | None = None) -> Callable[[Any, Any], Values]:
    def read(nv: Any, handle: Any) -> Values:
        value = getattr(nv, name)(handle, *arguments)
        return (value if scale is None else value * scale,)

    return read


def _enabled(name: str) -> Callable[[Any, Any], Values]:
    """The current one of a (current, pending) pair of modes."""

    def read(nv: Any, handle: Any) -> Values:
        return ("enabled" if getattr(nv, name)(handle)[0] else "disabled",)

    return read


def _pci_bus_id(nv: Any, handle: Any) -> Values:
    bus_id = nv.nvmlDeviceGetPciInfo(handle).busId
    return (bus_id.decode() if isinstance(bus_id, bytes) else bus_id,)


def _compute_capability(nv: Any, handle: Any) -> Values:
    major, minor = nv.nvmlDeviceGetCudaComputeCapability(handle)
    return (f"{major}.{minor}",)


def nvlink_links(nv: Any, handle: Any) -> list[int]:
    """The links whose state the driver tells. Raises the first error where it tells none."""
    links, first_error = [], None
    for link in range(nv.NVML_NVLINK_MAX_LINKS):
        try:
            nv.nvmlDeviceGetNvLinkState(handle, link)
        except nv.NVMLError as error:
            first_error = first_error or error
            # Past the last link of this GPU, or no NVLink at all: the further ones answer the same.
            if error.value in (nv.NVML_ERROR_INVALID_ARGUMENT, nv.NVML_ERROR_FUNCTION_NOT_FOUND):
                break
        else:
            links.append(link)
    if not links and first_error is not None:
        raise first_error
    return links


STATIC_READINGS = (
    Reading(("uuid",), _call("nvmlDeviceGetUUID")),
    Reading(("name",), _call("nvmlDeviceGetName")),
    Reading(("pci_bus_id",), _pci_bus_id),
    Reading(("memory_total_bytes",), lambda nv, handle: (nv.nvmlDeviceGetMemoryInfo(handle).total,)),
    Reading(("power_limit_watts",), _call("nvmlDeviceGetEnforcedPowerLimit", scale=1e-3)),
    Reading(("power_limit_default_watts",), _call("nvmlDeviceGetPowerManagementDefaultLimit", scale=1e-3)),
    Reading(("sm_clock_max_mhz",), _call("nvmlDeviceGetMaxClockInfo", 1)),
    Reading(("memory_clock_max_mhz",), _call("nvmlDeviceGetMaxClockInfo", 2)),
    Reading(("pcie_generation_max",), _call("nvmlDeviceGetMaxPcieLinkGeneration")),
    Reading(("pcie_width_max",), _call("nvmlDeviceGetMaxPcieLinkWidth")),
    Reading(("nvlink_count",), lambda nv, handle: (len(nvlink_links(nv, handle)),)),
    Reading(("compute_capability",), _compute_capability),
    Reading(("ecc_mode",), _enabled("nvmlDeviceGetEccMode")),
    Reading(("mig_mode",), _enabled("nvmlDeviceGetMigMode")),
    Reading(("slowdown_temperature_celsius",), _call("nvmlDeviceGetTemperatureThreshold", 1)),
)


def _utilization(nv: Any, handle: Any) -> Values:
    rates = nv.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu, rates.memory


def _throttle_reasons(nv: Any, handle: Any) -> Values:
    names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
    mask = first_available(nv, names, handle)
    return ([name for bit, name in THROTTLE_REASONS.items() if mask & bit],)


def _temperature(nv: Any, handle: Any) -> Values:
    return (first_available(nv, ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"), handle, 0),)


def _processes(nv: Any, handle: Any) -> Values:
    names = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")
    found = first_available(nv, names, handle)
    return ([{"pid": process.pid, "memory_used_bytes": process.usedGpuMemory} for process in found],)


def _violation_ns(policy: int) -> Callable[[Any, Any], Values]:
    return lambda nv, handle: (nv.nvmlDeviceGetViolationStatus(handle, policy).violationTime,)


SAMPLE_READINGS = (
    Reading(("gpu_utilization_percent", "memory_utilization_percent"), _utilization),
    Reading(("memory_used_bytes",), lambda nv, handle: (nv.nvmlDeviceGetMemoryInfo(handle).used,)),
    Reading(("power_watts",), _call("nvmlDeviceGetPowerUsage", scale=1e-3)),
    Reading(("power_limit_watts",), _call("nvmlDeviceGetEnforcedPowerLimit", scale=1e-3)),
    Reading(("sm_clock_mhz",), _call("nvmlDeviceGetClockInfo", 1)),
    Reading(("memory_clock_mhz",), _call("nvmlDeviceGetClockInfo", 2)),
    Reading(("temperature_celsius",), _temperature),
    # Hopper and later state no slowdown temperature, only the distance to it.
    Reading(("temperature_margin_celsius",), _call("nvmlDeviceGetMarginTemperature")),
    Reading(("throttle_reasons",), _throttle_reasons),
    Reading(("power_violation_ns",), _violation_ns(0)),
    Reading(("thermal_violation_ns",), _violation_ns(1)),
    Reading(("pcie_generation",), _call("nvmlDeviceGetCurrPcieLinkGeneration")),
    Reading(("pcie_width",), _call("nvmlDeviceGetCurrPcieLinkWidth")),
    Reading(("processes",), _processes),
)


def _field_values(nv: Any, handle: Any, field_ids: tuple[int, ...]) -> Values:
    """Unsigned 64-bit field values; None for one that this GPU lacks. Raises where it lacks them all."""
    found = nv.nvmlDeviceGetFieldValues(handle, list(field_ids))
    if all(value.nvmlReturn != nv.NVML_SUCCESS for value in found):
        raise nv.NVMLError(found[0].nvmlReturn)
    return tuple(
        (value.value.uiVal if value.valueType == nv.NVML_VALUE_TYPE_UNSIGNED_INT else value.value.ullVal)
        if value.nvmlReturn == nv.NVML_SUCCESS
        else None
        for value in found
    )


def _nvlink_errors(nv: Any, handle: Any) -> Values:
    totals = ("CRC_FLIT", "CRC_DATA", "REPLAY", "RECOVERY")
    ids = tuple(getattr(nv, f"NVML_FI_DEV_NVLINK_{name}_ERROR_COUNT_TOTAL") for name in totals)
    return _field_values(nv, handle, ids)


def _row_remapping(nv: Any, handle: Any) -> Values:
    corrected, uncorrected, pending, failed = nv.nvmlDeviceGetRemappedRows(handle)
    return corrected + uncorrected, bool(pending), bool(failed)


def _retired_pages_pending(nv: Any, handle: Any) -> Values:
    return (bool(nv.nvmlDeviceGetRetiredPagesPendingStatus(handle)),)


# Cheap enough, but they change rarely: read at the slow rate and once more at the end.
HEALTH_READINGS = (
    Reading(
        (
            "nvlink_crc_flit_errors",
            "nvlink_crc_data_errors",
            "nvlink_replay_errors",
            "nvlink_recovery_errors",
        ),
        _nvlink_errors,
    ),
    # Volatile counts: since the driver was loaded.
    Reading(("ecc_corrected_total",), _call("nvmlDeviceGetTotalEccErrors", 0, 0)),
    Reading(("ecc_uncorrected_total",), _call("nvmlDeviceGetTotalEccErrors", 1, 0)),
    Reading(("retired_pages_pending",), _retired_pages_pending),
    Reading(("remapped_rows", "remapped_rows_pending", "remapped_rows_failed"), _row_remapping),
)

# NVML counts bytes for 20 ms inside each of these calls, so they block the sampling thread for that long. In
# kB/s; tx is what the GPU sends.
PCIE_READINGS = (
    Reading(("pcie_tx_bytes_per_s",), _call("nvmlDeviceGetPcieThroughput", 0, scale=1000)),
    Reading(("pcie_rx_bytes_per_s",), _call("nvmlDeviceGetPcieThroughput", 1, scale=1000)),
)
