"""A rank's records on their way to the run directory: the writing side.

The training thread must never wait for storage, and what it recorded must survive ``kill -9``. So it writes
to short segment files in memory-backed local storage (``/dev/shm``), which outlive the process, and another
thread, or the launcher once the rank is dead, copies them to the run directory (:mod:`.draining`), which may lie on a slow
or shared file system. A JSON file waits here until it was copied, too.

::

    /dev/shm/ddpdoctor-<user>-<pid namespace>-<run id>/     the root: one a run and host, private
        <rank:05d>-<pid>/                                    the spool of one rank
            target                                           its folder in the run directory, or RUN/ranks while it has none
            lock                                             held by whoever copies
            steps.jsonl.000000000065536                      a segment: the stream, and its first byte's position in that

A segment is written as mapped memory: a system call in each step would be the dearest part of recording it. What was
copied already is the target's own size, so that a copy that was cut off goes on where it stopped and can be repeated by
anybody.
"""

from __future__ import annotations

import glob
import hashlib
import json
import mmap
import os
import tempfile
import time
from typing import Any, Iterator

from .asking import CaptureOrder, capture_ordered, question_in
from .handover import QUESTION_FILE, hand_over_trace
from .owned import file_identity, make_private_folder, open_file, private_folder, replace_file
from .run_id import run_id
from .target import TARGET_FILE, is_unclaimed, target_of, unclaimed_target

SEGMENT_BYTES = 64 * 1024
LIMIT_BYTES = 64 * 1024 * 1024
"""Most that one rank lets wait for the run directory."""
MOST_SHARE = 1 / 32
"""The same, of the storage that it waits in."""
LEAST_FREE_SHARE = 1 / 8
"""Of that storage; what is left is for the job."""
LOOK_AGAIN_S = 1.0
"""Once there was no room, until it is asked for again: to count what waits takes a system call for each segment, and the
thread that copies comes by once a second."""
_MOST_NAMES = 1000
_TICK_NS = 3_000_000_000
"""So long after a change the next look counts as one, too: the kernel's times stand still for up to 10 ms, and clocks are put right.
Looks are a second apart."""


def spool_root(run: str) -> str:
    """Where the ranks' spools of a run lie on this host: the same for all launchers of that run, and another one for
    each run, be it of the same path.

    Containers may share ``/dev/shm`` but not their processes, so the pid namespace is part of the name.
    """
    # A directory that no launcher has made has its path only.
    return os.path.join(_base(), f"{own_roots_prefix()}{pid_namespace()}-{run_id(run) or path_name(run)}")


def own_roots_prefix() -> str:
    """How the names of this user's roots begin."""
    return f"ddpdoctor-{os.getuid()}-"


def own_roots_pattern(run_id: str | None) -> str:
    """What the paths of the roots of a run match, in whatever container it recorded; of all runs where it has no id."""
    return os.path.join(glob.escape(_base()), f"{own_roots_prefix()}*-{run_id or '*'}")


def path_name(run: str) -> str:
    """What stands for the id of a run that has none."""
    return "path" + hashlib.blake2b(os.path.abspath(run).encode(), digest_size=8).hexdigest()


def pid_namespace() -> int:
    """The number of this process's pid namespace, 0 where unknown: only within one do process ids mean something."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _base() -> str:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


def make_spool_root(run: str) -> str:
    """Make the private folder for the ranks' spools of a run. Raises OSError, also where somebody else has made it."""
    root = spool_root(run)
    make_private_folder(root)
    return root


class _Segment:
    """A piece of a stream: a file of fixed size in memory, written without a system call. Unused bytes are NUL, which no
    line holds. All of them are given storage at once: a mapped page that finds none when it is first written kills the
    process.
    """

    __slots__ = ("_file", "_handle", "memory", "size", "start", "used")

    def __init__(self, name: str, folder: int, start: int, size: int) -> None:
        """Raises OSError where storage is short."""
        self.start, self.size, self.used = start, size, 0
        """Position of its first byte in the stream; bytes it can hold, and holds."""
        handle = open_file(name, folder, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            missing = size
            while missing:
                missing -= os.write(handle, bytes(missing))
            self._file = file_identity(handle)
            self.memory = mmap.mmap(handle, size)
        except OSError:
            os.unlink(name, dir_fd=folder)
            raise
        finally:
            os.close(handle)
        self._handle = self._kept_open()

    def _kept_open(self) -> int:
        """The descriptor that the mapping holds for its own use, a copy that it does not tell; -1 where it can't be found."""
        listing = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
        return next((int(name) for name in os.listdir(listing) if file_identity(int(name)) == self._file), -1)

    def close(self) -> None:
        """Give the mapping back, unless the job has closed all files it did not know: the number of its descriptor may
        be that of a file of the job now, which would be closed with it.
        """
        if file_identity(self._handle) == self._file:
            self.memory.close()
        else:
            import ctypes

            # Nor may it be given back by anybody else, at the end of the process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.memory))


class Spool:
    """The writing side, one per rank. ``write`` copies into memory and never raises. One thread writes to a stream."""

    def __init__(self, root: str, rank: int, run: str) -> None:
        """Make the spool of a rank whose folder in ``run`` is claimed when something is copied there first. Raises
        OSError."""
        self._root = root
        make_private_folder(root)
        with private_folder(root) as within:
            self._name = _new_folder(within, rank)
            self.directory = os.path.join(root, self._name)
            with private_folder(self._name, within) as here:
                replace_file(TARGET_FILE, here, os.fsencode(unclaimed_target(run)))
        self._streams: dict[str, _Segment] = {}
        self._shared: list[_Segment] = []
        self._no_room_until_s = 0.0
        self._changed_ns = 0
        self.dropped = 0
        self.error: str | None = None

    def write(self, stream: str, data: bytes) -> bool:
        """Append ``data`` (whole lines) to a stream. What cannot be kept is counted in ``dropped``; False then."""
        try:
            segment = self._streams.get(stream)
            if segment is None or segment.used + len(data) > segment.size:
                segment = self._next(stream, segment, len(data))
            begin = segment.used
            segment.used = end = begin + len(data)
            segment.memory[begin:end] = data
            return True
        except (OSError, ValueError) as error:
            self.dropped += 1
            self.error = str(error)
            return False

    def _next(self, stream: str, full: _Segment | None, least: int) -> _Segment:
        position = 0
        if time.monotonic() < self._no_room_until_s:
            raise OSError("the run directory cannot keep up, or is full")
        try:
            with private_folder(self._root) as root, private_folder(self._name, root) as here:
                if full is not None:
                    position = full.start + full.used
                    if _waiting_bytes(here) > _limit_bytes(here):
                        raise OSError("the run directory cannot keep up, or is full")
                segment = _Segment(f"{stream}.{position:015d}", here, position, max(SEGMENT_BYTES, least))
        except OSError:
            self._no_room_until_s = time.monotonic() + LOOK_AGAIN_S
            raise
        self._streams[stream] = segment
        if full is not None:
            full.close()
        return segment

    def keep(self, name: str, data: bytes) -> None:
        """Have ``data`` replace the document of that ``name`` in the run directory, once it can. Raises OSError."""
        with private_folder(self._root) as root, private_folder(self._name, root) as here:
            replace_file(name, here, data)

    def keep_document(self, name: str, document: dict[str, Any]) -> None:
        """The same of a JSON document."""
        self.keep(name, json.dumps(document, separators=(",", ":"), default=str).encode())

    def withdraw(self, name: str) -> None:
        """Have nobody read the document of that ``name`` any more. Raises OSError."""
        with private_folder(self._root) as root, private_folder(self._name, root) as here:
            try:
                os.unlink(name, dir_fd=here)
            except FileNotFoundError:
                pass

    def shared(self, name: str, size: int) -> mmap.mmap:
        """Memory of ``size`` bytes, all NUL, that is the content of a new file here, whatever becomes of the process; until
        ``close``. Raises OSError."""
        with private_folder(self._root) as root, private_folder(self._name, root) as here:
            self._shared.append(_Segment(name, here, 0, size))
        return self._shared[-1].memory

    def open_text(self, name: str) -> int:
        """A descriptor of a file here to whose end text is written. Raises OSError."""
        with private_folder(self._root) as root, private_folder(self._name, root) as here:
            return open_file(name, here, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def has_news(self) -> bool:
        """Whether a file may have come, gone or been replaced here since the last call; by one system call. Never raises."""
        try:
            changed_ns = os.stat(self.directory).st_mtime_ns
        except OSError:
            return True
        before, self._changed_ns = self._changed_ns, changed_ns
        # A file that came in the same tick of the clock, but after the look, changes nothing that can be seen.
        return changed_ns != before or time.time_ns() - changed_ns < _TICK_NS

    def asked(self, question: str = QUESTION_FILE) -> int:
        """The number of the last question, of the launcher's side or another, see :func:`.asking.ask`; 0 where there is none. Never
        raises."""
        return question_in(self.directory, question)

    def capture_ordered(self) -> "CaptureOrder | None":
        """The profiler window that somebody has asked for, see :mod:`.asking`. Never raises."""
        return capture_ordered(self.directory)

    def hand_over_trace(self, raw: str, header: dict[str, Any], max_bytes: int, number: int = 0) -> None:
        """Leave the profiler's trace in the private folder ``raw``, see :mod:`.handover`. Raises OSError."""
        with private_folder(self._root) as root, private_folder(self._name, root) as here:
            hand_over_trace(here, raw, header, max_bytes, number)

    def claimed(self) -> str | None:
        """The rank's folder in the run directory; None where it has none yet. Raises OSError."""
        target = target_of(self.directory)
        return None if is_unclaimed(target) else target

    def close(self) -> None:
        """Close the segments; what they hold stays until it is drained."""
        segments, self._streams = [*self._streams.values(), *self._shared], {}
        self._shared.clear()
        for segment in segments:
            segment.close()


def _new_folder(root: int, rank: int) -> str:
    """Make a folder for a rank of this process; an earlier process of the same number may have left one."""
    for name in _names(rank):
        try:
            os.mkdir(name, 0o700, dir_fd=root)
        except FileExistsError:
            continue
        return name
    raise FileExistsError(f"rank {rank} has left {_MOST_NAMES} spools of process {os.getpid()}")


def _names(rank: int) -> Iterator[str]:
    yield f"{rank:05d}-{os.getpid()}"
    for repeat in range(1, _MOST_NAMES):
        yield f"{rank:05d}.{repeat}-{os.getpid()}"


def _limit_bytes(folder: int) -> int:
    """Most that may wait here. Containers often have 64 MB of memory-backed storage, and data loader workers die where
    there is none left for their batches."""
    storage = os.statvfs(folder)
    if storage.f_bavail < storage.f_blocks * LEAST_FREE_SHARE:
        return 0
    return min(LIMIT_BYTES, int(storage.f_frsize * storage.f_blocks * MOST_SHARE) or LIMIT_BYTES)


def _waiting_bytes(folder: int) -> int:
    with os.scandir(folder) as entries:
        return sum(entry.stat().st_size for entry in entries)
