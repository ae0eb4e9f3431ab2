"""A trial's processes: started in a session of their own, limited in time and memory, and ended with all children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil

from ddpdoctor.hook.environment import RUN
from ddpdoctor.parentdeath import die_with_parent
from ddpdoctor.rundir import discard, remove_root, roots_of, spools_in
from ddpdoctor.telemetry.cgroup import Cgroup

_END_S = 20.0
"""Time between SIGTERM and SIGKILL of a trial."""
_LOOK_S = 0.1
_WATCHED_EVERY = 5
"""Memory is checked in every fifth poll."""
_LEAST_LEFT, _OF_BEGINNING = 0.03, 0.25
"""Share of the machine's memory, and share of what was free as the trial began: with less than both left, the trial is ended before the
kernel kills a process, which need not be one of the trial's."""


class _Room(NamedTuple):
    left: int
    whole: int


class Watch:
    """Checks that memory and shared memory do not run out during a trial with many workers."""

    def __init__(self) -> None:
        self._least = {
            name: min(_LEAST_LEFT * room.whole, _OF_BEGINNING * room.left) for name, room in _rooms()
        }

    def says(self) -> str:
        """Why the trial must end; empty if enough memory is left."""
        for name, room in _rooms():
            if room.left < self._least.get(name, 0):
                return f"it left only {room.left / 1e6:.0f} MB of {name}, and was ended"
        return ""


@cache
def _cgroup() -> Cgroup:
    return Cgroup()


def _rooms() -> Iterator[tuple[str, _Room]]:
    memory = psutil.virtual_memory()
    left, whole = memory.available, memory.total
    group = _cgroup()
    free, limit = group.free_memory_bytes(), group.memory_limit_bytes()
    if free is not None and isinstance(limit, int):  # a container, or a Slurm job, may have less
        left, whole = min(left, free), min(whole, limit)
    yield "memory", _Room(left, whole)
    with contextlib.suppress(OSError):
        shared = os.statvfs("/dev/shm")
        yield "/dev/shm", _Room(shared.f_bavail * shared.f_frsize, shared.f_blocks * shared.f_frsize)


def run_to_end(
    command: Sequence[str],
    environment: Mapping[str, str],
    where: Path,
    log: Path,
    run: Path,
    limit_s: float,
) -> tuple[int | None, str]:
    """Run a command that records into ``run``, with its output in ``log``: (exit code, why there is none). Its child processes are ended,
    and its spools removed. Raises OSError if it cannot be started."""
    libc, watch = ctypes.CDLL(None), Watch()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=where,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM, libc),  # it ends if this process is killed
        )
    try:
        return _wait(process, limit_s, watch)
    finally:
        _end(process, run)


def _wait(process: subprocess.Popen[bytes], limit_s: float, watch: Watch) -> tuple[int | None, str]:
    deadline_s, looks = time.monotonic() + limit_s, 0
    while process.poll() is None:
        if time.monotonic() > deadline_s:
            return None, f"it had not ended after {limit_s:.0f} s"
        looks += 1
        if looks % _WATCHED_EVERY == 0 and (says := watch.says()):
            return None, says
        time.sleep(_LOOK_S)
    return process.returncode, ""


def _end(process: subprocess.Popen[bytes], run: Path) -> None:
    """End the command and its children; ranks and their workers have sessions of their own."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    left = list(_recorded_into(run))
    for each in left:
        with contextlib.suppress(psutil.Error):
            each.kill()
    # SIGKILL does not end a process that is blocked on storage.
    psutil.wait_procs(left, timeout=_END_S)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_END_S)
    for root in roots_of(str(run)):
        for spool in spools_in(root):
            with contextlib.suppress(OSError):
                discard(spool)
        remove_root(root)


def _recorded_into(run: Path) -> Iterator[psutil.Process]:
    """Processes with this run directory, of one trial only, in their environment."""
    marker = f"{RUN}={run}".encode()
    for each in psutil.process_iter():
        with contextlib.suppress(OSError):
            if marker in Path(f"/proc/{each.pid}/environ").read_bytes().split(b"\0"):
                yield each
