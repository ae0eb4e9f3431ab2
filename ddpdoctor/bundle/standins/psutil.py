"""As much of psutil as a recording asks for, from Linux's /proc and /sys, for a Python that lacks it.

Same names, same units, same errors: https://psutil.readthedocs.io. What psutil has beside these is not here.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

STATUS_ZOMBIE = "zombie"

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SWAPPED_PAGE_BYTES = 4096
_SECTOR_BYTES = 512
_STATES = {"Z": STATUS_ZOMBIE}


class Error(Exception):
    """Of a process that cannot be read."""


class NoSuchProcess(Error):
    """It has ended, or never was."""


class AccessDenied(Error):
    """It is another user's."""


@contextlib.contextmanager
def _told() -> Iterator[None]:
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
    """Lines of a name and a number, whatever stands between and behind."""
    words = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {each[0]: int(each[1]) for each in words if len(each) > 1 and each[1].isdecimal()}


class Process:
    """A process by its id; our own without one. Raises NoSuchProcess."""

    def __init__(self, pid: int | None = None) -> None:
        self.pid = os.getpid() if pid is None else pid
        self._started = self._stat()[19]

    def _stat(self) -> list[str]:
        """The fields of ``/proc/PID/stat`` behind the name, from the state on, see proc(5)."""
        with _told():
            return _text(f"/proc/{self.pid}/stat").rpartition(")")[2].split()

    def oneshot(self) -> contextlib.AbstractContextManager[None]:
        """For calls in a row."""
        return contextlib.nullcontext()

    def create_time(self) -> float:
        """When it began, epoch seconds."""
        return int(self._started) / _TICKS_A_SECOND + boot_time()

    def is_running(self) -> bool:
        """Whether it is there, and no later process of the same id."""
        try:
            return self._stat()[19] == self._started
        except NoSuchProcess:
            return False

    def status(self) -> str:
        """``zombie``, or the kernel's letter for another state."""
        state = self._stat()[0]
        return _STATES.get(state, state)

    def ppid(self) -> int:
        """Its parent's id."""
        return int(self._stat()[1])

    def cpu_times(self) -> Any:
        """``user`` and ``system``, seconds."""
        fields = self._stat()
        return SimpleNamespace(
            user=int(fields[11]) / _TICKS_A_SECOND, system=int(fields[12]) / _TICKS_A_SECOND
        )

    def num_threads(self) -> int:
        """Threads."""
        return int(self._stat()[17])

    def memory_info(self) -> Any:
        """``rss``, bytes."""
        with _told():
            return SimpleNamespace(rss=int(_text(f"/proc/{self.pid}/statm").split()[1]) * _PAGE_BYTES)

    def io_counters(self) -> Any:
        """``read_bytes`` and ``write_bytes``, of disks."""
        with _told():
            found = _counts(f"/proc/{self.pid}/io")
        return SimpleNamespace(read_bytes=found["read_bytes"], write_bytes=found["write_bytes"])

    def num_ctx_switches(self) -> Any:
        """``voluntary`` and ``involuntary``, of the main thread."""
        with _told():
            found = _counts(f"/proc/{self.pid}/status")
        return SimpleNamespace(
            voluntary=found["voluntary_ctxt_switches"], involuntary=found["nonvoluntary_ctxt_switches"]
        )

    def cpu_affinity(self) -> list[int]:
        """Cores that it may use."""
        with _told():
            return sorted(os.sched_getaffinity(self.pid))


def pids() -> list[int]:
    """Of all processes."""
    return sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())


def boot_time() -> float:
    """Epoch seconds."""
    return float(_counts("/proc/stat")["btime"])


def cpu_count(logical: bool = True) -> int | None:
    """Cores; without ``logical`` physical ones, None where the kernel does not say."""
    if logical:
        return os.sysconf("SC_NPROCESSORS_ONLN")
    for name in ("core_cpus_list", "thread_siblings_list"):
        shared = {_text(path) for path in glob.glob(f"/sys/devices/system/cpu/cpu[0-9]*/topology/{name}")}
        if shared:
            return len(shared)
    return None


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


def cpu_times(percpu: bool = False) -> Any:
    """Of all cores together, or a list of each."""
    rows = [line.split() for line in _text("/proc/stat").splitlines() if line.startswith("cpu")]
    most = len(_CpuTimes._fields)
    found = [_CpuTimes(*(int(word) / _TICKS_A_SECOND for word in row[1 : most + 1])) for row in rows]
    return found[1:] if percpu else found[0]


def virtual_memory() -> Any:
    """``total``, ``available`` and ``used``, bytes."""
    found = {name: count * 1024 for name, count in _counts("/proc/meminfo").items()}
    total = found["MemTotal"]
    # Before Linux 3.14 the kernel does not say what is available.
    available = found.get("MemAvailable", found["MemFree"] + found.get("Buffers", 0) + found.get("Cached", 0))
    available = min(total, available)
    return SimpleNamespace(total=total, available=available, used=total - available)


def swap_memory() -> Any:
    """``total``, ``used``, and what was swapped ``sin`` and ``sout`` since boot, bytes."""
    memory = {name: count * 1024 for name, count in _counts("/proc/meminfo").items()}
    pages = _counts("/proc/vmstat")
    return SimpleNamespace(
        total=memory["SwapTotal"],
        used=memory["SwapTotal"] - memory["SwapFree"],
        sin=pages["pswpin"] * _SWAPPED_PAGE_BYTES,
        sout=pages["pswpout"] * _SWAPPED_PAGE_BYTES,
    )


def disk_io_counters(perdisk: bool = True, nowrap: bool = False) -> dict[str, Any]:
    """By disk and partition ``read_bytes``, ``write_bytes`` and ``busy_time`` (ms), see the kernel's iostats.rst."""
    rows = [line.split() for line in _text("/proc/diskstats").splitlines()]
    return {
        row[2]: SimpleNamespace(
            read_bytes=int(row[5]) * _SECTOR_BYTES,
            write_bytes=int(row[9]) * _SECTOR_BYTES,
            busy_time=int(row[12]),
        )
        for row in rows
        if len(row) > 12
    }


def net_io_counters(pernic: bool = True, nowrap: bool = False) -> dict[str, Any]:
    """By interface ``bytes_sent`` and ``bytes_recv``."""
    found = {}
    for line in _text("/proc/net/dev").splitlines()[2:]:
        name, _, counts = line.rpartition(":")
        fields = counts.split()
        found[name.strip()] = SimpleNamespace(bytes_recv=int(fields[0]), bytes_sent=int(fields[8]))
    return found


def net_if_stats() -> dict[str, Any]:
    """By interface whether it ``isup``, and its ``speed`` in Mbit/s, 0 where it does not say."""
    return {
        name: SimpleNamespace(isup=_of_interface(name, "carrier") == 1, speed=_of_interface(name, "speed"))
        for name in net_io_counters()
    }


def _of_interface(name: str, what: str) -> int:
    try:
        return max(0, int(_text(f"/sys/class/net/{name}/{what}")))
    except (OSError, ValueError):  # the kernel refuses it of one that is down
        return 0
