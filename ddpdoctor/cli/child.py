"""Work in a process of its own: whatever becomes of it, this one goes on and knows in words what happened.

A fork, not a new interpreter: the launcher may have been started in ways that cannot be repeated (an archive, a deleted
working directory, a path of its own), it has loaded nothing heavy, and its terminal is the child's.
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
from ddpdoctor.parentdeath import die_with_parent

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_GRACE_S = 0.5
"""Until a child that was told to end has put the terminal in order."""
_LONGEST_PAUSE_S = 1.0
"""Between two looks: what is beyond it, this process was suspended, and the child with it."""
_MEMORY_SHARE = 0.9
"""Of what the machine has free. Beyond it the child's own request fails, before the kernel has to choose whom to end."""
_THREAD_BYTES = 16 << 20
"""What libraries reserve for each thread of their pools, and hardly use."""
_INTERRUPTED, _NO_MEMORY = 130, 12
_FROM_MEMORY = (signal.SIGKILL, signal.SIGABRT)
"""How a process ends that the kernel takes memory from, and one whose allocator finds none and has no other way."""


class ChildFailedError(Exception):
    """The work was not done; the text says why."""


def run_in_child(work: Callable[[], None], limit_s: float) -> None:
    """Do ``work`` in a child process, which says itself what goes wrong as an exception.

    To be told to end, it needs :func:`take_interrupts_as_exceptions`.

    Raises ChildFailedError where the child was killed, had too little memory, or took longer than ``limit_s``, KeyboardInterrupt
    where somebody asked this process to end: the child has then ended. For the main thread.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Where the caller ignores its children's ends, nobody would learn how this one ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_SIGNALS)
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise ChildFailedError(f"could not be started ({error.strerror})") from error
    if pid == 0:
        _run(work, parent, mask)
    try:
        signal.pthread_sigmask(
            signal.SIG_SETMASK, [number for number in mask if number not in _ENDING_SIGNALS]
        )
        status = _wait(pid, limit_s)
    except BaseException:
        _end(pid)
        raise
    _raise_for_status(status)


def take_interrupts_as_exceptions() -> None:
    """From here on the first request to end is a KeyboardInterrupt, and the end too quick for a second one to matter."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in _ENDING_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in _ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    # Since the job's end they have waited for this.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING_SIGNALS)


def _run(work: Callable[[], None], parent: int, mask: set[signal.Signals | int]) -> NoReturn:
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


def bound_memory() -> None:
    """Let this process take as much memory as is free now, and no more. To be called once the libraries are loaded."""
    free = _free_bytes()
    if free is None:
        return
    threads = _THREAD_BYTES * (os.cpu_count() or 1)
    most = _data_bytes() + int(free * _MEMORY_SHARE) + threads
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def _free_bytes() -> int | None:
    from ddpdoctor.telemetry.cgroup import Cgroup

    found = [Cgroup().free_memory_bytes()]
    try:
        found.append(int(psutil.virtual_memory().available))
    except (OSError, RuntimeError, ValueError):
        pass
    return min((free for free in found if free is not None), default=None)


def _data_bytes() -> int:
    """What counts against RLIMIT_DATA already."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmData:")[2].split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return 0


def _wait(pid: int, limit_s: float) -> int:
    """The child's wait status. Raises ChildFailedError once ``limit_s`` are over."""
    pause_s, seen_s = 0.002, time.monotonic()
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
        limit_s -= min(now_s - seen_s, _LONGEST_PAUSE_S)
        seen_s = now_s


def _raise_for_status(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code == _INTERRUPTED:
        raise KeyboardInterrupt
    if code == _NO_MEMORY:
        raise ChildFailedError("needs more memory than is free here")
    if -code in _FROM_MEMORY:
        raise ChildFailedError(f"was ended by {signal.Signals(-code).name}, as happens when memory runs out")
    if code < 0:
        raise ChildFailedError(f"crashed ({signal.Signals(-code).name})")


def _end(pid: int) -> None:
    """End the child and what it started: in good order if it does so at once."""
    try:
        started = psutil.Process(pid).children(recursive=True)
        os.kill(pid, signal.SIGTERM)
        _wait(pid, _GRACE_S)
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
