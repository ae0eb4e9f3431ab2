"""A rank's records on their way to the run directory.

The training thread must never wait for storage, and what it recorded must survive ``kill -9``. So it writes
to short segment files in memory-backed local storage (``/dev/shm``), which outlive the process, and another
thread, or the launcher once the rank is dead, copies them to the run directory, which may lie on a slow or
shared file system. A JSON file that found no room there waits here too.

A segment is called ``<stream>.<first byte's position in the stream>``, and written as mapped memory: a system
call in each step would be the dearest part of recording it. What was copied already is the target's own size,
so that a copy that was cut off goes on where it stopped and can be repeated by anybody.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import shutil
import tempfile
from typing import Any

from .files import write_json
from .run_id import OtherRunError, id_of_root, refuse_other_run, run_id
from .waiting import Waiting, segments_in, unsaved_sentence, waiting_in

SEGMENT_BYTES = 64 * 1024
LIMIT_BYTES = 64 * 1024 * 1024
"""Most that one rank lets wait for the run directory."""
MOST_SHARE = 1 / 32
"""The same, of the storage that it waits in."""
LEAST_FREE_SHARE = 1 / 8
"""Of that storage; what is left is for the job."""
_TARGET = "target"
_LOCK = "lock"


def spool_root(run: str) -> str:
    """Where the ranks' spools of a run lie on this host: the same for all launchers of that run, and another one for
    each run, be it of the same path.

    Containers may share ``/dev/shm`` but not their processes, so the pid namespace is part of the name.
    """
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    # A directory that no launcher has made has its path only.
    name = run_id(run) or "path" + hashlib.blake2b(os.path.abspath(run).encode(), digest_size=8).hexdigest()
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    return os.path.join(base, f"ddpdoctor-{os.getuid()}-{namespace}-{name}")


def make_spool_root(run: str) -> str:
    """Make the private folder for the ranks' spools of a run. Raises OSError."""
    root = spool_root(run)
    os.makedirs(root, mode=0o700, exist_ok=True)
    return root


def recover(run: str) -> list[str]:
    """Copy what ranks of this run left in their spools when they and their launcher were killed; never raises.

    Returns a sentence where the run directory cannot take it.
    """
    waiting: list[Waiting] = []
    failure = None
    for directory, target in spools_of(run):
        try:
            drain(directory, target=target)
        except (FileNotFoundError, OtherRunError):
            continue
        except OSError as error:
            failure = error
            waiting.append(waiting_in(directory, target))
    return [] if failure is None else [unsaved_sentence(run, waiting, failure)]


def spools_of(run: str) -> list[tuple[str, str]]:
    """The spools of a run on this host, each with its rank's folder in the run directory. Never raises."""
    found = []
    try:
        directories = sorted(entry.path for entry in os.scandir(spool_root(run)) if entry.is_dir())
    except OSError:
        return []
    for directory in directories:
        try:
            found.append((directory, _place_in(run, target_of(directory))))
        except OSError:
            continue
    return found


def target_of(directory: str) -> str:
    """The rank's folder in the run directory that a spool was made for. Raises OSError."""
    with open(os.path.join(directory, _TARGET)) as source:
        return source.read()


def _place_in(run: str, target: str) -> str:
    """``target``, or the same folder below ``run`` where the run was moved there since. Of a copy, and of the same
    folder seen by another path, what a spool holds goes to the original."""
    here = os.path.join(os.path.abspath(run), "ranks", os.path.basename(target))
    if here == target or run_id(run) == run_id(_run_of(target)):
        return target
    return here


def _run_of(target: str) -> str:
    return os.path.dirname(os.path.dirname(target))


class _Segment:
    """A piece of a stream: a file of fixed size in memory, written without a system call. Unused bytes are NUL, which no
    line holds. All of them are given storage at once: a mapped page that finds none when it is first written kills the
    process.
    """

    __slots__ = ("_file", "_handle", "memory", "size", "start", "used")

    def __init__(self, path: str, start: int, size: int) -> None:
        """Raises OSError where storage is short."""
        self.start, self.size, self.used = start, size, 0
        """Position of its first byte in the stream; bytes it can hold, and holds."""
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            missing = size
            while missing:
                missing -= os.write(handle, bytes(missing))
            self._file = _identity(handle)
            self.memory = mmap.mmap(handle, size)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(handle)
        self._handle = self._kept_open()

    def _kept_open(self) -> int:
        """The descriptor that the mapping holds for its own use, a copy that it does not tell; -1 where it can't be found."""
        listing = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
        return next((int(name) for name in os.listdir(listing) if _identity(int(name)) == self._file), -1)

    def close(self) -> None:
        """Give the mapping back, unless the job has closed all files it did not know: the number of its descriptor may
        be that of a file of the job now, which would be closed with it.
        """
        if _identity(self._handle) == self._file:
            self.memory.close()
        else:
            import ctypes

            # Nor may it be given back by anybody else, at the end of the process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.memory))


def _identity(handle: int) -> tuple[int, int] | None:
    """Of the file behind a descriptor; None where there is none."""
    try:
        status = os.fstat(handle)
    except OSError:
        return None
    return status.st_dev, status.st_ino


class Spool:
    """The writing side, one per rank. ``write`` copies into memory and never raises. One thread writes to a stream."""

    def __init__(self, root: str, target: str) -> None:
        """``target`` is the rank's folder in the run directory. Raises OSError."""
        self.directory = os.path.join(root, f"{os.path.basename(target)}-{os.getpid()}")
        self.target = target
        os.makedirs(self.directory, exist_ok=True)
        with open(os.path.join(self.directory, _TARGET), "w") as out:
            out.write(target)
        self._streams: dict[str, _Segment] = {}
        self.dropped = 0
        self.error: str | None = None

    def write(self, stream: str, data: bytes) -> None:
        """Append ``data`` (whole lines) to a stream. What cannot be kept is counted in ``dropped``."""
        try:
            segment = self._streams.get(stream)
            if segment is None or segment.used + len(data) > segment.size:
                segment = self._next(stream, segment, len(data))
            begin = segment.used
            segment.used = end = begin + len(data)
            segment.memory[begin:end] = data
        except (OSError, ValueError) as error:
            self.dropped += 1
            self.error = str(error)

    def _next(self, stream: str, full: _Segment | None, least: int) -> _Segment:
        position = 0
        if full is not None:
            position = full.start + full.used
            if _waiting_bytes(self.directory) > _limit_bytes(self.directory):
                raise OSError("the run directory cannot keep up, or is full")
        path = os.path.join(self.directory, f"{stream}.{position:015d}")
        segment = self._streams[stream] = _Segment(path, position, max(SEGMENT_BYTES, least))
        if full is not None:
            full.close()
        return segment

    def keep(self, name: str, document: Any) -> None:
        """Have ``document`` replace the JSON file of that ``name`` in the run directory, once it can. Raises OSError."""
        write_json(os.path.join(self.directory, name), document)

    def close(self) -> None:
        """Close the segments; what they hold stays until it is drained."""
        streams, self._streams = self._streams, {}
        for segment in streams.values():
            segment.close()


def _limit_bytes(directory: str) -> int:
    """Most that may wait here. Containers often have 64 MB of memory-backed storage, and data loader workers die where
    there is none left for their batches."""
    storage = os.statvfs(directory)
    if storage.f_bavail < storage.f_blocks * LEAST_FREE_SHARE:
        return 0
    return min(LIMIT_BYTES, int(storage.f_frsize * storage.f_blocks * MOST_SHARE) or LIMIT_BYTES)


def _waiting_bytes(directory: str) -> int:
    with os.scandir(directory) as entries:
        return sum(entry.stat().st_size for entry in entries)


def drain(directory: str, remove: bool = False, target: str | None = None) -> None:
    """Copy what a rank's spool holds into its run directory; with ``remove``, delete the spool afterwards.

    Safe to repeat and to run from several processes. Raises OSError when the target cannot take it, or is of another
    run by now (OtherRunError); nothing is lost then. ``target`` is where the rank's folder is now; None: where it was.
    """
    lock = os.open(os.path.join(directory, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        target = target or target_of(directory)
        refuse_other_run(_run_of(target), id_of_root(os.path.dirname(directory)))
        for stream, parts in segments_in(directory).items():
            _copy(parts, os.path.join(target, stream))
        for name in os.listdir(directory):
            if not name.endswith(".json"):
                continue
            with open(os.path.join(directory, name), "rb") as source:
                write_json(os.path.join(target, name), json.loads(source.read()))
            os.unlink(os.path.join(directory, name))
        if remove:
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(lock)


def _copy(parts: list[tuple[int, str]], target: str) -> None:
    out = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        done = os.fstat(out).st_size
        for index, (position, path) in enumerate(parts):
            with open(path, "rb") as source:
                source.seek(max(0, done - position))
                # Up to the first byte that is not written yet: after it there may be later ones already, in the middle
                # of being copied there.
                data = source.read().partition(b"\0")[0]
                while data:
                    written = os.write(out, data)
                    data = data[written:]
                    done += written
            if index + 1 < len(parts):
                os.unlink(path)
    finally:
        os.close(out)


def drain_all(root: str) -> list[str]:
    """Drain and remove every spool below ``root``; for the launcher, once its ranks are dead. Returns one
    sentence per failure."""
    failures = []
    try:
        directories = [entry.path for entry in os.scandir(root) if entry.is_dir()]
    except OSError:
        return []
    for directory in directories:
        try:
            drain(directory, remove=True)
        except OSError as error:
            failures.append(
                f"What {directory} still holds could not be copied to the run directory: {error}."
            )
    try:
        os.rmdir(root)
    except OSError:
        pass
    return failures
