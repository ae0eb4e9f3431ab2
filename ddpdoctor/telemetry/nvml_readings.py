"""Which NVML call gives which field, in which unit: tables that ``nvml.NvmlSampler`` works through.

Every function takes the ``pynvml`` module and a device handle and returns the field's value; it raises whatever NVML
raises. Field semantics: NVML API reference, https://docs.nvidia.com/deploy/nvml-api/ (group "Device Queries").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Reading = Callable[[Any, Any], object]

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


def _first_available(nv: Any, names: tuple[str, ...], *arguments: object) -> Any:
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


def _call(name: str, *arguments: object) -> Reading:
    return lambda nv, handle: getattr(nv, name)(handle, *arguments)


def _pci_bus_id(nv: Any, handle: Any) -> str:
    bus_id: Any = nv.nvmlDeviceGetPciInfo(handle).busId
    return str(bus_id.decode() if isinstance(bus_id, bytes) else bus_id)


def _throttle_reasons(nv: Any, handle: Any) -> list[str]:
    names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
    mask = _first_available(nv, names, handle)
    return [name for bit, name in THROTTLE_REASONS.items() if mask & bit]


def _temperature(nv: Any, handle: Any) -> object:
    return _first_available(nv, ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"), handle, 0)


STATIC_READINGS: Mapping[str, Reading] = {
    "uuid": _call("nvmlDeviceGetUUID"),
    "name": _call("nvmlDeviceGetName"),
    "pci_bus_id": _pci_bus_id,
    "memory_total_bytes": lambda nv, handle: nv.nvmlDeviceGetMemoryInfo(handle).total,
    "pcie_generation_max": _call("nvmlDeviceGetMaxPcieLinkGeneration"),
    "pcie_width_max": _call("nvmlDeviceGetMaxPcieLinkWidth"),
}
SAMPLE_READINGS: Mapping[str, Reading] = {
    "gpu_utilization_percent": lambda nv, handle: nv.nvmlDeviceGetUtilizationRates(handle).gpu,
    "memory_used_bytes": lambda nv, handle: nv.nvmlDeviceGetMemoryInfo(handle).used,
    "power_watts": lambda nv, handle: nv.nvmlDeviceGetPowerUsage(handle) * 1e-3,
    "sm_clock_mhz": _call("nvmlDeviceGetClockInfo", 1),
    "memory_clock_mhz": _call("nvmlDeviceGetClockInfo", 2),
    "temperature_celsius": _temperature,
    "throttle_reasons": _throttle_reasons,
    "pcie_generation": _call("nvmlDeviceGetCurrPcieLinkGeneration"),
    "pcie_width": _call("nvmlDeviceGetCurrPcieLinkWidth"),
    # Since the driver was loaded.
    "ecc_uncorrected_total": _call("nvmlDeviceGetTotalEccErrors", 1, 0),
}
