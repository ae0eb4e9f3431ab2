"""CPU and memory limits of a process's control groups (v1 and v2), and its free memory.

Sources: Linux Documentation/admin-guide/cgroup-v2.rst (cpu.max, memory.max) and, for v1, scheduler/sched-bwc.rst.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# v1 writes the largest page-aligned number for "no limit"; no real limit is near it.
_NO_LIMIT_BYTES = 1 << 60
_MEMORY_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


class Cgroup:
    """The folders of a process's cgroup, from its own up to the root: any level may have a limit."""

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
        """The lowest CPU limit of all levels; None for no cgroup or no limit."""
        return min(
            (limit for level in self._cpu if (limit := _cpu_limit_cores(level)) is not None), default=None
        )

    def memory_limit_bytes(self) -> int | None:
        """The lowest memory limit of all levels, in bytes; None for no cgroup or no limit."""
        return min((limit for limit, _, _ in self._limited()), default=None)

    def free_memory_bytes(self) -> int | None:
        """Free memory below the limits, in bytes, page caches counted as free; None without a limit."""
        free = []
        for limit, used, level in self._limited():
            if used is not None:
                cached = _stat(level / "memory.stat")
                files = cached.get("active_file", 0) + cached.get("inactive_file", 0)
                free.append(max(limit - max(used - files, 0), 0))
        return min(free, default=None)

    def _limited(self) -> Iterator[tuple[int, int | None, Path]]:
        """Limit and use in bytes of each level that limits memory."""
        for level in self._memory:
            for limits, uses in _MEMORY_FILES:
                limit = _number(level / limits)
                if limit is not None and limit < _NO_LIMIT_BYTES:
                    yield limit, _number(level / uses), level

    def oom_kills(self) -> int | None:
        """Processes of the own level that the kernel killed for lack of memory; None if it does not count them."""
        for level in self._memory[:1]:
            for name in ("memory.events", "memory.oom_control"):
                count = _stat(level / name).get("oom_kill")
                if count is not None:
                    return count
        return None


def _mounts(mountinfo: Path) -> Iterator[tuple[str, str, Path, list[str]]]:
    """(file system, root within it, mount point, super options) of each cgroup mount."""
    for line in mountinfo.read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            fields = left.split(" ")
            yield kind, fields[3], Path(fields[4]), options.split(",")


def _levels(point: Path, root: str, path: str) -> list[Path]:
    """The own folder, then its parents up to the mount. A container may see only a part of the tree."""
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


def _stat(path: Path) -> dict[str, int]:
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return {name: int(value) for name, value in pairs}
    except (OSError, ValueError):
        return {}
