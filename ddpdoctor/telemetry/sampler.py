"""Samples GPUs, host and the ranks' processes with their children (dataloader workers) in a thread, into ``telemetry.jsonl``.

Kinds of lines: a header (``schema``), samples (``gpus``), notes (``note``), a closing line (``closed``). Each line is one ``os.write`` to
a file opened with ``O_APPEND``, so the file can be read at any time and after a ``kill -9``.

The parent of each process is read once, when its pid first appears: on a host with thousands of kernel threads, reading all of /proc for
every sample would be the largest cost.
"""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

from ddpdoctor.rundir import MAX_PROGRAMS, MIN_PROGRAM_CORES, TELEMETRY_FILE, TELEMETRY_SCHEMA, Note
from ddpdoctor.rundir.privacy import mask_text

from .host import HostSampler
from .nvml import NvmlSampler
from .procfs import TICKS_PER_S, command_of, name_and_fields, parent_of, pids, stat_fields, status_fields

RANK_FIELDS = (
    *("pid", "cpu_percent", "rss_bytes", "num_children"),
    *("process_rss_bytes", "process_memory_bytes", "children_memory_bytes"),
)
OTHERS_EVERY = 5
"""Samples per reading of the other programs' CPU use, which takes some 15 µs per process."""
_LEAST_BETWEEN_S = 1.0
"""The kernel counts CPU time in ticks, mostly of 10 ms."""
_MOST_PROCESSES = 2000
"""With more processes on the host, the other programs are not read."""
_KERNEL_THREADS = 2
"""Process id of kthreadd, the parent of the kernel's threads."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_OWN_PAGES = ("RssAnon", "RssShmem")
"""Lines of /proc/PID/status. Pages of files (RssFile) are excluded: the kernel can reclaim them, and memory-mapped datasets add many."""


@dataclass(frozen=True)
class _Counters:
    """Counters of one process in one sample."""

    began: int
    """Start in the kernel's ticks; identifies a process together with its id."""
    cpu_s: float
    rss_bytes: int
    memory_bytes: int | None


@dataclass
class _Rank:
    """State of a rank between two samples."""

    pid: int
    began: int
    sampled_s: float | None = None
    tree: dict[int, _Counters] = field(default_factory=dict)


class ProcessTreeSampler:
    """Samples each rank's process tree. ``rank_pids()`` returns the pid of each rank of this host at present."""

    def __init__(self, rank_pids: Callable[[], Mapping[int, int]]) -> None:
        self.notes: list[Note] = []
        self._rank_pids = rank_pids
        self._ranks: dict[int, _Rank] = {}
        self._parents: dict[int, int] = {}
        self._started_since: set[int] = set()
        self._of_ranks: dict[int, int] = {}
        """Process of a rank's tree → the rank, in the newest sample."""
        self._others: dict[int, tuple[int, float]] = {}
        self._others_s: float | None = None

    def sample(self) -> dict[str, dict[str, object]]:
        """``RANK_FIELDS`` by rank; values are None if the process is gone or not readable."""
        try:
            ranks = dict(self._rank_pids())
            children = self._children(set(ranks.values())) if ranks else {}
        except Exception as error:
            if not self.notes:
                reason = error or type(error).__name__
                self.notes.append(Note(f"The ranks' processes cannot be read: {reason}."))
            return {}
        self._of_ranks = {}
        return {str(rank): self._sample_rank(rank, pid, children) for rank, pid in sorted(ranks.items())}

    def other_programs(self) -> list[dict[str, object]] | None:
        """CPU use of programs other than the ranks and their workers since the previous call: name, number of processes, and cores of those
        that use most, and the rank that started them if one did. Processes that started or ended in between are not counted. None in the
        first call, too soon after another, and on hosts with too many processes."""
        now_s, before, before_s = time.monotonic(), self._others, self._others_s
        if before_s is not None and now_s - before_s < _LEAST_BETWEEN_S:
            return None
        of_job = self._ranks_and_workers()
        outside = [
            pid
            for pid, parent in self._parents.items()
            if pid not in of_job and _KERNEL_THREADS not in (pid, parent)
        ]
        self._others, self._others_s = {}, now_s if outside else None
        if len(outside) > _MOST_PROCESSES:
            return None
        cores: dict[tuple[str, int | None], list[float]] = {}
        for pid in outside:
            name, fields = name_and_fields(pid)
            if not fields:
                continue
            began, cpu_s = int(fields[19]), (int(fields[11]) + int(fields[12])) / TICKS_PER_S
            self._others[pid] = began, cpu_s
            if before_s is not None and pid in before and before[pid][0] == began:
                program = name, self._of_ranks.get(pid)
                cores.setdefault(program, []).append((cpu_s - before[pid][1]) / (now_s - before_s))
        if before_s is None:
            return None
        used = sorted(cores, key=lambda program: sum(cores[program]), reverse=True)[:MAX_PROGRAMS]
        return [
            {
                "name": mask_text(name),
                "cores": round(sum(cores[name, rank]), 2),
                "processes": sum(each > 0 for each in cores[name, rank]),
                **({} if rank is None else {"rank": rank}),
            }
            for name, rank in used
            if sum(cores[name, rank]) >= MIN_PROGRAM_CORES
        ]

    def _ranks_and_workers(self) -> set[int]:
        """The processes of the ranks' trees that run the rank's command, as forked workers do, or one of multiprocessing."""
        commands = {rank: command_of(state.pid) for rank, state in self._ranks.items()}
        return {
            pid
            for pid, rank in self._of_ranks.items()
            if (command := command_of(pid)) in ("", commands[rank]) or "multiprocessing" in command
        }

    def _children(self, ranks: Set[int]) -> dict[int, list[int]]:
        """Children by parent. Ranks are not counted as children: Lightning's first rank is the parent of other ranks."""
        now = pids()
        self._started_since = set(now) - self._parents.keys()
        self._parents = {pid: self._parents[pid] if pid in self._parents else parent_of(pid) for pid in now}
        children: dict[int, list[int]] = {}
        for pid, parent in self._parents.items():
            if pid not in ranks:
                children.setdefault(parent, []).append(pid)
        return children

    def _sample_rank(self, rank: int, pid: int, children: Mapping[int, list[int]]) -> dict[str, object]:
        values: dict[str, object] = dict.fromkeys(RANK_FIELDS)
        values["pid"] = pid
        own, known = _counters(pid), self._ranks.get(rank)
        if own is not None and (known is None or known.pid != pid):
            known = self._ranks[rank] = _Rank(pid, own.began)
        if (
            own is None or known is None or known.began != own.began
        ):  # it is gone, or its process id was reused
            return values
        descendants = _descendants(pid, children)
        self._of_ranks |= dict.fromkeys((pid, *descendants), rank)
        return values | _measure(known, own, descendants, self._started_since)


def _measure(rank: _Rank, own: _Counters, descendants: list[int], started: Set[int]) -> dict[str, object]:
    now_s, before = time.monotonic(), rank.tree
    elapsed_s = 0.0 if rank.sampled_s is None else now_s - rank.sampled_s
    children = {pid: counters for pid in descendants if (counters := _counters(pid)) is not None}
    tree = {rank.pid: own, **children}
    known = [each.memory_bytes for each in children.values() if each.memory_bytes is not None]
    rank.sampled_s, rank.tree = now_s, tree
    return {
        "cpu_percent": _cpu_percent(before, tree, started, elapsed_s),
        # Pages that forked workers share with the rank are counted once per process.
        "rss_bytes": sum(counters.rss_bytes for counters in tree.values()),
        "num_children": len(children),
        "process_rss_bytes": own.rss_bytes,
        "process_memory_bytes": own.memory_bytes,
        # None if a child cannot be read.
        "children_memory_bytes": sum(known) if len(known) == len(children) else None,
    }


def _cpu_percent(
    before: Mapping[int, _Counters], now: Mapping[int, _Counters], started: Set[int], elapsed_s: float
) -> float | None:
    """CPU use of the tree in percent (100: one core), from processes in both samples and processes started in between."""
    if elapsed_s <= 0:
        return None
    grown_s = 0.0
    for pid, counters in now.items():
        if pid in before:
            grown_s += max(0.0, counters.cpu_s - before[pid].cpu_s)
        elif pid in started:
            grown_s += counters.cpu_s
    return round(100.0 * grown_s / elapsed_s, 2)


def _counters(pid: int) -> _Counters | None:
    """Current counters; None if the process is gone."""
    fields = stat_fields(pid)
    if not fields:
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return _Counters(int(fields[19]), cpu_s, int(fields[21]) * _PAGE_BYTES, _memory_bytes(pid))


def _memory_bytes(pid: int) -> int | None:
    """Resident memory without pages of files, in bytes; None if unknown (Linux before 4.5)."""
    own = status_fields(pid, _OWN_PAGES)
    return sum(map(int, own)) * 1024 if all(own) else None


def _descendants(pid: int, children: Mapping[int, list[int]]) -> list[int]:
    found, waiting = [], list(children.get(pid, ()))
    while waiting:
        child = waiting.pop()
        found.append(child)
        waiting.extend(children.get(child, ()))
    return found


class TelemetrySampler:
    """Samples this host every ``interval_s`` seconds on average into ``directory/telemetry.jsonl`` until ``stop()``. Intervals are random,
    because constant intervals alias with constant step times.

    ``rank_pids()``, called in the sampling thread, returns the pid of each rank of this host at present. To bound the file's growth, the
    interval doubles whenever ``thin_after_samples`` samples or ``thin_after_bytes`` bytes have been written with it. Errors are added to
    ``notes``; no method raises.
    """

    def __init__(
        self,
        directory: Path,
        *,
        interval_s: float = 1.0,
        rank_pids: Callable[[], Mapping[int, int]],
        host: str | None = None,
        thin_after_samples: int = 3600,
        thin_after_bytes: int = 8 << 20,
    ) -> None:
        self.notes: list[Note] = []
        self.samples = 0
        self._directory = directory
        self._interval_s = interval_s
        self._random = random.Random()
        self._rank_pids = rank_pids
        self._host = host or socket.gethostname()
        self._thin_after = (thin_after_samples, thin_after_bytes)
        self._written = [0, 0]
        self._handle = -1
        self._cpu_ns = 0
        self._stopping = threading.Event()
        # A daemon thread, because NVML may hang on a broken GPU, which must not prevent the process from ending.
        self._thread = threading.Thread(target=self._run, name="ddpdoctor-telemetry", daemon=True)

    def start(self) -> None:
        """Start sampling and return at once. NVML is opened in the thread, because that may take seconds."""
        try:
            self._thread.start()
        except RuntimeError as error:
            self.notes.append(Note(f"No telemetry: its thread cannot be started: {error}."))

    def stop(self, timeout_s: float = 5.0) -> None:
        """Take a last sample and write the closing line. Waits up to ``timeout_s`` for the thread."""
        self._stopping.set()
        if self._thread.ident is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.notes.append(
                Note(f"Telemetry did not end within {timeout_s:g} s; its last samples may be missing.")
            )

    def pause_s(self) -> float:
        """Random time to the next sample, 0.5 to 1.5 times the interval."""
        return self._interval_s * (0.5 + self._random.random())

    def _run(self) -> None:
        path = self._directory / TELEMETRY_FILE
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._handle = os.open(path, flags, 0o644)
            self._sample_until_stopped()
        except Exception as error:
            self.notes.append(Note(f"Telemetry stopped after {self.samples} samples: {path}: {error}."))
        finally:
            if self._handle >= 0:
                os.close(self._handle)

    def _sample_until_stopped(self) -> None:
        gpus, host, ranks = NvmlSampler(), HostSampler(), ProcessTreeSampler(self._rank_pids)
        try:
            header = {"schema": TELEMETRY_SCHEMA, "host": self._host, "started_ns": time.time_ns()}
            header |= {"interval_s": self._interval_s, "gpus": gpus.static, "host_facts": host.facts}
            self._write(header)
            due_s = time.monotonic()
            while True:
                stopping = self._stopping.wait(max(0.0, due_s - time.monotonic()))
                self._take_sample(gpus, host, ranks, final=stopping)
                if stopping:
                    break
                # Samples that became due during a slow one are skipped.
                due_s = max(due_s + self.pause_s(), time.monotonic())
            cpu_ms = self._cpu_ns / 1e6 / self.samples
            closing = {"closed": True, "samples": self.samples, "cpu_ms_per_sample": round(cpu_ms, 3)}
            self._write({"t_ns": time.time_ns(), **closing})
        finally:
            gpus.close()

    def _take_sample(
        self, gpus: NvmlSampler, host: HostSampler, ranks: ProcessTreeSampler, *, final: bool
    ) -> None:
        began_ns, t_ns = time.thread_time_ns(), time.time_ns()
        sample = {"t_ns": t_ns, "host": host.sample(), "ranks": ranks.sample(), "gpus": gpus.sample()}
        if (final or self.samples % OTHERS_EVERY == 0) and (others := ranks.other_programs()) is not None:
            sample["others"] = others
        if final:
            sample["final"] = True
        written = self._write(sample)
        for source in (gpus, host, ranks):
            for note in source.notes:
                self._write_note(t_ns, note)
            self.notes.extend(source.notes)
            source.notes.clear()
        self.samples += 1
        self._written[0] += 1
        self._written[1] += written
        if any(count >= limit for count, limit in zip(self._written, self._thin_after)):
            self._thin(t_ns)
        self._cpu_ns += time.thread_time_ns() - began_ns

    def _thin(self, t_ns: int) -> None:
        self._interval_s *= 2
        self._written = [0, 0]
        note = Note(f"Sampling every {self._interval_s:g} s from here on, to bound the size of this file.")
        self._write_note(t_ns, note, interval_s=self._interval_s)

    def _write_note(self, t_ns: int, note: Note, **more: float) -> None:
        self._write({"t_ns": t_ns, "note": mask_text(note.text), "code": note.code.value, **more})

    def _write(self, document: Mapping[str, object]) -> int:
        """Append one line. Raises OSError if the disk is full or the file is gone."""
        if os.fstat(self._handle).st_nlink == 0:
            raise FileNotFoundError("the file has been removed")
        line = json.dumps(document, separators=(",", ":"), default=str).encode() + b"\n"
        if os.write(self._handle, line) != len(line):
            raise OSError("a line was written in part only; the disk is probably full")
        return len(line)
