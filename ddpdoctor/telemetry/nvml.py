"""Samples every NVIDIA GPU of this host by NVML, regardless of ``CUDA_VISIBLE_DEVICES``.

A field that a GPU or a driver does not support is None, never 0. Each distinct NVML error adds one entry to ``notes``; no error is raised,
because telemetry must not affect the job. Meaning of the fields: NVML API reference, https://docs.nvidia.com/deploy/nvml-api/ (group
"Device Queries").
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from ddpdoctor.rundir.notes import Note, NoteCode

Reading = Callable[[Any, Any], object]
"""Function of the ``pynvml`` module and a device's handle that returns a field's value, in the unit of its name. Raises NVML's errors."""

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
    """Result of the first function that bindings and driver support. NVML has renamed some functions."""
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


_MAX_XIDS_PER_SAMPLE = 64
_NULL_SAMPLE: dict[str, object] = dict.fromkeys([*SAMPLE_READINGS, "xid_errors"])


class _Gpu:
    """State of one GPU between samples."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.handle: Any = None
        self.lost = True
        self.unsupported: set[str] = set()
        self.events: Any = None


class NvmlSampler:
    """Samples all GPUs; opens NVML on construction. ``static``: fixed facts, one dict per GPU."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.static: list[dict[str, object]] = []
        self._reported: set[str] = set()
        self._gpus: list[_Gpu] = []
        self._nv: Any = None
        try:
            self._open()
        except Exception as error:
            self._gpus, self.static = [], []
            self.notes = [_no_gpu(f"{_text(error)} (NVML)")]

    def _open(self) -> None:
        self._nv = importlib.import_module("pynvml")
        self._nv.nvmlInit()
        count = self._nv.nvmlDeviceGetCount()
        if count == 0:
            self.notes.append(_no_gpu("the NVIDIA driver is loaded but shows no GPU (NVML)"))
            return
        for index in range(count):
            gpu = _Gpu(index)
            self._gpus.append(gpu)
            try:
                gpu.handle = self._nv.nvmlDeviceGetHandleByIndex(index)
                gpu.lost = False
            except Exception as error:
                self._note(gpu, "handle", error)
            self.static.append({"index": index, **self._read(gpu, STATIC_READINGS)})
            self._watch_events(gpu)

    def _watch_events(self, gpu: _Gpu) -> None:
        """Register for Xid events. Each GPU has its own event set: waiting on a shared one fails for all GPUs if one is lost."""
        if gpu.lost:
            return
        try:
            events = self._nv.nvmlEventSetCreate()
            self._nv.nvmlDeviceRegisterEvents(gpu.handle, self._nv.nvmlEventTypeXidCriticalError, events)
            gpu.events = events
        except Exception as error:
            self._note(gpu, "xid_errors", error)

    def sample(self) -> list[dict[str, object]]:
        """Current values, one dict per GPU in the order of ``static``."""
        samples = []
        for gpu in self._gpus:
            values = {**self._read(gpu, SAMPLE_READINGS), "xid_errors": self._xids(gpu)}
            samples.append({"index": gpu.index, **(_NULL_SAMPLE if gpu.lost else values)})
        return samples

    def _read(self, gpu: _Gpu, readings: Mapping[str, Reading]) -> dict[str, object]:
        values: dict[str, object] = dict.fromkeys(readings)
        for field, read in readings.items():
            if gpu.lost or field in gpu.unsupported:
                continue
            try:
                values[field] = read(self._nv, gpu.handle)
            except Exception as error:
                self._note(gpu, field, error)
        return values

    def _xids(self, gpu: _Gpu) -> list[int] | None:
        """Xid codes since the last sample; None if unknown."""
        if gpu.lost or gpu.events is None:
            return None
        codes: list[int] = []
        try:
            while len(codes) < _MAX_XIDS_PER_SAMPLE:
                codes.append(int(self._nv.nvmlEventSetWait(gpu.events, 0).eventData))
        except Exception as error:
            if getattr(error, "value", None) != self._nv.NVML_ERROR_TIMEOUT:
                self._note(gpu, "xid_errors", error)
                return codes or None
        return codes

    def _note(self, gpu: _Gpu | None, field: str, error: Exception) -> None:
        """Note an error the first time it occurs, and stop reading unsupported fields."""
        nv, code, text = self._nv, getattr(error, "value", None), _text(error)
        where = field if gpu is None else f"{field} of GPU {gpu.index}"
        if gpu is not None:
            permanent = (
                nv.NVML_ERROR_NOT_SUPPORTED,
                nv.NVML_ERROR_FUNCTION_NOT_FOUND,
                nv.NVML_ERROR_NO_PERMISSION,
            )
            if code in permanent or isinstance(error, AttributeError):
                gpu.unsupported.add(field)
            if code in (nv.NVML_ERROR_GPU_IS_LOST, nv.NVML_ERROR_RESET_REQUIRED) and not gpu.lost:
                gpu.lost = True
                self.notes.append(
                    Note(f"NVML: GPU {gpu.index}: {text}, seen at {field}; it is no longer sampled.")
                )
                self._reported.add(text)
                return
        if text not in self._reported:
            self._reported.add(text)
            self.notes.append(Note(f"NVML: {text}, first for {where}; a field with this error is null."))

    def close(self) -> None:
        """Free the event sets and shut down NVML. May be called twice."""
        if not self._gpus:
            return
        try:
            for gpu in self._gpus:
                if gpu.events is not None:
                    self._nv.nvmlEventSetFree(gpu.events)
            self._nv.nvmlShutdown()
        except Exception as error:
            self._note(None, "shutdown", error)
        self._gpus = []


def _no_gpu(why: str) -> Note:
    return Note(f"No GPU telemetry: {why}.", NoteCode.NO_GPU)


def _text(error: Exception) -> str:
    if isinstance(error, AttributeError):
        return f"these nvidia-ml-py bindings lack a function ({error})"
    return str(error) or type(error).__name__
