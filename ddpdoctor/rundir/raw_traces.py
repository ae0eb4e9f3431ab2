"""Where a trace lies uncompressed while it is saved: a folder that nobody else can write into, and that is found again.

The profiler writes a file of the name that it is given and one with ``.tmp`` behind it, through whatever link somebody has
planted there. A rank that is killed meanwhile leaves gigabytes.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
import time
from contextlib import contextmanager
from typing import Callable, Iterable, Iterator, Optional

_NAME = re.compile(r"^ddpdoctor-raw-([0-9a-f]{16})?-(\d+)-\w+$")
_STALE_S = 24 * 3600.0
"""No trace takes so long to save."""


@contextmanager
def raw_folder(base: str, run_id: Optional[str]) -> Iterator[str]:
    """A new folder below ``base``, which goes with the block. Raises OSError."""
    made = tempfile.mkdtemp(prefix=f"ddpdoctor-raw-{run_id or ''}-{os.getpid()}-", dir=base)
    try:
        handle = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            # By its handle, because others may rename what lies in a folder of theirs.
            by_handle = f"/proc/self/fd/{handle}"
            yield by_handle if os.path.isdir(by_handle) else made
        finally:
            os.close(handle)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def clear_raw_folders(bases: Iterable[str], run_id: Optional[str], is_alive: Callable[[int], bool]) -> None:
    """Remove what killed ranks left: those of the run ``run_id``, and any that is a day old. Never raises.

    Only folders of this user's own count, and only files in them.
    """
    for base in bases:
        try:
            names = [name for name in os.listdir(base) if _NAME.match(name)]
        except OSError:
            continue
        for name in names:
            try:
                _clear(os.path.join(base, name), run_id, is_alive)
            except OSError:
                continue


def _clear(folder: str, run_id: Optional[str], is_alive: Callable[[int], bool]) -> None:
    found = _NAME.match(os.path.basename(folder))
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if found is None or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700:
            return
        ours = run_id is not None and found.group(1) == run_id and not is_alive(int(found.group(2)))
        names = os.listdir(handle)
        used_s = [status.st_mtime] + [
            os.stat(name, dir_fd=handle, follow_symlinks=False).st_mtime for name in names
        ]
        if ours or max(used_s) < time.time() - _STALE_S:
            for name in names:
                os.unlink(name, dir_fd=handle)
            os.rmdir(folder)
    finally:
        os.close(handle)
