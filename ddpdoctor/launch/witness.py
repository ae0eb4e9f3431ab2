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
        deadline_s = time.monotonic() + _PATIENCE_S
        while number not in self._seen and time.monotonic() < deadline_s:
            self._seen |= self._pending()
            time.sleep(0.002)
        if number not in self._seen:
            return origin == _FROM_KERNEL
        self._seen.discard(number)
        self.close()
        self._pid = self._start()
        return True

    def close(self) -> None:
        """End the witness."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0

    def _pending(self) -> set[int]:
        try:
            status = Path(f"/proc/{self._pid}/status").read_text()
        except OSError:
            return set()
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        masks = [int(fields.get(name, "0"), 16) for name in ("ShdPnd", "SigPnd")]
        return {number for number in self._signals if any(mask >> (number - 1) & 1 for mask in masks)}

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
