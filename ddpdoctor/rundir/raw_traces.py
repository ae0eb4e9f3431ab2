"""The folder of an uncompressed trace while it is saved: no other user can write into it, and it can be found again.

The profiler writes a file of the given name and one with ``.tmp`` appended, through any link that another user has
planted there. A rank that is killed meanwhile leaves gigabytes.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from .liveness import State, Writing, last_change_s, writer_in
from .owned import private_folder
from .spool import own_roots_pattern

_NAME = re.compile(r"^ddpdoctor-raw-([0-9a-f]{16})?-(\d+)-\w+$")
HANDED_OVER = "handed-over"
"""A file that marks a trace which another process is to compress."""
_STALE_S = 24 * 3600.0
"""No trace takes so long to save."""


class RawFolder:
    """The folder of one trace."""

    def __init__(self, path: str, handle: int) -> None:
        self.path = path
        by_handle = f"/proc/self/fd/{handle}"
        self.place = by_handle if os.path.isdir(by_handle) else path
        """The path to write to: another user who owns the parent folder may rename entries in it."""
        self.handed_over = False
        """Whether another process is to compress the trace, and to remove the folder."""
        self._handle = handle

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        """A context in which the trace is queued for another process, which may compress it at once. Raises OSError."""
        os.close(os.open(HANDED_OVER, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._handle))
        yield
        self.handed_over = True


@contextmanager
def raw_folder(base: str, run_id: str | None) -> Iterator[RawFolder]:
    """A new folder below ``base``, which is removed at the end of the block unless it was handed over. Raises
    OSError."""
    path = tempfile.mkdtemp(prefix=f"ddpdoctor-raw-{run_id or ''}-{os.getpid()}-", dir=base)
    handed_over = False
    try:
        with private_folder(path) as handle:
            raw, writing = RawFolder(path, handle), Writing(handle)
            try:
                yield raw
            finally:
                writing.end()
                handed_over = raw.handed_over
    finally:
        if not handed_over:
            shutil.rmtree(path, ignore_errors=True)


def clear_raw_folders(bases: Iterable[str], run_id: str | None) -> None:
    """Remove what killed ranks left: those of the run ``run_id``, and any that is a day old. Never raises.

    Only folders of this user's own count, and only files in them; those that were handed over only once the spool is gone
    that says so.
    """
    for base in bases:
        try:
            names = [name for name in os.listdir(base) if _NAME.match(name)]
        except OSError:
            continue
        for name in names:
            try:
                _clear(os.path.join(base, name), run_id)
            except OSError:
                continue


def _clear(folder: str, run_id: str | None) -> None:
    found = _NAME.match(os.path.basename(folder))
    if found is None:
        return
    with private_folder(folder) as handle:
        of_this_run = run_id is not None and found.group(1) == run_id
        names = os.listdir(handle)
        if HANDED_OVER in names and glob.glob(own_roots_pattern(found.group(1))):
            return
        # The process that handed it over does not write to it any more.
        state = State.OVER if HANDED_OVER in names else writer_in(handle).state
        aged = state is not State.WRITING and last_change_s(handle) < time.time() - _STALE_S
        if aged or (of_this_run and state is State.OVER):
            for name in names:
                os.unlink(name, dir_fd=handle)
            os.rmdir(folder)
