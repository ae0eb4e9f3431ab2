"""faulthandler, writing to a file of the spool: at a fatal signal, and at a signal of the launcher's hang monitor to
a rank that does not answer.

It uses one real-time signal, and writes the stack of the process's first thread, which takes the signal, and of no
other: walking the stack of a running thread crashes the process once in some hundred times if that stack is deep. So no
timer is used: a timer of faulthandler's (``dump_traceback_later``) walks all stacks, also of a healthy process that was
suspended for a while. A signal for which the job has a handler, or which it blocks, is not used.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading

from ...rundir import file_identity
from .. import fatalsignals

_FATAL = ("SIGSEGV", "SIGFPE", "SIGABRT", "SIGBUS", "SIGILL")
"""Signals that faulthandler handles."""
_BELOW_LAST = 9
"""Of real-time signals the first ones are the C library's, and programs that use any count from either end."""
_FREE = (signal.SIG_DFL, signal.SIG_IGN)


_reserved = [0]
"""The signal reserved in this process; 0 for none."""
_open: list[Faults] = []


def reserve_signal() -> None:
    """Have the signal ignored unless :func:`listen` was called: it must end no process that takes it just when
    faulthandler has given it back. Works in the main thread only; Python allows no other to set a handler."""
    number = int(getattr(signal, "SIGRTMAX", 0)) - _BELOW_LAST
    if _reserved[0] or number <= 0 or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(number) in _FREE and number not in signal.pthread_sigmask(signal.SIG_BLOCK, []):
        signal.signal(number, signal.SIG_IGN)
        _reserved[0] = number


def listen(handle: int) -> int:
    """Have faulthandler write to the open file ``handle`` at the signal from now on. Returns the signal, 0 if none
    was free."""
    number = _reserved[0]
    if number and signal.getsignal(number) is signal.SIG_IGN:
        faulthandler.register(number, file=handle, all_threads=False, chain=False)
        return number
    return 0


def stop_listening() -> None:
    """Have the signal ignored again."""
    # To unregister puts back what was before, also where the job has set a handler of its own since.
    if _reserved[0] and signal.getsignal(_reserved[0]) is signal.SIG_IGN:
        faulthandler.unregister(_reserved[0])


class Faults:
    """The file for faulthandler, and its registrations. Only the status thread calls it, except for ``stop``."""

    def __init__(self, handle: int) -> None:
        """``handle`` is the open file."""
        self._handle = handle
        self._file = file_identity(handle)
        _open.append(self)
        if not fatalsignals.is_enabled() and _fatal_signals_end_process():
            fatalsignals.enable(file=handle, all_threads=True)
            fatalsignals.enabled_by_hook[0] = True
        self.signal = listen(handle)
        """Of the operating system, at which the stack is written; 0 for none."""

    def look(self) -> None:
        """Discard what was written so far: this thread runs, so no thread holds the GIL."""
        if self.signal and signal.getsignal(self.signal) is not signal.SIG_IGN:
            self.signal = 0  # the job has a handler of its own by now
        if self._file is None:
            return
        if file_identity(self._handle) != self._file:
            # The job has closed all files that it did not know; the number may be one of its own by now.
            self._file = None
            self.stop()
        else:
            self._empty()

    def _empty(self) -> None:
        if os.fstat(self._handle).st_size:
            os.ftruncate(self._handle, 0)

    def stop(self) -> None:
        """Undo all that was set, and close the file."""
        if self in _open:
            _open.remove(self)
            stop_listening()
        _give_back_fatal()
        known, self._file = self._file, None
        if known is not None:
            self._empty()
            os.close(self._handle)


def _give_back_fatal() -> None:
    if fatalsignals.enabled_by_hook[0]:
        fatalsignals.enabled_by_hook[0] = False
        fatalsignals.disable()


def forget_faults() -> None:
    """Forget, in a forked child, what its parent set."""
    _give_back_fatal()
    if _open:
        stop_listening()
    for faults in _open:
        faults._file = None
    _open.clear()


def _fatal_signals_end_process() -> bool:
    """Whether each fatal signal would end the process: a handler that Python did not set shows as None."""
    numbers = [getattr(signal, name) for name in _FATAL if hasattr(signal, name)]
    return all(signal.getsignal(number) is signal.SIG_DFL for number in numbers)
