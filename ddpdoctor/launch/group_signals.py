"""Tells a signal sent to the whole process group from one sent to the launcher alone.

^C, ``timeout``, a scheduler or a service manager signal every process of a group, and the job gets the signal
itself; a supervisor that knows only the launcher's process id relies on it being passed on. Passing on what
the job has got already would hurt: torchrun takes a second SIGTERM as an order to stop cleaning up. The
signal itself does not tell the two apart, so a second process waits in the launcher's group with all signals
blocked, and what is pending there was sent to everybody.
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
_PATIENCE_S = 0.02
_ENDING_S = 0.5


class GroupSignalDetector:
    """A process that does nothing but be signalled. Start it before any thread."""

    def __init__(self, signals: Iterable[int], libc: ctypes.CDLL) -> None:
        self._libc = libc
        self._signals = set(signals)
        self._seen: set[int] = set()
        self._pid = self._start()

    def was_sent_to_group(self, number: int, origin: int) -> bool:
        """Whether signal ``number``, received here with siginfo code ``origin``, went to the whole group.

        Where the witness could not be started, signals of the terminal are known by their origin.
        """
        if number in self._seen:
            self._seen.discard(number)
            return True
        deadline_s = time.monotonic() + _PATIENCE_S
        while number not in _pending(self._pid):
            if time.monotonic() > deadline_s:
                return origin == _FROM_KERNEL
            time.sleep(0.002)
        self._replace(number)
        return True

    def _replace(self, number: int) -> None:
        """A fresh witness, as what is pending stays so.

        The old one goes last, lest a signal comes between the two.
        """
        old, self._pid = self._pid, self._start()
        before, after = _pending(old), _pending(self._pid)
        self._seen |= (before & self._signals) - after - {number}
        _end(old)

    def close(self) -> None:
        """End the witness."""
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
    """End process ``pid``, and wait for that for a moment: a child that nobody waited for goes with this process."""
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
    """The witness's life: until it is killed, or its launcher is gone."""
    try:
        die_with_parent(signal.SIGKILL, libc)
        close_inherited_files([])
        while os.getppid() == launcher_pid:
            time.sleep(3600)
    finally:
        os._exit(0)
