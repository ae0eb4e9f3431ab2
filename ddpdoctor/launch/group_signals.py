"""Detects whether a signal was sent to the whole process group or to the launcher alone.

^C, ``timeout``, a scheduler or a service manager signal every process of a group, so the job gets the signal
itself. A supervisor that knows only the launcher's process id relies on the launcher passing it on. A signal must not reach the job
twice: torchrun stops its cleanup on a second SIGTERM. A second process of the launcher's group blocks all signals; a signal that is
pending there (``/proc/PID/status``) was sent to the whole group.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable

from ddpdoctor.launch.alone import signals_of, status_of
from ddpdoctor.launch.helper import close_inherited_files
from ddpdoctor.parentdeath import die_with_parent

_FROM_KERNEL = 0x80
_PENDING_S = 0.02
_ENDING_S = 0.5


class GroupSignalDetector:
    """A process in the launcher's group that blocks all signals. Start it before any thread."""

    def __init__(self, signals: Iterable[int], libc: ctypes.CDLL) -> None:
        self._libc = libc
        self._signals = set(signals)
        self._seen: set[int] = set()
        self._pid = self._start()

    def was_sent_to_group(self, number: int, origin: int) -> bool:
        """Whether signal ``number``, received here with siginfo code ``origin``, went to the whole group.

        If the process could not be started, only signals of the terminal are recognised, by their origin.
        """
        if number in self._seen:
            self._seen.discard(number)
            return True
        deadline_s = time.monotonic() + _PENDING_S
        while number not in _pending(self._pid):
            if time.monotonic() > deadline_s:
                return origin == _FROM_KERNEL
            time.sleep(0.002)
        self._replace(number)
        return True

    def _replace(self, number: int) -> None:
        """Start a new process: a pending signal stays pending. The old one is ended last, so that no signal is missed between the two."""
        old, self._pid = self._pid, self._start()
        before, after = _pending(old), _pending(self._pid)
        self._seen |= (before & self._signals) - after - {number}
        _end(old)

    def close(self) -> None:
        """End the process."""
        _end(self._pid)
        self._pid = 0

    def _start(self) -> int:
        launcher_pid = os.getpid()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        try:
            pid = os.fork()
        except OSError:
            pid = -1
        if pid == 0:
            _wait_until_killed(self._libc, launcher_pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return max(pid, 0)


def _pending(pid: int) -> set[int]:
    """Numbers of the signals that wait for process ``pid`` to unblock them."""
    status = status_of(pid)
    return signals_of(status, "ShdPnd") | signals_of(status, "SigPnd")


def _end(pid: int) -> None:
    """Kill process ``pid`` and wait up to ``_ENDING_S`` for its end."""
    if not pid:
        return
    deadline_s = time.monotonic() + _ENDING_S
    try:
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline_s:
            os.kill(pid, signal.SIGKILL)  # still ours, so the id is
            time.sleep(0.001)
    except ChildProcessError:
        pass


def _wait_until_killed(libc: ctypes.CDLL, launcher_pid: int) -> None:
    """Sleep until killed, or until the launcher is gone."""
    try:
        die_with_parent(signal.SIGKILL, libc)
        close_inherited_files([])
        while os.getppid() == launcher_pid:
            time.sleep(3600)
    finally:
        os._exit(0)
