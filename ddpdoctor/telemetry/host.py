"""Samples this host from /proc, and reads the control groups (v1 and v2) of a process: CPU and memory limits, and free memory.

Rates are over the time since the previous sample and null in the first one. Values that are not available are null.
Sources: Linux Documentation/admin-guide/cgroup-v2.rst (cpu.max, memory.max) and, for v1, scheduler/sched-bwc.rst.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from ddpdoctor.rundir.notes import Note

from .procfs import counts_in, text_of

# cgroup v1 writes the largest page-aligned number for "no limit"; real limits are far smaller.
_NO_LIMIT_BYTES = 1 << 60
_MEMORY_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


class Cgroup:
    """The folders of a process's cgroup, from its own level up to the root: any level may have a limit."""

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self.version: int | None = None
        self._cpu: list[Path] = []
        self._memory: list[Path] = []
        try:
            groups = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
            paths = {controller: path for _, names, path in groups for controller in names.split(",")}
            mounts = list(_mounts(proc / "mountinfo"))
        except (OSError, ValueError):
            return
        for kind, root, point, controllers in mounts:
            if kind == "cgroup2" and "" in paths:
                levels = _levels(point, root, paths[""])
                if any((level / "cgroup.controllers").is_file() for level in levels) and self.version is None:
                    self.version, self._unified = 2, levels
            elif kind == "cgroup" and "cpu" in controllers and "cpu" in paths:
                self.version, self._cpu = 1, _levels(point, root, paths["cpu"])
            elif kind == "cgroup" and "memory" in controllers and "memory" in paths:
                self.version, self._memory = 1, _levels(point, root, paths["memory"])
        if self.version == 2:
            self._cpu = self._memory = self._unified

    def cpu_limit_cores(self) -> float | None:
        """Lowest CPU limit of all levels, in cores; None without a cgroup or a limit."""
        return min(
            (limit for level in self._cpu if (limit := _cpu_limit_cores(level)) is not None), default=None
        )

    def memory_limit_bytes(self) -> int | None:
        """Lowest memory limit of all levels, in bytes; None without a cgroup or a limit."""
        return min((limit for limit, _, _ in self._limits()), default=None)

    def free_memory_bytes(self) -> int | None:
        """Smallest amount of free memory below the limits of all levels, in bytes; page cache counts as free. None without a limit."""
        free = []
        for limit, used, level in self._limits():
            if used is not None:
                cached = counts_in(str(level / "memory.stat"), ("active_file", "inactive_file"))
                files = cached.get("active_file", 0) + cached.get("inactive_file", 0)
                free.append(max(limit - max(used - files, 0), 0))
        return min(free, default=None)

    def _limits(self) -> Iterator[tuple[int, int | None, Path]]:
        """(Limit, usage, folder) of each level that limits memory. Bytes; the usage is None if unknown."""
        for level in self._memory:
            for limits, uses in _MEMORY_FILES:
                limit = _number(level / limits)
                if limit is not None and limit < _NO_LIMIT_BYTES:
                    yield limit, _number(level / uses), level

    @property
    def memory_folder(self) -> Path | None:
        """The folder of the process's own level, with its memory counters; None without a cgroup."""
        return self._memory[0] if self._memory else None

    def oom_kills(self) -> int | None:
        """Number of OOM kills in the process's own level; None if the kernel does not count them."""
        for level in self._memory[:1]:
            for name in ("memory.events", "memory.oom_control"):
                count = counts_in(str(level / name), ("oom_kill",)).get("oom_kill")
                if count is not None:
                    return count
        return None


_EXIT_S = 10.0
"""Longest time between the kernel's count of a kill and the end of the killed process, which frees its memory in between."""


class OomKills:
    """Counts the processes of one control group that the kernel killed for lack of memory just before a rank of it ended. Ranks of several
    attempts and other programs may share the group."""

    def __init__(self, group: Cgroup) -> None:
        self._group = group
        self.total = group.oom_kills() or 0
        """The kernel's count at the last ``update``."""
        self._before = self.total
        """The count without the kills of the last ``_EXIT_S``."""
        self._rose_s = time.monotonic()
        """When the count last rose."""

    def update(self) -> None:
        """Read the kernel's count; call this at each poll."""
        now_s, total = time.monotonic(), self._group.oom_kills()
        if now_s - self._rose_s > _EXIT_S:
            self._before = self.total
        if total is None:
            return
        if total > self.total:
            self._rose_s = now_s
        self.total, self._before = total, min(self._before, total)  # a group of the same name counts from 0

    def recent(self, began: int = 0) -> int:
        """Number of kills within the last ``_EXIT_S`` and after the count was ``began``."""
        return self.total - max(self._before, began)


def _mounts(mountinfo: Path) -> Iterator[tuple[str, str, Path, list[str]]]:
    """(file system, root within it, mount point, super options) of each cgroup mount."""
    for line in mountinfo.read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            fields = left.split(" ")
            yield kind, fields[3], Path(fields[4]), options.split(",")


def _levels(point: Path, root: str, path: str) -> list[Path]:
    """The cgroup's own folder, then its parents up to the mount point. A container may see only a part of the tree."""
    own = PurePosixPath(path)
    relative = own.relative_to(root) if own.is_relative_to(root) else PurePosixPath()
    folder = point / str(relative).lstrip("/")
    levels = [folder, *folder.parents]
    return (
        [level for level in levels[: levels.index(point) + 1] if level.is_dir()]
        if point in levels
        else [point]
    )


def _cpu_limit_cores(level: Path) -> float | None:
    try:
        if (level / "cpu.max").is_file():
            quota, period = (level / "cpu.max").read_text().split()
        else:
            quota, period = (
                (level / "cpu.cfs_quota_us").read_text(),
                (level / "cpu.cfs_period_us").read_text(),
            )
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # "max" is not a number: no limit
        return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


_MEMORY, _PROCESSORS = "/proc/meminfo", "/proc/stat"
_MEMORY_KINDS = ("MemTotal", "MemFree", "MemAvailable", "Buffers", "Cached")
_CPU_TIME_KINDS = (
    *("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "guest_nice"),
)
_SWAPPED_PAGE_BYTES = 4096

HOST_FIELDS = (
    *("cpu_percent", "iowait_percent", "memory_used_bytes", "memory_available_bytes"),
    *("swap_in_bytes_per_s", "swap_out_bytes_per_s", "cgroup_memory_free_bytes"),
)


def numa_nodes(file: str = "/sys/devices/system/node/has_cpu") -> int | None:
    """Number of NUMA nodes that have CPUs (others have memory only, such as a GPU's); None if unknown."""
    try:
        text = Path(file).read_text(encoding="ascii").strip()
        spans = [span.split("-") for span in text.split(",") if span]
        return sum(int(span[-1]) - int(span[0]) + 1 for span in spans) or None
    except (OSError, ValueError):
        return None


class HostSampler:
    """Samples this host. ``facts`` are read once, ``sample()`` each time. Each kind of failure adds one entry to ``notes``."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self._failed: set[str] = set()
        self._cgroup = Cgroup()
        self._cpu_before: dict[str, int] | None = None
        self._swapped_before: tuple[int | None, int | None] = (None, None)
        self._before_s: float | None = None
        self.facts = self._facts()

    def _facts(self) -> dict[str, object]:
        return {
            "cpu_count_logical": os.cpu_count(),
            "cpu_count_usable": self._try("cpu_affinity", lambda: len(os.sched_getaffinity(0))),
            "numa_nodes": numa_nodes(),
            "cgroup_cpu_limit_cores": self._try("cgroup", self._cgroup.cpu_limit_cores),
            "memory_total_bytes": counts_in(_MEMORY, ("MemTotal",)).get("MemTotal", 0) * 1024 or None,
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
        now = _cpu_ticks()
        before, self._cpu_before = self._cpu_before, now
        if before is None:
            return {}
        spent = {kind: ticks - before.get(kind, 0) for kind, ticks in now.items()}
        # User time includes guest time.
        total = sum(spent.values()) - spent.get("guest", 0) - spent.get("guest_nice", 0)
        if total <= 0:
            return {}
        waited = spent.get("iowait", 0)
        busy = min(1.0, max(0.0, 1.0 - (spent["idle"] + waited) / total))
        # The kernel's iowait may decrease by a tick.
        iowait = round(100.0 * max(0, waited) / total, 2) if "iowait" in spent else None
        return {"cpu_percent": round(100.0 * busy, 2), "iowait_percent": iowait}

    def _swap(self, elapsed_s: float) -> dict[str, object]:
        before, self._swapped_before = self._swapped_before, swapped_bytes()
        names = ("swap_in_bytes_per_s", "swap_out_bytes_per_s")
        return {
            name: rate(now, then, elapsed_s) for name, now, then in zip(names, self._swapped_before, before)
        }


def rate(now: float | None, before: float | None, elapsed_s: float) -> float | None:
    """Counts per second; None without two readings, without elapsed time, or for a counter that was reset."""
    if now is None or before is None or elapsed_s <= 0 or now < before:
        return None
    return (now - before) / elapsed_s


def _memory() -> dict[str, object]:
    counts = counts_in(_MEMORY, _MEMORY_KINDS)
    # Before Linux 3.14 there is no MemAvailable.
    free = counts["MemFree"] + counts.get("Buffers", 0) + counts.get("Cached", 0)
    available = min(counts["MemTotal"], counts.get("MemAvailable", free))
    return {
        "memory_used_bytes": (counts["MemTotal"] - available) * 1024,
        "memory_available_bytes": available * 1024,
    }


def _cpu_ticks() -> dict[str, int]:
    """CPU time since boot, all cores together, by kind, in the kernel's ticks."""
    ticks = text_of(_PROCESSORS).partition("\n")[0].split()[1:]
    return {kind: int(count) for kind, count in zip(_CPU_TIME_KINDS, ticks)}


def swapped_bytes() -> tuple[int | None, int | None]:
    """Bytes swapped in and out since boot; None if unknown."""
    names = ("pswpin", "pswpout")
    pages = counts_in("/proc/vmstat", names)
    found = (pages.get(name) for name in names)
    into, out = (None if count is None else count * _SWAPPED_PAGE_BYTES for count in found)
    return into, out
