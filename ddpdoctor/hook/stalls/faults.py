"""faulthandler writing to a file of ours: at a fatal signal, and where Python's lock is kept for long.

Neither takes anything from the job: see :mod:`..faulttimer`. The timer's thread does not exist in a forked child, which would
wait for it at its end for ever, so there is no timer while the process forks.
"""

from __future__ import annotations

import math
import os
import time

from ...rundir import file_identity
from .. import faulttimer
from ..guard import part
from ..patching import guarded

_PART = part("faulthandler")
_FATAL = ("SIGSEGV", "SIGFPE", "SIGABRT", "SIGBUS", "SIGILL")
"""Those that faulthandler takes."""
_EARLY_SHARE = 1 / 8
"""Of the timer's time: by so much it may go off early."""


class _State:
    """Of this process."""

    __slots__ = ("armed", "forking", "watched")

    def __init__(self) -> None:
        self.forking = False
        self.armed = False
        """Whether the timer, once set, has not been cancelled since."""
        self.watched = False
        """Whether forks are."""


_state = _State()
_open: list[Faults] = []


class Faults:
    """The file, and what is set to write there. Only the attendant's thread calls it, but for ``stop``."""

    def __init__(self, handle: int, timeout_s: float | None) -> None:
        """``handle`` is the open file, ``timeout_s`` after how long without ``rearm`` the stacks are written; None for never."""
        self._handle, self._timeout_s = handle, timeout_s
        self._file = file_identity(handle)
        self._armed_s = -math.inf
        _open.append(self)
        _watch_forks()
        if not faulttimer.is_enabled() and _nobody_takes_fatal_signals():
            faulttimer.enable(file=handle, all_threads=True)
            faulttimer.owner.fatal_is_ours = True

    def rearm(self) -> None:
        """Put the timer off, at each call or a little more rarely: each time starts a thread."""
        if self._file is None or self._timeout_s is None:
            return
        if file_identity(self._handle) != self._file:
            # The job has closed all files that it did not know; the number may be one of its own by now.
            self._file = None
            self.stop()
            return
        now_s = time.monotonic()
        if os.fstat(self._handle).st_size:
            # It went off, but whoever calls this has Python's lock again: nobody hangs in what was written.
            os.ftruncate(self._handle, 0)
        elif _state.armed and now_s - self._armed_s < _EARLY_SHARE * self._timeout_s:
            return
        if not faulttimer.owner.timer_is_the_jobs and not _state.forking:
            faulttimer.later(self._timeout_s, repeat=False, file=self._handle, exit=False)
            self._armed_s, _state.armed = now_s, True

    def stop(self) -> None:
        """Set nothing any more."""
        if self in _open:
            _open.remove(self)
        self._timeout_s = None
        if not faulttimer.owner.timer_is_the_jobs:
            faulttimer.cancel()
        _give_back_fatal()
        known, self._file = self._file, None
        if known is not None:
            os.close(self._handle)


def _give_back_fatal() -> None:
    if faulttimer.owner.fatal_is_ours:
        faulttimer.owner.fatal_is_ours = False
        faulttimer.disable()


def forget_faults() -> None:
    """In a forked child: what its parent set is not its own."""
    _state.forking = _state.armed = False
    _give_back_fatal()
    for faults in _open:
        faults._file = faults._timeout_s = None
    _open.clear()


def _watch_forks() -> None:
    if not _state.watched:
        _state.watched = True
        os.register_at_fork(before=guarded(_PART, _before_fork), after_in_parent=guarded(_PART, _after_fork))


def _before_fork() -> None:
    _state.forking, _state.armed = True, False
    if _open and not faulttimer.owner.timer_is_the_jobs:
        faulttimer.cancel()


def _after_fork() -> None:
    _state.forking = False


def _nobody_takes_fatal_signals() -> bool:
    """Whether each would end the process: a handler that Python did not set shows as None."""
    import signal

    numbers = [getattr(signal, name) for name in _FATAL if hasattr(signal, name)]
    return all(signal.getsignal(number) is signal.SIG_DFL for number in numbers)
