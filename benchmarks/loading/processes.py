"""Times and memory of whole processes, measured in turns."""

from __future__ import annotations

import os
import statistics
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_SAMPLE_S = 0.1


@dataclass(frozen=True)
class Cost:
    """What one run of a command took, its child processes included."""

    wall_s: float
    cpu_s: float
    """User and system time."""
    peak_mb: float
    """Largest sum of the processes' memory, shared pages counted once; sampled, but never below the largest
    process's own high-water mark."""


def run(command: Sequence[str], environment: Mapping[str, str]) -> Cost:
    """Runs ``command`` to its end. Raises RuntimeError with its last words where it fails."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, **environment}
    )
    said: list[bytes] = []
    reader = threading.Thread(target=lambda: said.append(process.stderr.read()))
    reader.start()
    peak = [0.0]
    done = threading.Event()
    sampler = threading.Thread(target=_sample, args=(process.pid, peak, done))
    sampler.start()
    _, status, used = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    done.set()
    sampler.join()
    reader.join()
    if process.returncode:
        raise RuntimeError(b"".join(said).decode("utf-8", "replace").strip()[-600:])
    return Cost(wall_s, used.ru_utime + used.ru_stime, max(peak[0], used.ru_maxrss / 1024))


def in_turns(
    commands: Mapping[str, Sequence[str]], repetitions: int, environment: Mapping[str, str]
) -> dict[str, list[Cost]]:
    """Costs of each command, all of them once a round, so that what disturbs the machine disturbs all alike."""
    for command in commands.values():
        run(command, environment)  # files and compiled Python into the page cache
    costs: dict[str, list[Cost]] = {name: [] for name in commands}
    for _ in range(repetitions):
        for name, command in commands.items():
            costs[name].append(run(command, environment))
    return costs


def median_and_range(values: Sequence[float], form: str = ".2f") -> str:
    """``1.10 (1.02 to 1.31)``: median, least and most."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def _sample(pid: int, peak: list[float], done: threading.Event) -> None:
    while not done.wait(_SAMPLE_S):
        try:
            parent = psutil.Process(pid)
            total = sum(_own_mb(process) for process in [parent, *parent.children(recursive=True)])
        except psutil.Error:
            continue
        peak[0] = max(peak[0], total)


def _own_mb(process: psutil.Process) -> float:
    """Proportional set size where the kernel tells it, else resident set size, MB."""
    try:
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    try:
        return float(process.memory_info().rss) / (1 << 20)
    except psutil.Error:
        return 0.0
