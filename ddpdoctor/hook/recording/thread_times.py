"""A thread's time on a CPU and its wait for one, as the kernel counts them."""

from __future__ import annotations

import os
from threading import get_native_id

from ...rundir import file_identity


class ThreadTimes:
    """What the kernel counts of a thread: how long it ran, and how long it was runnable without a CPU. Of the thread
    that makes it; read by any."""

    __slots__ = ("_file", "_handle")

    def __init__(self) -> None:
        try:
            path = f"/proc/self/task/{get_native_id()}/schedstat"
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._file = file_identity(self._handle)
        except OSError:
            self._handle, self._file = -1, None

    @property
    def known(self) -> bool:
        """Whether they can be read, as far as is known."""
        return self._handle >= 0

    def read_ns(self) -> tuple[int, int] | None:
        """Time on a CPU and time waited for one, so far; None if the system does not report it."""
        if self._handle < 0:
            return None
        try:
            # The third number counts time slices.
            ran, waited, _ = os.pread(self._handle, 64, 0).split()
            return int(ran), int(waited)
        except (OSError, ValueError):
            # The job has closed all files that it did not know; the number may be one of its own by now.
            self._handle = -1
            return None

    def close(self) -> None:
        """Stop reading them."""
        handle, self._handle = self._handle, -1
        if handle >= 0 and file_identity(handle) == self._file:
            os.close(handle)
