"""Samples of this host by psutil and its control groups.

Rates are over the time since the previous sample and null in the first one. Values that are not available are null.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from ddpdoctor.rundir.notes import Note

from .cgroup import Cgroup

HOST_FIELDS = (
    *("cpu_percent", "iowait_percent", "memory_used_bytes", "memory_available_bytes"),
    *("swap_in_bytes_per_s", "swap_out_bytes_per_s", "cgroup_memory_free_bytes"),
)


def numa_nodes(file: str = "/sys/devices/system/node/has_cpu") -> int | None:
    """Number of NUMA nodes that have CPUs (others are memory, such as a GPU's); None where the kernel does not say it."""
    try:
        text = Path(file).read_text(encoding="ascii").strip()
        spans = [span.split("-") for span in text.split(",") if span]
        return sum(int(span[-1]) - int(span[0]) + 1 for span in spans) or None
    except (OSError, ValueError):
        return None


class HostSampler:
    """``facts`` are read once, ``sample()`` each time. Each kind of failure becomes one entry in ``notes``."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self._failed: set[str] = set()
        self._cgroup = Cgroup()
        self._cpu_before: dict[str, float] | None = None
        self._swapped_before: tuple[float, float] | None = None
        self._before_s: float | None = None
        self.facts = self._facts()

    def _facts(self) -> dict[str, object]:
        return {
            "cpu_count_logical": self._try("cpu_count", psutil.cpu_count),
            "cpu_count_usable": self._try("cpu_affinity", lambda: len(psutil.Process().cpu_affinity())),
            "numa_nodes": numa_nodes(),
            "cgroup_cpu_limit_cores": self._try("cgroup", self._cgroup.cpu_limit_cores),
            "memory_total_bytes": self._try("memory", lambda: psutil.virtual_memory().total),
            "cgroup_memory_limit_bytes": self._try("cgroup", self._cgroup.memory_limit_bytes),
        }

    def sample(self) -> dict[str, object]:
        """The values of ``HOST_FIELDS``."""
        now_s = time.monotonic()
        elapsed_s = 0.0 if self._before_s is None else now_s - self._before_s
        self._before_s = now_s
        parts: tuple[tuple[str, Callable[[], dict[str, object]]], ...] = (
            ("cpu", self._cpu),
            ("memory", _memory),
            ("swap", lambda: self._swap(elapsed_s)),
            ("cgroup", lambda: {"cgroup_memory_free_bytes": self._cgroup.free_memory_bytes()}),
        )
        values = dict.fromkeys(HOST_FIELDS)
        for name, part in parts:
            values |= self._try(name, part) or {}
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
        """Shares of CPU time since the last sample, of all cores together, in percent."""
        now: dict[str, float] = psutil.cpu_times()._asdict()
        before, self._cpu_before = self._cpu_before, now
        if before is None:
            return {}
        spent = {field: seconds - before.get(field, 0.0) for field, seconds in now.items()}
        # Guest time is part of user time already.
        total_s = sum(spent.values()) - spent.get("guest", 0.0) - spent.get("guest_nice", 0.0)
        if total_s <= 0:
            return {}
        waited_s = spent.get("iowait", 0.0)
        busy = min(1.0, max(0.0, 1.0 - (spent["idle"] + waited_s) / total_s))
        # The kernel's iowait may decrease by a tick.
        iowait = round(100.0 * max(0.0, waited_s) / total_s, 2) if "iowait" in spent else None
        return {"cpu_percent": round(100.0 * busy, 2), "iowait_percent": iowait}

    def _swap(self, elapsed_s: float) -> dict[str, object]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # psutil warns where /proc/vmstat is hidden
            swap = psutil.swap_memory()
        before, self._swapped_before = self._swapped_before or (None, None), (swap.sin, swap.sout)
        return {
            "swap_in_bytes_per_s": rate(swap.sin, before[0], elapsed_s),
            "swap_out_bytes_per_s": rate(swap.sout, before[1], elapsed_s),
        }


def rate(now: float | None, before: float | None, elapsed_s: float) -> float | None:
    """Counts per second; None without two readings, without time between, or for a counter that was reset."""
    if now is None or before is None or elapsed_s <= 0 or now < before:
        return None
    return (now - before) / elapsed_s


def _memory() -> dict[str, object]:
    memory = psutil.virtual_memory()
    return {"memory_used_bytes": memory.used, "memory_available_bytes": memory.available}
