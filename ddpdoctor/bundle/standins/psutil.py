"""The part of psutil that recording uses, implemented on Linux's /proc, for environments without psutil.

Same names, units and errors: https://psutil.readthedocs.io.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SWAPPED_PAGE_BYTES = 4096


class Error(Exception):
    """A process cannot be read."""


class NoSuchProcess(Error):
    """The process does not exist."""


class AccessDenied(Error):
    """The process belongs to another user."""


@contextlib.contextmanager
def _psutil_errors() -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NoSuchProcess(str(error)) from error
    except PermissionError as error:
        raise AccessDenied(str(error)) from error


def _text(path: str) -> str:
    with open(path, errors="replace") as file:
        return file.read()


def _counts(path: str) -> dict[str, int]:
    """Name → number, from lines that begin with a name, an optional colon, and a number."""
    words = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {each[0]: int(each[1]) for each in words if len(each) > 1 and each[1].isdecimal()}


class Process:
    """The process with this id, by default the current one. Raises NoSuchProcess."""

    def __init__(self, pid: int | None = None) -> None:
        self.pid = os.getpid() if pid is None else pid
        self._started = self._stat()[19]

    def _stat(self) -> list[str]:
        """The fields of ``/proc/PID/stat`` after the name, beginning with the state, see proc(5)."""
        with _psutil_errors():
            return _text(f"/proc/{self.pid}/stat").rpartition(")")[2].split()

    def oneshot(self) -> contextlib.AbstractContextManager[None]:
        """Does nothing: values are not cached."""
        return contextlib.nullcontext()

    def create_time(self) -> float:
        """Start time, epoch seconds."""
        return int(self._started) / _TICKS_A_SECOND + boot_time()

    def is_running(self) -> bool:
        """Whether it exists and is not a later process with the same id."""
        try:
            return self._stat()[19] == self._started
        except NoSuchProcess:
            return False

    def ppid(self) -> int:
        """Process id of the parent."""
        return int(self._stat()[1])

    def cpu_times(self) -> Any:
        """``user`` and ``system``, seconds."""
        fields = self._stat()
        return SimpleNamespace(
            user=int(fields[11]) / _TICKS_A_SECOND, system=int(fields[12]) / _TICKS_A_SECOND
        )

    def memory_info(self) -> Any:
        """``rss``, bytes."""
        with _psutil_errors():
            return SimpleNamespace(rss=int(_text(f"/proc/{self.pid}/statm").split()[1]) * _PAGE_BYTES)

    def cpu_affinity(self) -> list[int]:
        """Cores that the process may use."""
        with _psutil_errors():
            return sorted(os.sched_getaffinity(self.pid))


def pids() -> list[int]:
    """Ids of all processes."""
    return sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())


def boot_time() -> float:
    """Time of the boot, epoch seconds."""
    return float(_counts("/proc/stat")["btime"])


def cpu_count() -> int:
    """Number of logical cores."""
    return os.sysconf("SC_NPROCESSORS_ONLN")


class _CpuTimes(NamedTuple):
    """Seconds since boot."""

    user: float
    nice: float
    system: float
    idle: float
    iowait: float = 0.0
    irq: float = 0.0
    softirq: float = 0.0
    steal: float = 0.0
    guest: float = 0.0
    guest_nice: float = 0.0


def cpu_times() -> _CpuTimes:
    """CPU times, the sum over all cores."""
    words = _text("/proc/stat").split("\n", 1)[0].split()[1 : len(_CpuTimes._fields) + 1]
    return _CpuTimes(*(int(word) / _TICKS_A_SECOND for word in words))


def virtual_memory() -> Any:
    """``total``, ``available`` and ``used``, bytes."""
    found = {name: count * 1024 for name, count in _counts("/proc/meminfo").items()}
    total = found["MemTotal"]
    # Before Linux 3.14 there is no MemAvailable.
    available = found.get("MemAvailable", found["MemFree"] + found.get("Buffers", 0) + found.get("Cached", 0))
    available = min(total, available)
    return SimpleNamespace(total=total, available=available, used=total - available)


def swap_memory() -> Any:
    """``sin`` and ``sout``: swapped in and out since boot, bytes."""
    pages = _counts("/proc/vmstat")
    return SimpleNamespace(
        sin=pages["pswpin"] * _SWAPPED_PAGE_BYTES,
        sout=pages["pswpout"] * _SWAPPED_PAGE_BYTES,
    )
