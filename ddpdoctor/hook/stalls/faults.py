"""Writes stacks by faulthandler, to a file of the spool: at a fatal signal, and at a signal of the launcher's hang monitor to a
rank that does not answer. Also writes the status file of a rank without a process group.

It uses one real-time signal and writes only the stack of the process's first thread, which receives the signal: walking the stack
of a running thread crashes the process about once in some hundred times if the stack is deep. No timer is used, because
faulthandler's (``dump_traceback_later``) walks all stacks, also those of a healthy process that was suspended for a while. A signal
that the job handles or blocks is not used.

Before its process group exists, a rank has a status file and that signal; the hook runs no thread and no timer. The launcher's hang
monitor sends the signal if other ranks have waited for long, but never to a rank that has begun to join.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import threading
import time
from threading import get_ident

from ...rundir import file_identity
from ...rundir.host_files import append_unjoined, create_unjoined_file, remove_unjoined_file
from .. import environment, fatalsignals
from ..guard import part
from ..patching import guarded
from ..profiling import can_be_read, stack_of
from .rank_status import exception_documents, frames_of, uncaught_exception

_FATAL = ("SIGSEGV", "SIGFPE", "SIGABRT", "SIGBUS", "SIGILL")
_SIGRTMAX_OFFSET = 9
"""Offset of the signal from SIGRTMAX. The C library uses the first real-time signals, and other programs count from either end."""
_DEFAULT_HANDLERS = (signal.SIG_DFL, signal.SIG_IGN)


_reserved = [0]
"""The signal reserved in this process; 0 if none."""
_open: list[Faults] = []


def reserve_signal() -> None:
    """Ignore the signal unless :func:`listen` was called, so that it ends no process that receives it just after faulthandler was
    unregistered. Has an effect on the main thread only; Python allows no other to set a handler."""
    number = int(getattr(signal, "SIGRTMAX", 0)) - _SIGRTMAX_OFFSET
    if _reserved[0] or number <= 0 or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(number) in _DEFAULT_HANDLERS and number not in signal.pthread_sigmask(
        signal.SIG_BLOCK, []
    ):
        signal.signal(number, signal.SIG_IGN)
        _reserved[0] = number


def listen(handle: int) -> int:
    """Make faulthandler write to the open file ``handle`` at the signal. Returns the signal; 0 if none was free."""
    number = _reserved[0]
    if number and signal.getsignal(number) is signal.SIG_IGN:
        faulthandler.register(number, file=handle, all_threads=False, chain=False)
        return number
    return 0


def stop_listening() -> None:
    """Ignore the signal again."""
    # Unregistering restores the previous handler, even if the job has set its own since.
    if _reserved[0] and signal.getsignal(_reserved[0]) is signal.SIG_IGN:
        faulthandler.unregister(_reserved[0])


class Faults:
    """The file for faulthandler, and its registrations. Only the status thread calls it, except ``stop``."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._file = file_identity(handle)
        _open.append(self)
        if not fatalsignals.is_enabled() and _fatal_signals_end_process():
            fatalsignals.enable(file=handle, all_threads=True)
            fatalsignals.enabled_by_hook[0] = True
        self.signal = listen(handle)
        """The signal at which the stack is written; 0 if none."""

    def look(self) -> None:
        """Discard what was written so far, because a running status thread shows that no thread holds the GIL."""
        if self.signal and signal.getsignal(self.signal) is not signal.SIG_IGN:
            self.signal = 0  # the job has set its own handler
        if self._file is None:
            return
        if file_identity(self._handle) != self._file:
            # The job has closed all files that it did not open; the descriptor may be one of the job's now.
            self._file = None
            self.stop()
        else:
            self._empty()

    def _empty(self) -> None:
        if os.fstat(self._handle).st_size:
            os.ftruncate(self._handle, 0)

    def stop(self) -> None:
        """Undo all registrations and close the file."""
        if self in _open:
            _open.remove(self)
            stop_listening()
        _disable_fatal_handler()
        known, self._file = self._file, None
        if known is not None:
            self._empty()
            os.close(self._handle)


def _disable_fatal_handler() -> None:
    if fatalsignals.enabled_by_hook[0]:
        fatalsignals.enabled_by_hook[0] = False
        fatalsignals.disable()


def forget_faults() -> None:
    """Undo the parent's registrations in a forked child."""
    _disable_fatal_handler()
    if _open:
        stop_listening()
    for faults in _open:
        faults._file = None
    _open.clear()


def _fatal_signals_end_process() -> bool:
    """Whether each fatal signal would end the process. getsignal returns None for a handler that Python did not set."""
    numbers = [getattr(signal, name) for name in _FATAL if hasattr(signal, name)]
    return all(signal.getsignal(number) is signal.SIG_DFL for number in numbers)


_UNJOINED = part("watching for ranks that do not join")
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
"""Variables set by launchers of ranks. A launcher in a pod of several may itself have the first two."""


_status_file: list[tuple[int, str]] = []
"""The descriptor and path of this process's status file, if it has one."""


def _begin_unjoined() -> None:
    if _status_file or multiprocessing.parent_process() is not None:
        return
    rank, world_size, local_rank = (os.environ.get(name, "") for name in _RANK_VARIABLES)
    root = os.environ.get(environment.SPOOL)
    if not root or not (rank.isdecimal() and world_size.isdecimal() and local_rank.isdecimal()):
        return
    if int(world_size) < 2 or not environment.hang_after_s(os.environ):
        return
    handle, path = create_unjoined_file(root, int(rank))
    _status_file.append((handle, path))
    reserve_signal()
    append_unjoined(
        handle,
        rank=int(rank),
        world_size=int(world_size),
        handle=handle,
        signal=listen(handle),
        at_ns=time.time_ns(),
    )


def _note_join_started() -> None:
    for handle, _ in _status_file:
        append_unjoined(handle, joining_ns=time.time_ns())
        if can_be_read():
            # The hang monitor does not send the signal from now on.
            append_unjoined(handle, frames=frames_of(stack_of(get_ident())))


def _write_unjoined_end() -> None:
    error = uncaught_exception()
    if _status_file and error is not None:
        append_unjoined(_status_file[0][0], ended_ns=time.time_ns(), raised=exception_documents(error))


def _end_unjoined() -> None:
    for _, path in _status_file:
        remove_unjoined_file(path)
    _forget_unjoined()


def _forget_unjoined() -> None:
    while _status_file:
        handle, _ = _status_file.pop()
        stop_listening()
        os.close(handle)


begin_unjoined = guarded(_UNJOINED, _begin_unjoined)
"""Create the status file, because this process may become a rank."""
note_join_started = guarded(_UNJOINED, _note_join_started)
"""Note that the process has called ``init_process_group``."""
write_unjoined_end = guarded(_UNJOINED, _write_unjoined_end)
"""Write the exception that ends the process before it has joined."""
end_unjoined = guarded(_UNJOINED, _end_unjoined)
"""Remove the status file, because the process has joined."""
forget_unjoined = guarded(_UNJOINED, _forget_unjoined)
"""Close the parent's status file in a forked child."""
