"""Opening what lies at a path, whatever it is: only regular files, pipes and URLs can be read, and only they are opened."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

from ddpdoctor.readable import is_readable

from .remote import is_url, open_url

_WRITER_S = 60.0
"""How long a FIFO is waited for until some program writes to it."""


def open_place(path: str, *, ahead: bool = True) -> BinaryIO:
    """What lies at ``path``, a local path or a URL, for reading; of a URL, unless ``ahead``, no more is fetched than is read.
    Raises OSError, or :class:`UnusableInput` for a URL."""
    return open_url(path, ahead=ahead) if is_url(path) else open_binary(path)


def size_of(stream: BinaryIO) -> int:
    """Bytes of what is open, as it lies there; 0 where nobody knows."""
    size = getattr(stream, "size", None)
    if isinstance(size, int):
        return size
    try:
        return os.fstat(stream.fileno()).st_size
    except (OSError, AttributeError, ValueError):
        return 0


def open_binary(path: str) -> BinaryIO:
    """A local file, or a FIFO that somebody writes to, for reading.

    Raises OSError, also for all that is neither: opening such things may hang.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISFIFO(mode):
            _await_writer(handle, path)
        elif not stat.S_ISREG(mode):
            reason = errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO
            raise OSError(reason, os.strerror(reason) if stat.S_ISDIR(mode) else "it is not a file", path)
        os.set_blocking(handle, True)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _await_writer(handle: int, path: str) -> None:
    if not is_readable(handle, _WRITER_S):
        raise OSError(errno.ETIMEDOUT, f"no program wrote to this FIFO within {_WRITER_S:.0f} s", path)
