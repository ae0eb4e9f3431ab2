"""Runs a function in a forked child process with limits of time and memory.

Fork is used instead of a new interpreter, because the launcher's start may not be repeatable (zip archive, deleted working
directory), the launcher has not loaded large libraries, and the child needs its terminal.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from ddpdoctor.launch.helper import prefer_for_oom_kill
from ddpdoctor.process import die_with_parent

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_GRACE_S = 0.5
"""Seconds between SIGTERM and SIGKILL, in which the child restores the terminal."""
_MAX_PAUSE_S = 1.0
"""Longer pauses between two checks mean that this process and the child were suspended. The excess is not counted."""
_MEMORY_SHARE = 0.9
"""Share of the free memory that the child may use, so that its allocations fail before the kernel's OOM killer acts."""
_THREAD_BYTES = 16 << 20
"""Address space per thread that libraries reserve for their thread pools and hardly use."""
_INTERRUPTED, _NO_MEMORY = 130, 12
_OUT_OF_MEMORY_SIGNALS = (signal.SIGKILL, signal.SIGABRT)
"""Signals that end a process when memory runs out: from the OOM killer, or from abort() in an allocator."""


class ChildFailedError(Exception):
    """The work failed. The message is the end of a sentence that says why."""


def run_in_child(work: Callable[[], None], limit_s: float) -> None:
    """Run ``work`` in a child process. ``work`` must report its own exceptions. Call this from the main thread.

    Raises ChildFailedError if the child was killed, had too little memory, took longer than ``limit_s`` seconds, or ended with
    another exit code than 0. Raises KeyboardInterrupt, after ending the child, on a signal that asks this process to end; this
    requires :func:`take_interrupts_as_exceptions`.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # If the caller ignores SIGCHLD, the child's exit status would be lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_SIGNALS)
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise ChildFailedError(f"could not be started ({error.strerror})") from error
    if pid == 0:
        _child_main(work, parent, mask)
    try:
        signal.pthread_sigmask(
            signal.SIG_SETMASK, [number for number in mask if number not in _ENDING_SIGNALS]
        )
        status = _wait_for_child(pid, limit_s)
    except BaseException:
        _end_child(pid)
        raise
    _raise_for_status(status)


def take_interrupts_as_exceptions() -> None:
    """Make the first signal that asks this process to end raise KeyboardInterrupt. Later ones are ignored."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in _ENDING_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in _ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    # Blocked since the end of the job.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING_SIGNALS)


def _child_main(work: Callable[[], None], parent: int, mask: set[signal.Signals | int]) -> NoReturn:
    code = 1
    try:
        die_with_parent(signal.SIGKILL)
        if os.getppid() == parent:
            prefer_for_oom_kill()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            work()
            code = 0
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except MemoryError:
        code = _NO_MEMORY
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                pass
        os._exit(code)


def limit_memory() -> None:
    """Limit this process to the currently free memory. Call it after the libraries are loaded."""
    free = _free_bytes()
    if free is None:
        return
    threads = _THREAD_BYTES * (os.cpu_count() or 1)
    limit = _data_bytes() + int(free * _MEMORY_SHARE) + threads
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _free_bytes() -> int | None:
    from ddpdoctor.telemetry.host import Cgroup

    found = [Cgroup().free_memory_bytes()]
    try:
        found.append(int(psutil.virtual_memory().available))
    except (OSError, RuntimeError, ValueError):
        pass
    return min((free for free in found if free is not None), default=None)


def _data_bytes() -> int:
    """Bytes that already count towards RLIMIT_DATA."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmData:")[2].split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return 0


def _wait_for_child(pid: int, limit_s: float) -> int:
    """The child's wait status. Raises ChildFailedError after ``limit_s`` seconds."""
    pause_s, checked_s = 0.002, time.monotonic()
    while True:
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return 0
        if found:
            return status
        if limit_s <= 0:
            raise ChildFailedError("took too long and was ended")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.05)
        now_s = time.monotonic()
        limit_s -= min(now_s - checked_s, _MAX_PAUSE_S)
        checked_s = now_s


def _raise_for_status(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code == _INTERRUPTED:
        raise KeyboardInterrupt
    if code == _NO_MEMORY:
        raise ChildFailedError("needs more memory than is free on this machine")
    if -code in _OUT_OF_MEMORY_SIGNALS:
        raise ChildFailedError(f"was ended by {signal.Signals(-code).name}, as happens when memory runs out")
    if code > 0:
        raise ChildFailedError(f"ended with exit code {code}")
    if code < 0:
        raise ChildFailedError(f"crashed ({signal.Signals(-code).name})")


def _end_child(pid: int) -> None:
    """End the child and its descendants: SIGTERM first, SIGKILL after 0.5 s."""
    try:
        started = psutil.Process(pid).children(recursive=True)
        os.kill(pid, signal.SIGTERM)
        _wait_for_child(pid, _GRACE_S)
    except (psutil.Error, ProcessLookupError):
        return
    except ChildFailedError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for process in started:
        try:
            process.kill()
        except psutil.Error:
            pass
