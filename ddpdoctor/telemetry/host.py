"""Samples of this host by psutil, /proc/read.pressure, cgroups and the RDMA ports' own counters.

Rates are over the time since the previous sample and null in the first one. What the system does not tell is
null.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import psutil

from ddpdoctor.rundir import Note

from . import host_readings as read
from .cgroup import Cgroup

HOST_FIELDS = (
    *("cpu_percent", "cpu_per_core_percent", "iowait_percent", "steal_percent"),
    *("load_average_1m", "load_average_5m", "load_average_15m"),
    *("memory_used_bytes", "memory_available_bytes", "swap_used_bytes"),
    *("swap_in_bytes_per_s", "swap_out_bytes_per_s"),
    *("disk_read_bytes_per_s", "disk_write_bytes_per_s", "disk_busy_max_percent"),
    *("network", "rdma"),
    *("pressure_cpu_some_percent", "pressure_memory_some_percent", "pressure_memory_full_percent"),
    *("pressure_io_some_percent", "pressure_io_full_percent"),
    *("cgroup_throttled_usec", "cgroup_cpu_periods", "cgroup_cpu_throttled_periods"),
    *("cgroup_memory_used_bytes", "cgroup_memory_free_bytes"),
)


class HostSampler:
    """``facts`` once, ``sample()`` as often as wanted. What fails is named once in ``notes``."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self._failed: set[str] = set()
        self._cgroup = Cgroup()
        self._before: dict[str, float] = {}
        self._before_s: float | None = None
        self._cpu_before: list[Any] = []
        self.facts = self._facts()

    def _facts(self) -> dict[str, object]:
        facts: dict[str, object] = {"host": socket.gethostname(), "boot_time_s": None}
        facts["cpu_count_logical"] = self._try("cpu_count", psutil.cpu_count)
        facts["cpu_count_physical"] = self._try("cpu_count", lambda: psutil.cpu_count(logical=False))
        facts["cpu_count_usable"] = self._try("cpu_affinity", lambda: len(psutil.Process().cpu_affinity()))
        facts["memory_total_bytes"] = self._try("memory", lambda: psutil.virtual_memory().total)
        facts["swap_total_bytes"] = self._try("swap", lambda: read.swap().total)
        facts["boot_time_s"] = self._try("boot_time", psutil.boot_time)
        facts["network_interfaces"] = self._try("network_interfaces", read.interfaces)
        facts["rdma_ports"] = self._try(
            "rdma", lambda: {name: read.text(port / "rate") for name, port in read.rdma_ports()}
        )
        return facts | (self._try("cgroup", self._cgroup.facts) or {})

    def sample(self) -> dict[str, object]:
        """``HOST_FIELDS``: numbers, but a list ``cpu_per_core_percent`` and dicts ``network``, ``rdma``."""
        now_s = time.monotonic()
        elapsed_s = 0.0 if self._before_s is None else now_s - self._before_s
        counters: dict[str, float] = {}

        def per_s(name: str, count: float | None) -> float | None:
            if count is None:
                return None
            counters[name] = count
            return read.rate(count, self._before.get(name), elapsed_s)

        parts: tuple[tuple[str, Callable[[], dict[str, object]]], ...] = (
            ("cpu", self._cpu),
            ("load", read.load),
            ("memory", read.memory),
            ("swap", lambda: read.swap_sample(per_s)),
            ("disk", lambda: read.disk(per_s)),
            ("network", lambda: {"network": read.network(per_s)}),
            ("rdma", lambda: {"rdma": read.rdma(per_s)}),
            ("pressure", read.pressure),
            ("cgroup", self._cgroup.sample),
        )
        values = dict.fromkeys(HOST_FIELDS)
        for name, part in parts:
            values |= self._try(name, part) or {}
        self._before, self._before_s = counters, now_s
        return values

    def _try(self, name: str, reading: Callable[[], Any]) -> Any:
        try:
            return reading()
        except Exception as error:
            if name not in self._failed:
                self._failed.add(name)
                reason = error or type(error).__name__
                self.notes.append(Note(f"Host telemetry: {name} cannot be read: {reason}."))
            return None

    def _cpu(self) -> dict[str, object]:
        """Shares of CPU time since the last sample, of all cores together and of each."""
        now = psutil.cpu_times(percpu=True)
        before, self._cpu_before = self._cpu_before, now
        if len(before) != len(now):
            return {}
        cores = [
            {field: getattr(later, field) - getattr(earlier, field) for field in later._fields}
            for earlier, later in zip(before, now)
        ]
        totals = {field: sum(core[field] for core in cores) for field in cores[0]}
        return {
            "cpu_percent": read.busy_percent(totals),
            "cpu_per_core_percent": [read.busy_percent(core) for core in cores],
            "iowait_percent": read.share_percent(totals, "iowait"),
            "steal_percent": read.share_percent(totals, "steal"),
        }
