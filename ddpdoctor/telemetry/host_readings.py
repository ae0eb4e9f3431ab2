"""How each part of a host sample is read. The functions raise what psutil and the file system raise."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Optional

import psutil

_PRESSURE = Path("/proc/pressure")
_INFINIBAND = Path("/sys/class/infiniband")
_BLOCK = Path("/sys/block")
# Devices stacked on others: their traffic is counted below already.
_STACKED_DISKS = ("dm-", "md", "loop", "ram", "zram")
# port_xmit_data and port_rcv_data count 32-bit words (InfiniBand architecture specification, PortCounters).
_RDMA_BYTES_A_COUNT = 4

PerSecond = Callable[[str, Optional[float]], Optional[float]]


def rate(now: float | None, before: float | None, elapsed_s: float) -> float | None:
    """Counts a second; None without two readings, without time between, or for a counter that was reset."""
    if now is None or before is None or elapsed_s <= 0 or now < before:
        return None
    return (now - before) / elapsed_s


def _total_s(times: Mapping[str, float]) -> float:
    # Guest time is part of user time already.
    return sum(seconds for field, seconds in times.items() if field not in ("guest", "guest_nice"))


def busy_percent(times: Mapping[str, float]) -> float | None:
    total = _total_s(times)
    idle = times["idle"] + times.get("iowait", 0.0)
    return round(100.0 * min(1.0, max(0.0, 1.0 - idle / total)), 2) if total > 0 else None


def share_percent(times: Mapping[str, float], field: str) -> float | None:
    total = _total_s(times)
    # The kernel's iowait may step back by a tick.
    return round(100.0 * max(0.0, times[field]) / total, 2) if field in times and total > 0 else None


def load() -> dict[str, object]:
    return dict(zip(("load_average_1m", "load_average_5m", "load_average_15m"), os.getloadavg()))


def memory() -> dict[str, object]:
    memory = psutil.virtual_memory()
    return {"memory_used_bytes": memory.used, "memory_available_bytes": memory.available}


def swap() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # psutil warns where /proc/vmstat is hidden
        return psutil.swap_memory()


def swap_sample(per_s: PerSecond) -> dict[str, object]:
    now = swap()
    return {
        "swap_used_bytes": now.used,
        "swap_in_bytes_per_s": per_s("swap in", now.sin),
        "swap_out_bytes_per_s": per_s("swap out", now.sout),
    }


def disk(per_s: PerSecond) -> dict[str, object]:
    """Traffic of all physical disks and the busiest one's busy share. Network file systems are not in it."""
    disks = psutil.disk_io_counters(perdisk=True, nowrap=False) or {}
    whole = {
        name: disk
        for name, disk in disks.items()
        if not name.startswith(_STACKED_DISKS)
        and (not _BLOCK.is_dir() or (_BLOCK / name.replace("/", "!")).exists())
    }
    if not whole:
        return {}
    busy = [per_s(f"busy {name}", getattr(disk, "busy_time", None)) for name, disk in whole.items()]
    known = [busy_ms_per_s / 10.0 for busy_ms_per_s in busy if busy_ms_per_s is not None]
    return {
        "disk_read_bytes_per_s": per_s("disk read", sum(disk.read_bytes for disk in whole.values())),
        "disk_write_bytes_per_s": per_s("disk write", sum(disk.write_bytes for disk in whole.values())),
        "disk_busy_max_percent": round(min(100.0, max(known)), 2) if known else None,
    }


def network(per_s: PerSecond) -> dict[str, dict[str, float | None]]:
    """Interfaces that moved anything since boot; not a quiet ``lo``, nor containers' host-side ends."""
    traffic = {}
    for name, count in psutil.net_io_counters(pernic=True, nowrap=False).items():
        sent = per_s(f"sent {name}", count.bytes_sent)
        received = per_s(f"received {name}", count.bytes_recv)
        moved = sent if name == "lo" else count.bytes_sent + count.bytes_recv
        if moved and not name.startswith("veth"):
            traffic[name] = {"sent_bytes_per_s": sent, "received_bytes_per_s": received}
    return traffic


def interfaces() -> dict[str, dict[str, object]]:
    return {
        # The kernel says 0 or -1 where a link has no speed of its own (virtual, down).
        name: {"up": link.isup, "speed_bits_per_s": link.speed * 10**6 if link.speed > 0 else None}
        for name, link in psutil.net_if_stats().items()
    }


def rdma_ports() -> list[tuple[str, Path]]:
    """(``<device>:<port>``, folder). No network interface counts what NCCL sends over InfiniBand or RoCE."""
    if not _INFINIBAND.is_dir():
        return []
    ports = sorted(_INFINIBAND.glob("*/ports/*"))
    return [(f"{port.parent.parent.name}:{port.name}", port) for port in ports]


def rdma(per_s: PerSecond) -> dict[str, dict[str, float | None]]:
    traffic = {}
    for name, port in rdma_ports():
        counted = [text(port / "counters" / counter) for counter in ("port_xmit_data", "port_rcv_data")]
        sent, received = (None if text is None else int(text) * _RDMA_BYTES_A_COUNT for text in counted)
        traffic[name] = {
            "sent_bytes_per_s": per_s(f"rdma sent {name}", sent),
            "received_bytes_per_s": per_s(f"rdma received {name}", received),
        }
    return traffic


def pressure() -> dict[str, object]:
    """The 10 s averages of Linux's pressure stall information, Documentation/accounting/psi.rst."""
    found: dict[str, object] = {}
    for resource in ("cpu", "memory", "io"):
        for line in (text(_PRESSURE / resource) or "").splitlines():
            kind, average = line.split()[:2]
            if (resource, kind) != ("cpu", "full"):  # undefined for the whole system
                found[f"pressure_{resource}_{kind}_percent"] = float(average.removeprefix("avg10="))
    return found


def text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
