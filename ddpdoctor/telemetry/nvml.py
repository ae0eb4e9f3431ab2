"""Samples of every NVIDIA GPU of this host by NVML, whatever ``CUDA_VISIBLE_DEVICES`` says.

A field that a GPU or a driver does not give is None, never 0; each distinct NVML error is named once in
``notes``. Nothing here raises: telemetry must not be able to harm the job.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from ddpdoctor.rundir import Note, NoteCode

from .nvml_readings import SAMPLE_READINGS, STATIC_READINGS, Reading

_XIDS_A_SAMPLE = 64
_NULL_SAMPLE: dict[str, object] = dict.fromkeys([*SAMPLE_READINGS, "xid_errors"])


class _Gpu:
    """One GPU: its handle, and what it was found not to support."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.handle: Any = None
        self.lost = True
        self.unsupported: set[str] = set()
        self.events: Any = None


class NvmlSampler:
    """Opens NVML on construction; ``static`` then holds one dict a GPU, ``sample()`` gives one dict a GPU."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.static: list[dict[str, object]] = []
        self._named: set[str] = set()
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
        """One event set a GPU: waiting on a shared one fails for all of them as soon as one GPU is lost."""
        if gpu.lost:
            return
        try:
            events = self._nv.nvmlEventSetCreate()
            self._nv.nvmlDeviceRegisterEvents(gpu.handle, self._nv.nvmlEventTypeXidCriticalError, events)
            gpu.events = events
        except Exception as error:
            self._note(gpu, "xid_errors", error)

    def sample(self) -> list[dict[str, object]]:
        """One dict a GPU, in the order of ``static``."""
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
        """The Xid codes that arrived since the last sample."""
        if gpu.lost or gpu.events is None:
            return None
        codes: list[int] = []
        try:
            while len(codes) < _XIDS_A_SAMPLE:
                codes.append(int(self._nv.nvmlEventSetWait(gpu.events, 0).eventData))
        except Exception as error:
            if getattr(error, "value", None) != self._nv.NVML_ERROR_TIMEOUT:
                self._note(gpu, "xid_errors", error)
                return codes or None
        return codes

    def _note(self, gpu: _Gpu | None, field: str, error: Exception) -> None:
        """Name an error the first time it is seen, and ask no more for what will never be answered."""
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
                self._named.add(text)
                return
        if text not in self._named:
            self._named.add(text)
            self.notes.append(Note(f"NVML: {text}, first for {where}; a field with this error is null."))

    def close(self) -> None:
        """Free the event sets and leave NVML. May be called twice."""
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
