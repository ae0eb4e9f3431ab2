"""The folder that a trial has to itself. It goes with the trial, or, where we were killed meanwhile, with the next one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX, _LOCK = "ddpdoctor-trial-", "lock"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder, locked as long as this process uses it. Raises OSError."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        unlocked = folder / f"{_LOCK}.new"
        with unlocked.open("wb") as lock:
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
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            with (folder / _LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
