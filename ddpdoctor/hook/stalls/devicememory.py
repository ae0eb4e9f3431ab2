"""Memory of a rank's tensors on its device, and the phase of the step: torch's own counters, read by the status
thread.

The caching allocator keeps these counters on the host: reading them involves no device and waits for no work. They are
read once a second, at a random moment of it, so that together the samples show each phase, also of steps of equal
length. Peaks are torch's own, since the job began or last reset them; they are never reset here, because the job may
read them, too.
"""

from __future__ import annotations

import time
from typing import Any

from ...rundir import MEMORY_FILE, MEMORY_SCHEMA, encoded
from ..guard import part
from ..job import job_torch
from ..patching import guarded
from ..recording import Session
from .rank_status import RankStatus

SAME_LOOKS = 600
"""Samples at one interval, which then doubles: ten minutes show a leak in a short job, and a line of 200 bytes a
second would be 17 MB a day."""
_PART = part("device memory")


class DeviceMemory:
    """Samples of device memory of one recording."""

    def __init__(self, session: Session, status: RankStatus) -> None:
        self._session, self._status = session, status
        self._calls = self._looks = 0
        self._every = 1
        self.look = guarded(_PART, self._look)
        """Call once a second, always on the same thread."""

    @property
    def there(self) -> bool:
        """Whether the job has used a device by now."""
        devices = self._session.devices
        return devices is not None and devices.device is not None

    def _look(self) -> None:
        devices = self._session.devices
        if devices is None or devices.device is None:
            return
        self._calls += 1
        if self._calls % self._every:
            return
        lines = [encoded(self._now(devices.device))]
        if not self._looks:
            total = job_torch().cuda.get_device_properties(devices.device).total_memory
            head = {"schema": MEMORY_SCHEMA, "device": f"cuda:{devices.device}", "total_bytes": total}
            lines.insert(0, encoded(head))
        self._looks += 1
        if not self._looks % SAME_LOOKS:
            self._every *= 2
        self._session.spool.write(MEMORY_FILE, b"".join(line + b"\n" for line in lines))

    def _now(self, device: int) -> dict[str, Any]:
        phase = self._status.phase()
        # By its number: the current device is each thread's own.
        counters = job_torch().cuda.memory_stats_as_nested_dict(device)
        allocated, reserved = (counters[f"{kind}_bytes"]["all"] for kind in ("allocated", "reserved"))
        return {
            "t_ns": time.time_ns(),
            "step": self._session.recorder.step,
            "phase": None if phase is None else phase.value,
            "allocated_bytes": allocated["current"],
            "reserved_bytes": reserved["current"],
            "allocated_peak_bytes": allocated["peak"],
            "reserved_peak_bytes": reserved["peak"],
            "retries": counters.get("num_alloc_retries"),
        }
