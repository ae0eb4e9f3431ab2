"""Segments of a spool's streams in memory-backed storage, and limits of their size."""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress

from .layout import WORKERS_FILE, opened_spool
from .owned import file_identity, identity_of, open_file, read_file, replace_file

SEGMENT_BYTES = 64 * 1024
SHORT_SEGMENT_BYTES = 16 * 1024
"""Size of a segment if storage is short."""
LIMIT_BYTES = 64 * 1024 * 1024
"""Upper limit of the uncopied data of one rank."""
MOST_SHARE = 1 / 32
"""The same limit, as a share of the storage."""
LEAST_FREE_SHARE = 1 / 8
"""Share of the storage that is left to the job. Below it, only a small limit applies, so that records are still copied."""
SHORT_LIMIT_BYTES = 8 * SHORT_SEGMENT_BYTES
"""Limit of one rank if less is free: enough for three streams and the data of a second."""
KEPT_FREE_SHARE = 1 / 64
"""Share of the storage that is never used, because data loader workers crash without it."""
UNNAMED_BYTES = 1024 * 1024
"""Size of a segment of a removed spool: more than a rank writes until its writer thread restores the spool."""
_POSITION_DIGITS = 18
"""Upper limit of the digits of a position; no stream is that long."""


class Segment:
    """A segment of a stream: a file of fixed size in memory, written without a system call. Unused bytes are NUL, which no line
    contains. All are allocated at once: if a mapped page finds no storage when it is first written, the process is killed.

    While the spool is removed, a segment is memory of the process, without a file."""

    __slots__ = ("_file", "_handle", "_named", "_saved", "memory", "name", "size", "start", "used")

    def __init__(self, name: str, folder: int | None, start: int, size: int) -> None:
        """``folder``: descriptor of the spool; None if it was removed. Raises OSError if storage is short."""
        self.name, self.start, self.size, self.used = name, start, size, 0
        """``start``: position of its first byte in the stream; ``size``: its capacity in bytes; ``used``: bytes in use."""
        self._saved: int | None = None
        if folder is None:
            self._file: tuple[int, int] | None = None
            self._named: tuple[int, int] | None = None
            self._handle = -1
            self.memory = mmap.mmap(-1, size)
        else:
            self._create_file(name, folder, size)

    def _create_file(self, name: str, folder: int, size: int) -> None:
        handle = open_file(name, folder, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            missing = size
            while missing:
                missing -= os.write(handle, bytes(missing))
            self._file = self._named = file_identity(handle)
            next_free = os.dup(handle)
            os.close(next_free)
            self.memory = mmap.mmap(handle, size)
        except OSError:
            os.unlink(name, dir_fd=folder)
            raise
        finally:
            os.close(handle)
        self._handle = self._mapping_descriptor(next_free)

    def _mapping_descriptor(self, likely: int) -> int:
        """The descriptor that the mapping holds internally, a copy that Python does not expose; -1 if it is not found. ``likely``
        is checked first, because a job may have thousands open."""
        if file_identity(likely) == self._file:
            return likely
        listing = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
        return next((int(name) for name in os.listdir(listing) if file_identity(int(name)) == self._file), -1)

    @property
    def is_unnamed(self) -> bool:
        """Whether no file has its content, because the spool was removed."""
        return self._named is None

    def is_in(self, folder: int) -> bool:
        """Whether a file in ``folder`` still has its content, according to the file's metadata."""
        return self._named is not None and identity_of(self.name, folder) == self._named

    def bytes_in_file(self, folder: int) -> int:
        """Number of its bytes that a file in ``folder`` has."""
        if not self.is_in(folder):
            return 0
        return self.used if self._saved is None else self._saved

    def save(self, folder: int) -> None:
        """Write its content to a new file of the same name, because its file was removed; the next line will then find no room.
        Called on another thread than the one that writes. Raises OSError."""
        lines = whole_lines(self.memory[: self.used])
        self._saved, self.size = len(lines), 0
        handle = open_file(self.name, folder, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            with open(handle, "wb") as out:
                out.write(lines)
                named = file_identity(handle)
        except OSError:
            os.unlink(self.name, dir_fd=folder)
            raise
        self._named = named

    def save_detached(self, folder: int) -> None:
        """Write what of its content is not in ``folder``. For a segment to which nothing is written any more. Raises OSError."""
        if self.bytes_in_file(folder) < self.used:
            replace_file(self.name, folder, bytes(self.memory[: self.used]))

    def close(self) -> None:
        """Release the mapping. If the job has closed all files that it did not open, its descriptor may be one of the job's now:
        then the mapping is kept."""
        if file_identity(self._handle) == self._file:
            self.memory.close()
        else:
            import ctypes

            # It must not be released at the end of the process either.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.memory))


def room_for_segment(folder: int) -> int:
    """Size of a new segment in bytes. Raises OSError if there is no room. Containers often have 64 MB of memory-backed storage, and
    data loader workers die if none is left for their batches."""
    storage = os.statvfs(folder)
    size, limit = SEGMENT_BYTES, int(storage.f_frsize * storage.f_blocks * MOST_SHARE) or LIMIT_BYTES
    if storage.f_bavail < storage.f_blocks * LEAST_FREE_SHARE:
        size, limit = SHORT_SEGMENT_BYTES, min(limit, SHORT_LIMIT_BYTES)
        left = (storage.f_bavail - storage.f_blocks * KEPT_FREE_SHARE) * storage.f_frsize
        if left < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with os.scandir(folder) as entries:
        waiting = 0
        for each in entries:
            if _is_segment(each.name):
                with suppress(FileNotFoundError):  # just copied
                    waiting += each.stat().st_size
    if waiting > min(LIMIT_BYTES, limit):
        if size < SEGMENT_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise OSError("the run directory cannot keep up, or is full")
    return size


def _is_segment(name: str) -> bool:
    """Whether a file of a spool is a segment written by the rank itself; the workers' file has its own limit."""
    stream, _, position = name.rpartition(".")
    return position.isdecimal() and stream != WORKERS_FILE


def segments_in(spool: int) -> dict[str, list[tuple[int, str]]]:
    """By stream: (first byte's position, name) of the segments of a spool, in order. Raises OSError."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name in os.listdir(spool):
        stream, _, position = name.rpartition(".")
        if stream and position.isdecimal() and len(position) <= _POSITION_DIGITS:
            found.setdefault(stream, []).append((int(position), name))
    for parts in found.values():
        parts.sort()
    return found


def written_part(segment: bytes) -> bytes:
    """The written part of a segment: up to the first NUL, which no line contains. Bytes after it may be part of a line being
    written."""
    return segment.partition(b"\0")[0]


def whole_lines(segment: bytes) -> bytes:
    """The complete lines of a segment, without a line that is being written or was when the rank was killed."""
    written = written_part(segment)
    return written[: written.rfind(b"\n") + 1]


def uncopied_bytes(spool: str, stream: str, done: int) -> bytes:
    """The bytes of a stream in a spool after its first ``done`` bytes. Empty if a part in between is missing because it was just
    copied, or if the spool is not this user's."""
    try:
        with opened_spool(spool) as spool_fd:
            rest = b""
            for position, name in segments_in(spool_fd).get(stream, []):
                if position > done:
                    break
                piece = written_part(read_file(name, spool_fd, done - position))
                rest += piece
                done += len(piece)
    except OSError:
        return b""
    return rest
