"""Exclusive locks, each held by at most one process of a host for a run: that of the process that copies the ranks'
records, of the hang monitor and of the metrics server.

Without a process that copies, each rank copies its own records.
"""

from __future__ import annotations

import os

from .hostdocs import HOST_DOCUMENTS
from .owned import (
    file_identity,
    identity_of,
    lock_holder,
    lock_now,
    open_file,
    private_folder,
    unlock,
)
from .unjoined import is_unjoined_file

_COPIER = "carrier"
HANG_MONITOR = "sentinel"
"""File of the lock of the process that watches for hangs."""
METRICS_SERVER = "metrics"
"""File of the lock of the process that serves metrics."""


class HostLock:
    """An exclusive lock on ``file`` in the root of a run's spools; by default that of the process which copies them."""

    def __init__(self, root: str, file: str = _COPIER) -> None:
        self._root, self._file = root, file
        self._handle = -1

    def take(self) -> bool:
        """Take the lock. True if this process holds it now, also from before; False if another process does, or the
        root cannot be used."""
        try:
            with private_folder(self._root) as root_fd:
                if self._handle >= 0 and file_identity(self._handle) == identity_of(self._file, root_fd):
                    return True
                # The file was removed: other processes would not find the lock.
                self.release()
                handle = open_file(self._file, root_fd, os.O_RDWR | os.O_CREAT)
                if lock_now(handle):
                    self._handle = handle
                else:
                    os.close(handle)
        except OSError:
            return False
        return self._handle >= 0

    def release(self) -> None:
        """Release the lock."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            unlock(handle)
            os.close(handle)


def copier_lock_is_held(root: str) -> bool:
    """Whether another process copies the spools in ``root``. Never raises."""
    try:
        with private_folder(root) as root_fd:
            return lock_holder(_COPIER, root_fd) is not None
    except OSError:
        return False


def remove_root(root: str) -> None:
    """Remove the root of a run's spools if it has no spool. Never raises."""
    try:
        with private_folder(root) as root_fd:
            names = os.listdir(root_fd)
            if all(
                name in (_COPIER, HANG_MONITOR, METRICS_SERVER, *HOST_DOCUMENTS) or is_unjoined_file(name)
                for name in names
            ):
                for name in names:
                    os.unlink(name, dir_fd=root_fd)
        os.rmdir(root)
    except OSError:
        pass
