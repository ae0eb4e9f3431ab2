"""Bytes of a trace, decompressed piece by piece: plain, gzip or zstd, told by content and not by name."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from ddpdoctor.errors import UnusableInput
from ddpdoctor.rundir import reason_of

PIECE_BYTES = 2 << 20
"""Decompressed bytes handed on at a time."""
_READ_BYTES = 1 << 18

GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"
LFS_POINTER = b"version https://git-lfs"


class Source:
    """One trace as a stream of decompressed pieces; ``broken`` says afterwards why the stream ended early, if
    it did."""

    def __init__(self, path: str, opener: Callable[[str], BinaryIO]) -> None:
        self.path = path
        self.broken: str | None = None
        self._open = opener

    def pieces(self, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
        """Decompressed content in order, in pieces of about ``piece_bytes``.

        Raises :class:`UnusableInput` where the file cannot be opened, is empty, or is a Git LFS pointer.
        """
        try:
            stream = self._open(self.path)
        except OSError as error:
            raise UnusableInput(f"{self.path} cannot be opened: {_reason(error)}.") from None
        with stream:
            first = self._read(stream, _READ_BYTES)
            if not first:
                raise UnusableInput(f"{self.path} {self.broken or 'is empty'}.")
            if first.startswith(LFS_POINTER):
                raise UnusableInput(
                    f"{self.path} is a Git LFS pointer, not the trace itself: fetch it with `git lfs pull`."
                )
            if first.startswith(GZIP):
                yield from self._gzip(first, stream, piece_bytes)
            elif first.startswith(ZSTD):
                yield from self._zstd(first, stream, piece_bytes)
            else:
                yield first
                while piece := self._read(stream, piece_bytes):
                    yield piece

    def _read(self, stream: BinaryIO, size: int) -> bytes:
        try:
            return stream.read(size)
        except OSError as error:
            self.broken = f"could not be read to its end ({_reason(error)})"
            return b""

    def _gzip(self, first: bytes, stream: BinaryIO, piece_bytes: int) -> Iterator[bytes]:
        """Members of a gzip file, one after the other; what was decompressed before a fault is kept."""
        compressed = first
        while compressed:
            member = zlib.decompressobj(wbits=31)
            while not member.eof:
                if not compressed and not (compressed := self._read(stream, _READ_BYTES)):
                    self.broken = self.broken or "ends in the middle of its gzip data"
                    if rest := member.flush():
                        yield rest
                    return
                sound = member.copy()
                try:
                    piece = member.decompress(compressed, piece_bytes)
                except zlib.error as error:
                    self.broken = f"has damaged gzip data ({error})"
                    yield _up_to_the_fault(sound, compressed)
                    return
                compressed = member.unconsumed_tail
                if piece:
                    yield piece
            compressed = (member.unused_data or self._read(stream, _READ_BYTES)).lstrip(b"\0")
            if compressed and not compressed.startswith(GZIP):
                return  # padding or a signature after the last member: gzip(1) ignores it too

    def _zstd(self, first: bytes, stream: BinaryIO, piece_bytes: int) -> Iterator[bytes]:
        try:
            import zstandard  # type: ignore[import-not-found]
        except ImportError:
            raise UnusableInput(
                f"{self.path} is compressed with zstd: install the package `zstandard`, "
                "or decompress the file first."
            ) from None
        compressed, decompressor = first, zstandard.ZstdDecompressor().decompressobj()
        try:
            while compressed:
                if piece := decompressor.decompress(compressed):
                    yield piece
                if decompressor.eof and decompressor.unused_data:
                    compressed = decompressor.unused_data
                    decompressor = zstandard.ZstdDecompressor().decompressobj()
                    continue
                compressed = self._read(stream, _READ_BYTES)
                if compressed and decompressor.eof:
                    decompressor = zstandard.ZstdDecompressor().decompressobj()
            if not decompressor.eof:
                self.broken = self.broken or "ends in the middle of its zstd data"
        except zstandard.ZstdError as error:
            self.broken = f"has damaged zstd data ({error})"


def _up_to_the_fault(member: zlib._Decompress, compressed: bytes) -> bytes:
    """What can be decompressed before the fault: a call that fails keeps its output to itself, so go byte by
    byte."""
    pieces = []
    try:
        for i in range(len(compressed)):
            pieces.append(member.decompress(compressed[i : i + 1]))
    except zlib.error:
        pass
    return b"".join(pieces)


def open_binary(path: str) -> BinaryIO:
    """A local file, for reading."""
    return Path(path).open("rb")


def _reason(error: OSError) -> str:
    return reason_of(error).lower()
