"""Opening what lies at a path, whatever it is: only regular files, pipes and URLs can be read, and only they are opened."""

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
"""Part of a file's time after which all of it is decoded: then its columns are joined and sorted."""
_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def progress_to(listener: Listener) -> Iterator[None]:
    """Within it, ``listener`` is told which part of its file a reader in this thread has read, 0 to 1."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def report_progress(part: float) -> None:
    """Say that so much of the file was decoded, 0 to 1."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(_DECODE_SHARE * min(max(part, 0.0), 1.0))


_TENSORBOARD = re.compile(r"^(?P<host>.+)_(?P<pid>\d+)\.(?P<stamp>\d{10,})\.pt\.trace\.json")
"""``tensorboard_trace_handler`` without a worker name: host_pid.ns.pt.trace.json, no rank."""
_RANK = (
    re.compile(
        r"(?<![a-z])(?:global[-_ ]?)?(?<!local)(?<!local[-_ ])rank[-_ =]?0*(\d+)(?!\d)", re.IGNORECASE
    ),
    re.compile(r"(?<![a-z])(?:worker|trainer)[-_ ]?0*(\d+)(?!\d)", re.IGNORECASE),
    re.compile(r"(?:^|[-_.])r0*(\d+)(?=[-_.]|$)", re.IGNORECASE),
)
_MIN_PID = 100
"""Below this, the number before the time stamp is rather a step ("worker0_step_12.1694128201545") than a process id."""


MOST_RANKS = 10_000_000
"""No job has so many: a number beyond is no rank, and no number of ranks."""


def rank_of_name(path: str) -> int | None:
    """The rank that a file name (rank-34, rank0, worker3, _r5_) or its folder names; None where neither does."""
    file = PurePosixPath(path.replace("\\", "/"))
    handler = _TENSORBOARD.match(file.name)
    candidates = [file.name] if not (handler and int(handler["pid"]) >= _MIN_PID) else []
    for text in (*candidates, file.parent.name):
        for pattern in _RANK:
            if (match := pattern.search(text)) and (rank := int(match.group(1))) < MOST_RANKS:
                return rank
    return None


def host_of_name(path: str) -> str | None:
    """The host in a name made by ``tensorboard_trace_handler``, else None."""
    handler = _TENSORBOARD.match(PurePosixPath(path.replace("\\", "/")).name)
    return handler["host"] if handler and int(handler["pid"]) >= _MIN_PID else None


_BLOCK_BYTES = 4 << 20
"""Read ahead at a time, about fsspec's own default: a request to a store takes as long as some megabytes of its answer."""
_MAX_FILES = 100_000
"""Files below one folder: a trace for each rank of the largest job, and ten times more."""
_CONTENT_KEYS = ("ETag", "etag", "md5Hash", "content_md5", "blob_id")
"""Names under which fsspec's file systems pass on what identifies an object's content: S3 and HTTP, GCS, Azure,
Hugging Face."""


def redact_url(url: str) -> str:
    """``url`` without the passwords and tokens that it may hold, for notes and reports."""
    if not is_url(url):
        return url
    return _redact(url)


def _redact(text: str) -> str:
    # Its patterns take as long to compile as a small trace to read.
    from ddpdoctor.rundir.privacy import mask_text

    return mask_text(text)


def is_url(path: str) -> bool:
    """Whether ``path`` is a URL and not a local path."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme.replace("+", "").replace("-", "").isalnum() and len(scheme) > 1


def open_url(url: str, *, ahead: bool) -> BinaryIO:
    """The object at ``url``, for reading from front to back; unless ``ahead``, no more is fetched than is read. Raises ``OSError``
    or :class:`UnusableInput`."""
    filesystem, inside = _filesystem(url)
    try:
        cache_type = "readahead" if ahead else "none"
        return cast(BinaryIO, filesystem.open(inside, "rb", block_size=_BLOCK_BYTES, cache_type=cache_type))
    except (OSError, UnusableInput):
        raise
    except Exception as error:  # each file system has its own for "no such key", "no access", "no network"
        raise UnusableInput(f"{redact_url(url)} cannot be opened: {_first_line(error)}") from None


def content_tag(url: str) -> str | None:
    """What changes whenever the object at ``url`` does, as its store says: an entity tag or a checksum.

    None where it says nothing that strong, such as a time alone.
    """
    try:
        filesystem, inside = _filesystem(url)
        known = filesystem.info(inside)
    except Exception:  # reading the object will say what is wrong
        return None
    for key in _CONTENT_KEYS:
        value = known.get(key)
        if isinstance(value, str) and value and not value.startswith("W/"):
            return f"{url} {known.get('size')} {key} {value}"
    return None


def expand_url(url: str) -> list[str]:
    """The files that ``url`` stands for: itself, the matches of a pattern, or all files below a folder."""
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
    # Whatever names a store lists: each becomes a URL of the same store.
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
"""How long a FIFO is waited for until some program writes to it."""


def open_source(path: str, *, ahead: bool = True) -> BinaryIO:
    """What lies at ``path``, a local path or a URL, for reading; of a URL, unless ``ahead``, no more is fetched than is read.
    Raises OSError, or :class:`UnusableInput` for a URL."""
    return open_url(path, ahead=ahead) if is_url(path) else open_local(path)


def size_of(stream: BinaryIO) -> int:
    """Bytes of what is open, as it lies there; 0 where nobody knows."""
    size = getattr(stream, "size", None)
    if isinstance(size, int):
        return size
    try:
        return os.fstat(stream.fileno()).st_size
    except (OSError, AttributeError, ValueError):
        return 0


def open_local(path: str) -> BinaryIO:
    """A local file, or a FIFO that somebody writes to, for reading.

    Raises OSError, also for all that is neither: opening such things may hang.
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
