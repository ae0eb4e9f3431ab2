"""Opens regular files, FIFOs and URLs, and nothing else; derives rank and host from file names; reports reading progress."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

from ddpdoctor.errors import UnusableInput
from ddpdoctor.readable import is_readable

Listener = Callable[[float], None]

_DECODE_SHARE = 0.95
"""Share of a file's reading time for decoding; the rest is joining and sorting its columns."""
_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def progress_to(listener: Listener) -> Iterator[None]:
    """While active, :func:`report_progress` in this context calls ``listener`` with the share of the file that is read, 0 to 1."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def report_progress(part: float) -> None:
    """Report the share of the file that is decoded, 0 to 1, to the current :func:`progress_to`."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(_DECODE_SHARE * min(max(part, 0.0), 1.0))


_TENSORBOARD = re.compile(r"^(?P<host>.+)_(?P<pid>\d+)\.(?P<stamp>\d{10,})\.pt\.trace\.json")
"""File name of ``tensorboard_trace_handler`` without a worker name: host_pid.ns.pt.trace.json, without a rank."""
_RANK = (
    re.compile(
        r"(?<![a-z])(?:global[-_ ]?)?(?<!local)(?<!local[-_ ])rank[-_ =]?0*(\d+)(?!\d)", re.IGNORECASE
    ),
    re.compile(r"(?<![a-z])(?:worker|trainer)[-_ ]?0*(\d+)(?!\d)", re.IGNORECASE),
    re.compile(r"(?:^|[-_.])r0*(\d+)(?=[-_.]|$)", re.IGNORECASE),
)
_MIN_PID = 100
"""A smaller number before the time stamp is a step ("worker0_step_12.1694128201545"), not a process id."""


MAX_RANKS = 10_000_000
"""Upper bound of ranks and world sizes; a larger number is invalid."""


def rank_of_name(path: str) -> int | None:
    """The rank in a file name (rank-34, rank0, worker3, _r5_), else in its folder's name; None if neither has one."""
    file = PurePosixPath(path.replace("\\", "/"))
    handler = _TENSORBOARD.match(file.name)
    candidates = [file.name] if not (handler and int(handler["pid"]) >= _MIN_PID) else []
    for text in (*candidates, file.parent.name):
        for pattern in _RANK:
            if (match := pattern.search(text)) and (rank := int(match.group(1))) < MAX_RANKS:
                return rank
    return None


def host_of_name(path: str) -> str | None:
    """The host in a file name of ``tensorboard_trace_handler``, else None."""
    handler = _TENSORBOARD.match(PurePosixPath(path.replace("\\", "/")).name)
    return handler["host"] if handler and int(handler["pid"]) >= _MIN_PID else None


_BLOCK_BYTES = 4 << 20
"""Bytes per request to a store, about fsspec's default: the latency of a request is worth some megabytes."""
_MAX_FILES = 100_000
"""Most files below one URL, ten times the ranks of the largest job."""
_CONTENT_KEYS = ("ETag", "etag", "md5Hash", "content_md5", "blob_id")
"""Keys in fsspec's file info that identify an object's content: S3 and HTTP, GCS, Azure, Hugging Face."""


def redact_url(url: str) -> str:
    """``url`` with passwords and tokens masked, for notes and reports."""
    if not is_url(url):
        return url
    return _redact(url)


def _redact(text: str) -> str:
    # Imported here: compiling its patterns takes as long as reading a small trace.
    from ddpdoctor.rundir.privacy import mask_text

    return mask_text(text)


def is_url(path: str) -> bool:
    """Whether ``path`` is a URL and not a local path."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme.replace("+", "").replace("-", "").isalnum() and len(scheme) > 1


def open_url(url: str, *, read_ahead: bool) -> BinaryIO:
    """Opens the object at ``url`` for sequential reading; without ``ahead``, only what is read is fetched. Raises ``OSError`` or
    :class:`UnusableInput`."""
    filesystem, inside = _filesystem(url)
    try:
        cache_type = "readahead" if read_ahead else "none"
        return cast(BinaryIO, filesystem.open(inside, "rb", block_size=_BLOCK_BYTES, cache_type=cache_type))
    except (OSError, UnusableInput):
        raise
    except Exception as error:  # each file system has its own for "no such key", "no access", "no network"
        raise UnusableInput(f"{redact_url(url)} cannot be opened: {_first_line(error)}") from None


def content_tag(url: str) -> str | None:
    """The entity tag or checksum of the object at ``url``, which changes with its content.

    None if the store has neither, or only a weak one.
    """
    try:
        filesystem, inside = _filesystem(url)
        known = filesystem.info(inside)
    except Exception:  # reading the object raises the error
        return None
    for key in _CONTENT_KEYS:
        value = known.get(key)
        if isinstance(value, str) and value and not value.startswith("W/"):
            return f"{url} {known.get('size')} {key} {value}"
    return None


def expand_url(url: str) -> list[str]:
    """The files at ``url``: itself, the matches of a pattern, or all files below a folder."""
    filesystem, inside = _filesystem(url)
    try:
        if any(c in inside for c in "*?["):
            names = filesystem.glob(inside)
        elif filesystem.isfile(inside):
            return [url]
        else:
            names = filesystem.find(inside)
            if not names:
                filesystem.info(inside)  # raises where the store cannot be reached, or has nothing there
    except Exception as error:
        raise UnusableInput(
            f"{redact_url(url)} cannot be opened: {_first_line(error.__cause__ or error)}."
        ) from None
    if len(names) > _MAX_FILES:
        raise UnusableInput(f"{redact_url(url)} holds {len(names)} files: name a folder with fewer of them.")
    # A listed name becomes a URL of the same store, whatever it contains.
    return sorted(filesystem.unstrip_protocol(name) for name in names)


def _filesystem(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        filesystem, inside = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UnusableInput(f"{redact_url(url)} cannot be read: {_first_line(error)}") from None
    return filesystem, inside


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return _redact(text[0]) if text else type(error).__name__


_WRITER_TIMEOUT_S = 60.0
"""Longest wait for a program to write to a FIFO."""


def open_source(path: str, *, read_ahead: bool = True) -> BinaryIO:
    """Opens ``path``, a local path or a URL, for reading; of a URL without ``ahead``, only what is read is fetched. Raises
    OSError, or :class:`UnusableInput` for a URL."""
    return open_url(path, read_ahead=read_ahead) if is_url(path) else open_local(path)


def size_of(stream: BinaryIO) -> int:
    """Size in bytes of an open file or object, not decompressed; 0 if unknown."""
    size = getattr(stream, "size", None)
    if isinstance(size, int):
        return size
    try:
        return os.fstat(stream.fileno()).st_size
    except (OSError, AttributeError, ValueError):
        return 0


def open_local(path: str) -> BinaryIO:
    """Opens a local file, or a FIFO with a writer, for reading.

    Raises OSError, also for other kinds of files, which may block.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISFIFO(mode):
            _wait_for_writer(handle, path)
        elif not stat.S_ISREG(mode):
            reason = errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO
            raise OSError(reason, os.strerror(reason) if stat.S_ISDIR(mode) else "it is not a file", path)
        os.set_blocking(handle, True)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _wait_for_writer(handle: int, path: str) -> None:
    if not is_readable(handle, _WRITER_TIMEOUT_S):
        raise OSError(
            errno.ETIMEDOUT, f"no program wrote to this FIFO within {_WRITER_TIMEOUT_S:.0f} s", path
        )
