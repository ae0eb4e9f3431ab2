"""Opens and decompresses traces from paths and URLs. Also derives rank and host from file names.

Only regular files, FIFOs with a writer, and objects at URLs are opened. A separate thread decompresses them in pieces (plain, gzip or zstd,
recognised by content). The size of a piece and the compression ratio are bounded, because a few kilobytes can decompress to terabytes. A
read error ends the stream and is kept as text for a note.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import PurePosixPath
from queue import Empty, Full, Queue
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

from ddpdoctor.errors import UnusableInput
from ddpdoctor.process import is_readable
from ddpdoctor.rundir import reason_of

Listener = Callable[[float], None]

_DECODE_SHARE = 0.95
"""Share of decoding in the time of reading a file. The rest is joining and sorting its columns."""
_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def progress_to(listener: Listener) -> Iterator[None]:
    """Context in which :func:`report_progress` calls ``listener`` with the share of the file that has been read, 0 to 1."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def report_progress(part: float) -> None:
    """Reports the share of the file that has been decoded, 0 to 1, to the listener of :func:`progress_to`."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(_DECODE_SHARE * min(max(part, 0.0), 1.0))


_TENSORBOARD = re.compile(r"^(?P<host>.+)_(?P<pid>\d+)\.(?P<stamp>\d{10,})\.pt\.trace\.json")
"""File name of ``tensorboard_trace_handler`` without a worker name: host_pid.ns.pt.trace.json. It has no rank."""
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
"""Upper limit of ranks and world sizes; a larger number is invalid."""


def rank_of_name(path: str) -> int | None:
    """Rank in a file name (rank-34, rank0, worker3, _r5_), else in the folder's name; None if neither has one."""
    file = PurePosixPath(path.replace("\\", "/"))
    handler = _TENSORBOARD.match(file.name)
    candidates = [file.name] if not (handler and int(handler["pid"]) >= _MIN_PID) else []
    for text in (*candidates, file.parent.name):
        for pattern in _RANK:
            if (match := pattern.search(text)) and (rank := int(match.group(1))) < MAX_RANKS:
                return rank
    return None


def host_of_name(path: str) -> str | None:
    """Host in a file name of ``tensorboard_trace_handler``, else None."""
    handler = _TENSORBOARD.match(PurePosixPath(path.replace("\\", "/")).name)
    return handler["host"] if handler and int(handler["pid"]) >= _MIN_PID else None


_BLOCK_BYTES = 4 << 20
"""Bytes per request to a store, about fsspec's default. Some megabytes take as long as the latency of a request."""
_MAX_FILES = 100_000
"""Most files below a URL, ten times the ranks of the largest job."""
_CONTENT_KEYS = ("ETag", "etag", "md5Hash", "content_md5", "blob_id")
"""Keys in fsspec's file info that identify an object's content: S3 and HTTP, GCS, Azure, Hugging Face."""


def redact_url(url: str) -> str:
    """``url`` with passwords and tokens masked, for notes and reports."""
    return _redact(url) if is_url(url) else url


def _redact(text: str) -> str:
    # Imported here: compiling its patterns takes as long as reading a small trace.
    from ddpdoctor.rundir.privacy import mask_text

    return mask_text(text)


def is_url(path: str) -> bool:
    """Whether ``path`` is a URL instead of a local path."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme.replace("+", "").replace("-", "").isalnum() and len(scheme) > 1


def content_tag(url: str) -> str | None:
    """Text with the entity tag or checksum of the object at ``url``, which changes with its content.

    None if the store has neither, or only a weak entity tag.
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
    """The files at ``url``: the URL itself, the matches of a pattern, or all files below a folder."""
    filesystem, inside = _filesystem(url)
    try:
        if any(c in inside for c in "*?["):
            names = filesystem.glob(inside)
        elif filesystem.isfile(inside):
            return [url]
        else:
            names = filesystem.find(inside)
            if not names:
                filesystem.info(inside)  # raises if the store cannot be reached or has no such object
    except Exception as error:
        raise UnusableInput(
            f"{redact_url(url)} cannot be opened: {first_line(error.__cause__ or error)}."
        ) from None
    if len(names) > _MAX_FILES:
        raise UnusableInput(f"{redact_url(url)} holds {len(names)} files: name a folder with fewer of them.")
    # Listed names may contain any characters, so they are converted to URLs of the same store.
    return sorted(filesystem.unstrip_protocol(name) for name in names)


def _filesystem(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(url)
        return found
    except (ImportError, ValueError) as error:
        raise UnusableInput(f"{redact_url(url)} cannot be read: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    """The first line of an error's text, with secrets masked; the error's type if it has no text."""
    text = str(error).strip().splitlines()
    return _redact(text[0]) if text else type(error).__name__


_WRITER_TIMEOUT_S = 60.0
"""Longest wait for a program that writes to a FIFO."""


def open_source(path: str, *, read_ahead: bool = True) -> BinaryIO:
    """Opens ``path``, a local path or a URL, for sequential reading. Without ``read_ahead``, no more bytes than are read are fetched from
    a URL. Raises OSError, or :class:`UnusableInput` for a URL."""
    if not is_url(path):
        return open_local(path)
    filesystem, inside = _filesystem(path)
    try:
        cache_type = "readahead" if read_ahead else "none"
        return cast(BinaryIO, filesystem.open(inside, "rb", block_size=_BLOCK_BYTES, cache_type=cache_type))
    except (OSError, UnusableInput):
        raise
    except Exception as error:  # "no such key", "no access", "no network": differs by file system
        raise UnusableInput(f"{redact_url(path)} cannot be opened: {first_line(error)}") from None


def size_of(stream: BinaryIO) -> int:
    """Size of an open file or object in bytes, not decompressed; 0 if unknown."""
    size = getattr(stream, "size", None)
    if isinstance(size, int):
        return size
    try:
        return os.fstat(stream.fileno()).st_size
    except (OSError, AttributeError, ValueError):
        return 0


def open_local(path: str) -> BinaryIO:
    """Opens a local file, or a FIFO with a writer, for reading.

    Raises OSError, also for other kinds of files, because reading them may block.
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


T = TypeVar("T")

_QUEUE_PIECES = 2
"""Most pieces in the queue: enough to decouple producer and consumer, few enough to bound memory."""
_POLL_S = 0.1
"""Interval at which a blocked side checks whether the other side has ended."""
_JOIN_TIMEOUT_S = 1.0
"""Longest wait until the thread stops, longer than the decompression of a piece."""


class _End(NamedTuple):
    """End of the iterator, with the error that ended it or None."""

    error: BaseException | None


def _produce(items: Iterator[T], queue: Queue[T | _End], stop: threading.Event) -> None:
    def put(item: T | _End) -> None:
        while not stop.is_set():
            try:
                queue.put(item, timeout=_POLL_S)
                return
            except Full:
                continue

    error: BaseException | None = None
    try:
        for item in items:
            put(item)
            if stop.is_set():
                return
    except BaseException as raised:  # any error is raised again in the consumer
        error = raised
    put(_End(error))


def prefetch(items: Iterator[T]) -> Generator[T, None, None]:
    """Yields ``items``, which a separate thread produces in advance.

    Raises the errors of ``items``. Closing the generator stops the thread.
    """
    queue: Queue[T | _End] = Queue(_QUEUE_PIECES)
    stop = threading.Event()
    thread = threading.Thread(
        target=_produce, args=(items, queue, stop), name="ddpdoctor-decompress", daemon=True
    )
    thread.start()
    try:
        while True:
            try:
                item = queue.get(timeout=_POLL_S)
            except Empty:
                continue
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        stop.set()
        thread.join(timeout=_JOIN_TIMEOUT_S)  # it may be blocked in a read from a pipe or a network


PIECE_BYTES = 2 << 20
"""Decompressed bytes per piece."""
_READ_BYTES = 1 << 18
"""Compressed bytes per read of the file."""
_FED_BYTES = 1 << 8
"""Compressed bytes per call at the start of a gzip member, and always for zstd. The rest of the input is copied when a member ends, and a
zstd block can expand 4 bytes to 128 KiB."""
_MAX_RATIO = 200
"""Highest accepted compression ratio; profilers' JSON has 10 to 30."""
_UNLIMITED_BYTES = 64 << 20
"""Decompressed size up to which any ratio is accepted."""

GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"
LFS_POINTER = b"version https://git-lfs"
_MAX_PADDING_READS = 16
"""Most reads of zero padding between two gzip members; tapes and block devices pad their last block."""
_ZEROS = re.compile(rb"\0++")


class Source:
    """One trace as a stream of decompressed pieces.

    ``read_error``: why the stream ended early, else None.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.read_error: str | None = None
        self._consumed_bytes = 0
        self._size_bytes = 0

    @property
    def fraction_read(self) -> float:
        """Share of the file that has been read, 0 to 1; 0 if its size is unknown."""
        return self._consumed_bytes / self._size_bytes if self._size_bytes else 0.0

    def pieces(self, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
        """Yields the decompressed content in order, in pieces of about ``piece_bytes``.

        Raises :class:`UnusableInput` if the file cannot be opened, is empty, or is a Git LFS pointer.
        """
        try:
            stream = open_source(self.path)
        except OSError as error:
            raise UnusableInput(f"{self.path} cannot be opened: {reason_of(error).lower()}.") from None
        with stream:
            self._size_bytes = size_of(stream)
            first = self._read(stream, _READ_BYTES)
            if not first:
                raise UnusableInput(f"{self.path} {self.read_error or 'is empty'}.")
            if first.startswith(LFS_POINTER):
                raise UnusableInput(
                    f"{self.path} is a Git LFS pointer, not the trace itself: fetch it with `git lfs pull`."
                )
            if first.startswith(GZIP):
                yield from self._limit_growth(_rejoin(self._gunzip(first, stream, piece_bytes), piece_bytes))
            elif first.startswith(ZSTD):
                yield from self._limit_growth(_rejoin(self._zstd(first, stream), piece_bytes))
            else:
                yield first
                while piece := self._read(stream, piece_bytes):
                    yield piece

    def _read(self, stream: BinaryIO, size: int) -> bytes:
        try:
            data = stream.read(size)
        except OSError as error:
            self.read_error = f"could not be read to its end ({reason_of(error).lower()})"
            return b""
        self._consumed_bytes += len(data)
        return data

    def _limit_growth(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Yields ``pieces`` until the ratio of their total to the bytes read from the file exceeds ``_MAX_RATIO``."""
        output_bytes = 0
        for piece in pieces:
            output_bytes += len(piece)
            if output_bytes > max(_UNLIMITED_BYTES, _MAX_RATIO * self._consumed_bytes):
                self.read_error = (
                    f"is compressed more than {_MAX_RATIO}-fold, as no trace is, "
                    f"and was read to the first {(output_bytes - len(piece)) >> 20} MiB"
                )
                return
            yield piece

    def _gunzip(self, first: bytes, stream: BinaryIO, piece_bytes: int) -> Iterator[bytes]:
        """Yields the content of a gzip file. Uses ISA-L if it is installed and the file can be read twice. After an error it restarts with
        zlib, which finds the exact position of the error."""
        inflate = _isal_decompressor() if self._size_bytes and not is_url(self.path) else None
        if inflate is None:
            yield from self._gzip(first, stream, piece_bytes)
            return
        output_bytes = 0
        try:
            for piece in self._gzip(first, stream, piece_bytes, inflate):
                output_bytes += len(piece)
                yield piece
            return
        except _GzipError:
            self.read_error, self._consumed_bytes = None, 0
        stream.seek(0)
        for piece in self._gzip(self._read(stream, _READ_BYTES), stream, piece_bytes):
            if len(piece) > output_bytes:
                yield piece[output_bytes:]
            output_bytes = max(0, output_bytes - len(piece))

    def _gzip(
        self, first: bytes, stream: BinaryIO, piece_bytes: int, inflate: Callable[..., Any] | None = None
    ) -> Iterator[bytes]:
        """Yields the content of all members of a gzip file, up to an error. With ``inflate`` (another library's decompressor), an error
        raises _GzipError."""
        compressed = memoryview(first)
        while compressed:
            member, fed_bytes = (inflate or zlib.decompressobj)(wbits=31), _FED_BYTES
            while not member.eof:
                if not compressed and not (compressed := memoryview(self._read(stream, _READ_BYTES))):
                    if inflate is not None:
                        raise _GzipError
                    self.read_error = self.read_error or "ends in the middle of its gzip data"
                    if rest := member.flush():
                        yield rest
                    return
                before, fed = member.copy() if inflate is None else None, compressed[:fed_bytes]
                try:
                    piece = member.decompress(fed, piece_bytes)
                except Exception as error:  # zlib.error, or another library's own error
                    if before is None:
                        raise _GzipError from error
                    self.read_error = f"has damaged gzip data ({error})"
                    yield _salvage_before_error(before, bytes(fed))
                    return
                left = len(member.unused_data) if member.eof else len(member.unconsumed_tail)
                compressed, fed_bytes = compressed[len(fed) - left :], min(2 * fed_bytes, _READ_BYTES)
                if piece:
                    yield piece
            compressed = self._without_padding(compressed, stream)
            if compressed and not bytes(compressed[:2]).startswith(GZIP[: len(compressed)]):
                return  # trailing data after the last member, which gzip(1) also ignores

    def _without_padding(self, compressed: memoryview, stream: BinaryIO) -> memoryview:
        for _ in range(_MAX_PADDING_READS):
            compressed = compressed or memoryview(self._read(stream, _READ_BYTES))
            if (padding := _ZEROS.match(compressed)) is None:
                break
            compressed = compressed[padding.end() :]
        return compressed

    def _zstd(self, first: bytes, stream: BinaryIO) -> Iterator[bytes]:
        try:
            import zstandard  # type: ignore[import-not-found]
        except ImportError:
            raise UnusableInput(
                f"{self.path} is compressed with zstd: install the package `zstandard`, "
                "or decompress the file first."
            ) from None
        compressed, decompressor = memoryview(first), zstandard.ZstdDecompressor().decompressobj()
        try:
            while compressed:
                if decompressor.eof:
                    decompressor = zstandard.ZstdDecompressor().decompressobj()
                fed = compressed[:_FED_BYTES]
                if piece := decompressor.decompress(fed):
                    yield piece
                compressed = compressed[len(fed) - len(decompressor.unused_data) :]
                compressed = compressed or memoryview(self._read(stream, _READ_BYTES))
            if not decompressor.eof:
                self.read_error = self.read_error or "ends in the middle of its zstd data"
        except zstandard.ZstdError as error:
            self.read_error = f"has damaged zstd data ({error})"


class _GzipError(Exception):
    """A gzip file is damaged or truncated."""


@cache
def _isal_decompressor() -> Callable[..., Any] | None:
    """ISA-L's ``decompressobj``, three times as fast as zlib's but without ``copy``; None if it is not installed."""
    try:
        from isal import isal_zlib  # type: ignore[import-not-found]
    except ImportError:
        return None
    found: Callable[..., Any] = isal_zlib.decompressobj
    return found


def _rejoin(pieces: Iterator[bytes], piece_bytes: int) -> Iterator[bytes]:
    """Yields ``pieces`` joined to at least ``piece_bytes``, because each piece is decoded together with the rest of the previous one."""
    waiting: list[bytes] = []
    waiting_bytes = 0
    for piece in pieces:
        waiting.append(piece)
        waiting_bytes += len(piece)
        if waiting_bytes >= piece_bytes:
            yield b"".join(waiting) if len(waiting) > 1 else piece
            waiting, waiting_bytes = [], 0
    if waiting:
        yield b"".join(waiting)


def _salvage_before_error(member: zlib._Decompress, compressed: bytes) -> bytes:
    """Output of ``member`` up to an error. Decompresses byte by byte, because a call that fails returns no output."""
    pieces = []
    try:
        for i in range(len(compressed)):
            pieces.append(member.decompress(compressed[i : i + 1]))
    except zlib.error:
        pass
    return b"".join(pieces)
