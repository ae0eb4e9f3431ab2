"""One sampler a host, and one exporter of metrics: several launchers may share a host and its folder, one of them samples."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import psutil

TELEMETRY = "telemetry"
_CLOCK_STEP_S = 2.0
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY)


class HostLock:
    """Held until ``release()`` or the end of this process."""

    def __init__(self, handle: int | None, pid_file: Path | None) -> None:
        self._handle = handle
        self._pid_file = pid_file

    def release(self) -> None:
        """Give the lock up. May be called twice; never raises."""
        handle, self._handle = self._handle, None
        pid_file, self._pid_file = self._pid_file, None
        try:
            if handle is not None:
                try:
                    # Closing alone would leave it held by whatever process was forked meanwhile.
                    fcntl.flock(handle, fcntl.LOCK_UN)
                finally:
                    os.close(handle)
            if pid_file is not None:
                pid_file.unlink()
        except OSError:
            pass


def acquire_host_lock(directory: Path, of: str = TELEMETRY) -> HostLock | None:
    """The lock of ``directory`` (``RUN/hosts/<host>``, made if missing) for one kind of work; None where another process holds it.

    None as well where the folder cannot be written: there is nothing to sample into then. Never raises.
    """
    handle = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        handle = os.open(directory / f"{of}.lock", flags, 0o644)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return HostLock(handle, None)
    except OSError as error:
        if handle is not None:
            os.close(handle)
        if error.errno in _UNSUPPORTED and handle is not None:
            return _acquire_pid_file(directory / f"{of}.pid")
        return None


def _acquire_pid_file(path: Path) -> HostLock | None:
    """For file systems without flock (some NFS and FUSE mounts).

    Two processes that find the same stale file at the same moment may both get the lock. Samples are whole
    lines whoever writes them, so that costs a doubled sample rate and nothing else.
    """
    for _ in range(2):
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            if _alive(path):
                return None
            path.unlink(missing_ok=True)
            continue
        except OSError:
            return None
        with os.fdopen(handle, "w") as out:
            out.write(f"{os.getpid()} {psutil.Process().create_time()}\n")
        return HostLock(None, path)
    return None


def _alive(path: Path) -> bool:
    """Whether the process named in the file still runs; its start time tells it from a later one."""
    try:
        pid, created_s = path.read_text().split()
        # The start time is told against a wall clock that may be corrected.
        return bool(abs(psutil.Process(int(pid)).create_time() - float(created_s)) < _CLOCK_STEP_S)
    except (OSError, ValueError, psutil.Error):
        return False
