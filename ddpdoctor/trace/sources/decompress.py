"""Decompresses a trace in pieces: plain, gzip or zstd, recognised by content.

The size of a piece and the compression ratio are bounded, because a few kilobytes can decompress to terabytes.
"""

from __future__ import annotations

import re
import threading
import zlib
from collections.abc import Callable, Generator, Iterator
from functools import cache
from queue import Empty, Full, Queue
from typing import Any, BinaryIO, TypeVar

from ddpdoctor.errors import UnusableInput
from ddpdoctor.rundir import reason_of

from .files import is_url, open_source, size_of

T = TypeVar("T")

_QUEUE_PIECES = 2
"""Most pieces in the queue: enough to decouple producer and consumer, few enough to bound memory."""
_POLL_S = 0.1
"""Interval at which a blocked side checks whether the other has ended."""
_JOIN_TIMEOUT_S = 1.0
"""Longest wait for the thread to stop; longer than the decompression of a piece."""


class _End:
    """Marks the end of the iterator, with the error that ended it or None."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


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
    except BaseException as raised:  # handed over to the consumer, whatever it is
        error = raised
    put(_End(error))


def prefetch(items: Iterator[T]) -> Generator[T, None, None]:
    """Yields ``items``, which a separate thread produces in advance.

    Raises the errors of ``items``; closing the generator stops the thread.
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
        thread.join(timeout=_JOIN_TIMEOUT_S)  # it may hang in a read from a pipe or a network


PIECE_BYTES = 2 << 20
"""Decompressed bytes per piece."""
_READ_BYTES = 1 << 18
"""Compressed bytes per read of the file."""
_FED_BYTES = 1 << 8
"""Compressed bytes per call for a new gzip member, and always for zstd: the rest of the input is copied when a member ends,
and a block of zstd expands 4 bytes to up to 128 KiB."""
_MAX_RATIO = 200
"""Highest compression ratio of a trace; profilers' JSON has 10 to 30."""
_UNLIMITED_BYTES = 64 << 20
"""Up to this decompressed size, any ratio is accepted."""

GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"
LFS_POINTER = b"version https://git-lfs"
_MAX_PADDING_READS = 16
"""Most reads of zero padding between two gzip members; tapes and block devices pad their last block."""
_ZEROS = re.compile(rb"\0++")


class Source:
    """One trace as a stream of decompressed pieces.

    ``read_error`` is the reason if the stream ended early, else None.
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
        """Yields ``pieces`` until their total exceeds the highest ratio to the bytes read from the file."""
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
        """Yields the content of a gzip file. Uses ISA-L if it is installed and the file can be read twice; on an error restarts
        with zlib, which gives the exact position of the error."""
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
        """Yields the content of all members of a gzip file, up to an error. With an ``inflate`` other than zlib's, raises
        _GzipError on an error."""
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
                return  # trailing data after the last member, which gzip(1) ignores too

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
    """Yields ``pieces`` joined to at least ``piece_bytes``, because each piece is decoded together with the rest of the last."""
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
    """Decompresses byte by byte up to an error, because a call that fails returns no output."""
    pieces = []
    try:
        for i in range(len(compressed)):
            pieces.append(member.decompress(compressed[i : i + 1]))
    except zlib.error:
        pass
    return b"".join(pieces)
