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
from pathlib import Path

PR_SET_PDEATHSIG = 1
_FROM_KERNEL = 0x80
_PATIENCE_S = 0.02


class GroupWitness:
    """A process that does nothing but be signalled. Start it before any thread."""

    def __init__(self, signals: Iterable[int]) -> None:
        self._signals = set(signals)
        self._seen: set[int] = set()
        self._pid = self._start()

    def saw(self, number: int, origin: int) -> bool:
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
        launcher_pid, libc = os.getpid(), ctypes.CDLL(None)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        try:
            pid = os.fork()
        except OSError:
            pid = -1
        if pid == 0:
            _stand_by(libc, launcher_pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return max(pid, 0)


def _pending(pid: int) -> set[int]:
    """Numbers of the signals that wait for process ``pid`` to unblock them."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return set()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    mask = int(fields.get("ShdPnd", "0"), 16) | int(fields.get("SigPnd", "0"), 16)
    return {bit + 1 for bit in range(mask.bit_length()) if mask >> bit & 1}


def _end(pid: int) -> None:
    if pid:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _stand_by(libc: ctypes.CDLL, launcher_pid: int) -> None:
    """The witness's life: until it is killed, or its launcher is gone."""
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # An end of the job's pipes kept open here would keep their readers waiting.
        for handle in [path.name for path in Path("/proc/self/fd").iterdir()]:
            try:
                os.close(int(handle))
            except OSError:
                pass
        while os.getppid() == launcher_pid:
            time.sleep(3600)
    finally:
        os._exit(0)
