"""Reads a thread's time on a CPU and its wait for one, from the kernel."""

from __future__ import annotations

import os
from threading import get_native_id

from ...rundir import file_identity


class ThreadTimes:
    """The time a thread has run and the time it was runnable without a CPU. Constructed on that thread; any thread may read it."""

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
        """Whether the times can be read, as far as is known."""
        return self._handle >= 0

    def read_ns(self) -> tuple[int, int] | None:
        """Total time on a CPU and waiting for one, ns; None if the system does not report them."""
        if self._handle < 0:
            return None
        try:
            # The third number counts time slices.
            ran, waited, _ = os.pread(self._handle, 64, 0).split()
            return int(ran), int(waited)
        except (OSError, ValueError):
            # The job has closed all files that it did not open; the descriptor may be one of the job's now.
            self._handle = -1
            return None

    def close(self) -> None:
        """Close the file."""
        handle, self._handle = self._handle, -1
        if handle >= 0 and file_identity(handle) == self._file:
            os.close(handle)
