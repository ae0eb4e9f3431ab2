"""Pieces of a spool's streams in memory-backed storage, and how much of that they may take."""

from __future__ import annotations

import errno
import mmap
import os

from .layout import WORKERS_FILE, opened_spool
from .owned import file_identity, identity_of, open_file, read_file

SEGMENT_BYTES = 64 * 1024
SHORT_SEGMENT_BYTES = 16 * 1024
"""The same where storage is short."""
LIMIT_BYTES = 64 * 1024 * 1024
"""Most that one rank lets wait for the run directory."""
MOST_SHARE = 1 / 32
"""The same, of the storage that it waits in."""
LEAST_FREE_SHARE = 1 / 8
"""Of that storage; the rest is for the job, except for a little through which records are copied."""
SHORT_LIMIT_BYTES = 8 * SHORT_SEGMENT_BYTES
"""Most that one rank lets wait where less is free: three streams, and what a second brings."""
KEPT_FREE_SHARE = 1 / 64
"""Share of that storage that is never used, because data loader workers crash without it."""
_POSITION_DIGITS = 18
"""More than any stream is long."""


class Segment:
    """A piece of a stream: a file of fixed size in memory, written without a system call. Unused bytes are NUL, which no
    line holds. All of them are given storage at once: a mapped page that finds none when it is first written kills the
    process.
    """

    __slots__ = ("_file", "_handle", "_named", "_saved", "memory", "name", "size", "start", "used")

    def __init__(self, name: str, folder: int, start: int, size: int) -> None:
        """Raises OSError where storage is short."""
        self.name, self.start, self.size, self.used = name, start, size, 0
        """Position of its first byte in the stream; bytes it can hold, and holds."""
        handle = open_file(name, folder, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            missing = size
            while missing:
                missing -= os.write(handle, bytes(missing))
            self._file = self._named = file_identity(handle)
            self._saved: int | None = None
            next_free = os.dup(handle)
            os.close(next_free)
            self.memory = mmap.mmap(handle, size)
        except OSError:
            os.unlink(name, dir_fd=folder)
            raise
        finally:
            os.close(handle)
        self._handle = self._kept_open(next_free)

    def _kept_open(self, likely: int) -> int:
        """The descriptor that the mapping holds for its own use, a copy that Python does not expose; -1 if it is not
        found. ``likely`` is looked at first: a job may have thousands open."""
        if file_identity(likely) == self._file:
            return likely
        listing = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
        return next((int(name) for name in os.listdir(listing) if file_identity(int(name)) == self._file), -1)

    def is_in(self, folder: int) -> bool:
        """Whether a file there still has its content, as far as the file's metadata shows."""
        return identity_of(self.name, folder) == self._named

    def in_file(self, folder: int) -> int:
        """How many bytes of it a file there has."""
        if not self.is_in(folder):
            return 0
        return self.used if self._saved is None else self._saved

    def save(self, folder: int) -> None:
        """Its file was removed, not its memory: write what that holds so far to a file of the same name, and have the next line find
        no room. For another thread than the one that writes. Raises OSError."""
        lines = whole_lines(self.memory[: self.used])
        self._saved, self.size = len(lines), 0
        with open(open_file(self.name, folder, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as out:
            out.write(lines)
            self._named = file_identity(out.fileno())

    def close(self) -> None:
        """Give the mapping back, unless the job has closed all files it did not know: the number of its descriptor may
        be that of a file of the job now, which would be closed with it.
        """
        if file_identity(self._handle) == self._file:
            self.memory.close()
        else:
            import ctypes

            # Nor may it be released at the end of the process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.memory))


def room_for_segment(folder: int) -> int:
    """Bytes that a new segment may take. Containers often have 64 MB of memory-backed storage, and data loader workers die where
    there is none left for their batches. Raises OSError where there is no room."""
    storage = os.statvfs(folder)
    size, limit = SEGMENT_BYTES, int(storage.f_frsize * storage.f_blocks * MOST_SHARE) or LIMIT_BYTES
    if storage.f_bavail < storage.f_blocks * LEAST_FREE_SHARE:
        size, limit = SHORT_SEGMENT_BYTES, min(limit, SHORT_LIMIT_BYTES)
        left = (storage.f_bavail - storage.f_blocks * KEPT_FREE_SHARE) * storage.f_frsize
        if left < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with os.scandir(folder) as entries:
        waiting = sum(each.stat().st_size for each in entries if _is_segment(each.name))
    if waiting > min(LIMIT_BYTES, limit):
        if size < SEGMENT_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise OSError("the run directory cannot keep up, or is full")
    return size


def _is_segment(name: str) -> bool:
    """Whether a file of a spool is a piece of what the rank itself writes: its workers' file has a limit of its own."""
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
    """What a rank has written to a segment: up to the first NUL, which no line holds. Later bytes may already be
    there while a line is being written."""
    return segment.partition(b"\0")[0]


def whole_lines(segment: bytes) -> bytes:
    """The same, up to its last line's end: of a line that is being written, or was when its rank was killed, nothing."""
    written = written_part(segment)
    return written[: written.rfind(b"\n") + 1]


def uncopied_bytes(spool: str, stream: str, done: int) -> bytes:
    """The bytes of a stream in a spool beyond its first ``done`` bytes; empty if a part in between is gone, because
    it was copied a moment ago, or if the spool is not this user's own."""
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
