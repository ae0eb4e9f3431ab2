"""Resource use of each rank's process and its children (dataloader workers).

The parent of each process is read once, when its pid first appears: on a host with thousands of kernel
threads, a scan of all of /proc at every sample would be the largest cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ddpdoctor.rundir.notes import Note

RANK_FIELDS = (
    *("pid", "cpu_percent", "rss_bytes", "num_children"),
    *("process_rss_bytes", "process_memory_bytes", "children_memory_bytes"),
)
_OWN_PAGES = (b"RssAnon:", b"RssShmem:")
"""Lines of /proc/PID/status. Pages of files (RssFile) are left out: the kernel can reclaim them, and a memory-mapped dataset fills
them."""


@dataclass(frozen=True)
class _Counters:
    """One process at one moment."""

    cpu_s: float
    rss_bytes: int
    memory_bytes: int | None


@dataclass
class _Rank:
    """State of a rank between two samples."""

    process: psutil.Process
    seen_s: float | None = None
    tree: dict[int, _Counters] = field(default_factory=dict)


class ProcessTreeSampler:
    """Samples each rank's process tree. ``rank_pids()``: rank -> pid of this host's ranks, as of now."""

    def __init__(self, rank_pids: Callable[[], Mapping[int, int]]) -> None:
        self.notes: list[Note] = []
        self._rank_pids = rank_pids
        self._ranks: dict[int, _Rank] = {}
        self._parents: dict[int, int | None] = {}
        self._started_since: set[int] = set()

    def sample(self) -> dict[str, dict[str, object]]:
        """``RANK_FIELDS`` by rank; values are None if the process is gone or not readable."""
        try:
            pids = dict(self._rank_pids())
            children = self._children(set(pids.values())) if pids else {}
        except Exception as error:
            if not self.notes:
                reason = error or type(error).__name__
                self.notes.append(Note(f"The ranks' processes cannot be read: {reason}."))
            return {}
        return {str(rank): self._sample_rank(rank, pid, children) for rank, pid in sorted(pids.items())}

    def _children(self, ranks: Set[int]) -> dict[int, list[int]]:
        """Children by parent. A rank is no child of another one, though it may have started it, as Lightning's first rank does."""
        pids = psutil.pids()
        self._started_since = set(pids) - self._parents.keys()
        self._parents = {pid: self._parents[pid] if pid in self._parents else _parent(pid) for pid in pids}
        children: dict[int, list[int]] = {}
        for pid, parent in self._parents.items():
            if parent is not None and pid not in ranks:
                children.setdefault(parent, []).append(pid)
        return children

    def _sample_rank(self, rank: int, pid: int, children: Mapping[int, list[int]]) -> dict[str, object]:
        values: dict[str, object] = dict.fromkeys(RANK_FIELDS)
        values["pid"] = pid
        try:
            known = self._ranks.get(rank)
            if known is None or known.process.pid != pid:
                known = self._ranks[rank] = _Rank(psutil.Process(pid))
            if not known.process.is_running():  # also False if the pid is another process by now
                return values
            return values | _measure(known, _descendants(pid, children), self._started_since)
        except (psutil.Error, OSError):
            return values


def _measure(rank: _Rank, descendants: list[int], started: Set[int]) -> dict[str, object]:
    now_s, process = time.monotonic(), rank.process
    before, elapsed_s = rank.tree, 0.0 if rank.seen_s is None else now_s - rank.seen_s
    with process.oneshot():
        own = _counters(process)
    tree = {process.pid: own} | {
        pid: counters for pid in descendants if (counters := _child(pid)) is not None
    }
    of_children = (each.memory_bytes for pid, each in tree.items() if pid != process.pid)
    known = [size for size in of_children if size is not None]
    values: dict[str, object] = {
        "cpu_percent": _cpu_percent(before, tree, started, elapsed_s),
        # Pages that forked workers share with the rank are counted for each of them.
        "rss_bytes": sum(counters.rss_bytes for counters in tree.values()),
        "num_children": len(tree) - 1,
        "process_rss_bytes": own.rss_bytes,
        "process_memory_bytes": own.memory_bytes,
        # None if one of them cannot be read.
        "children_memory_bytes": sum(known) if len(known) == len(tree) - 1 else None,
    }
    rank.seen_s, rank.tree = now_s, tree
    return values


def _cpu_percent(
    before: Mapping[int, _Counters], now: Mapping[int, _Counters], started: Set[int], elapsed_s: float
) -> float | None:
    """CPU use of the tree in percent (100: one core), of processes in both samples and of those started between."""
    if elapsed_s <= 0:
        return None
    grown_s = 0.0
    for pid, counters in now.items():
        if pid in before:
            grown_s += max(0.0, counters.cpu_s - before[pid].cpu_s)
        elif pid in started:
            grown_s += counters.cpu_s
    return round(100.0 * grown_s / elapsed_s, 2)


def _counters(process: psutil.Process) -> _Counters:
    times = process.cpu_times()
    return _Counters(
        cpu_s=times.user + times.system,
        rss_bytes=process.memory_info().rss,
        memory_bytes=_memory_bytes(process.pid),
    )


def _memory_bytes(pid: int) -> int | None:
    """Resident memory without pages of files, in bytes; None if unknown (Linux before 4.5)."""
    try:
        with Path(f"/proc/{pid}/status").open("rb") as status:
            own = [line.split() for line in status if line.startswith(_OWN_PAGES)]
        return sum(int(count) for _, count, _ in own) * 1024 if len(own) == len(_OWN_PAGES) else None
    except (OSError, ValueError):
        return None


def _child(pid: int) -> _Counters | None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            return _counters(process)
    except (psutil.Error, OSError):
        return None


def _parent(pid: int) -> int | None:
    try:
        return int(psutil.Process(pid).ppid())
    except (psutil.Error, OSError):
        return None


def _descendants(pid: int, children: Mapping[int, list[int]]) -> list[int]:
    found, waiting = [], list(children.get(pid, ()))
    while waiting:
        child = waiting.pop()
        found.append(child)
        waiting.extend(children.get(child, ()))
    return found
