"""The folder that a trial has to itself. It goes with the trial, or, where we were killed meanwhile, with the next one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ddpdoctor.rundir import open_regular

_PREFIX, _LOCK = "ddpdoctor-trial-", "lock"
_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")
_MARK = b"ddpdoctor.trial/1\n"
"""Content of the lock file: a folder without it is somebody else's, whatever its name."""


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder, locked as long as this process uses it. Raises OSError."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        unlocked = folder / f"{_LOCK}.new"
        with unlocked.open("xb") as lock:
            lock.write(_MARK)
            lock.flush()
            with contextlib.suppress(
                OSError
            ):  # a file system without locks; nobody removes the folder for us then
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                unlocked.rename(folder / _LOCK)
            yield folder


def _remove_abandoned(place: Path) -> None:
    """Folders of our own whose process has gone: they may hold copies of a whole working directory."""
    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            own = (
                stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
            )
            if not own or _NAME.fullmatch(folder.name) is None:
                continue
            with os.fdopen(open_regular(str(folder / _LOCK)), "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if lock.read(len(_MARK) + 1) == _MARK:
                    shutil.rmtree(folder, ignore_errors=True)
