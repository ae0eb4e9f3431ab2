"""Who carries what the ranks of a run record on a host to the run directory: one process beside the launcher, or, where
there is none, each rank itself."""

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
"""The file of the office of watching for hangs."""
METRICS_SERVER = "metrics"
"""The same of serving metrics."""


class HostLock:
    """This process, once it has taken the office; or, by the name of its file, another one that one process of a host has."""

    def __init__(self, root: str, file: str = _COPIER) -> None:
        self._root, self._file = root, file
        self._handle = -1

    def take(self) -> bool:
        """Take the office, or see that it is still this process's; False where another process has it, or the root cannot be used."""
        try:
            with private_folder(self._root) as within:
                if self._handle >= 0 and file_identity(self._handle) == identity_of(self._file, within):
                    return True
                # Somebody has removed the file: nobody would find the lock.
                self.release()
                handle = open_file(self._file, within, os.O_RDWR | os.O_CREAT)
                if lock_now(handle):
                    self._handle = handle
                else:
                    os.close(handle)
        except OSError:
            return False
        return self._handle >= 0

    def release(self) -> None:
        """Give it back."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            unlock(handle)
            os.close(handle)


def copier_lock_is_held(root: str) -> bool:
    """Whether some other process carries what ranks record below ``root``. Never raises."""
    try:
        with private_folder(root) as within:
            return lock_holder(_COPIER, within) is not None
    except OSError:
        return False


def remove_root(root: str) -> None:
    """Remove the root of a run's spools where it holds none. Never raises."""
    try:
        with private_folder(root) as within:
            names = os.listdir(within)
            if all(
                name in (_COPIER, HANG_MONITOR, METRICS_SERVER, *HOST_DOCUMENTS) or is_unjoined_file(name)
                for name in names
            ):
                for name in names:
                    os.unlink(name, dir_fd=within)
        os.rmdir(root)
    except OSError:
        pass
