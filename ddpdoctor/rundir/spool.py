"""A rank's spool: the writing side of its records.

The training thread must never wait for storage, and what it recorded must survive ``kill -9``. So it writes
to short segment files in memory-backed local storage (``/dev/shm``), which outlive the process, and another
thread, or the launcher once the rank is dead, copies them to the run directory (:mod:`.draining`), which may lie on a slow
or shared file system. A JSON file waits here until it was copied, too.

::

    /dev/shm/ddpdoctor-<user>-<pid namespace>-<run id>/     the root: one a run and host, private
        <rank:05d>-<pid>/                                    the spool of one rank
            target                                           its folder in the run directory, or RUN/ranks while it has none
            writer.json, writer                              which process writes here, and a lock that it holds, see :mod:`.liveness`
            lock                                             held by the process that copies
            steps.jsonl.000000000065536                      a segment: the stream, and its first byte's position in that

A segment is written as mapped memory: a system call in each step would be the most expensive part of recording it. The
target's size shows what was copied already, so that a copy which was cut off continues there and any process can repeat
it. If another program removes the files of a living rank, such as a cleaner of temporary files or systemd at a logout,
the rank makes them again with the content of its newest segments.

Data loader workers append whole lines to one file, in the spool of the rank that started them. They may be many, may be made again for each
pass over the data, and may be killed at any moment. So each write is one system call that adds whole lines, nothing is locked, no worker
makes a file, and the file's size has a limit that depends on how long the rank has been recorded. What comes beyond it is not written.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import tempfile
import time
from contextlib import suppress
from math import log2
from typing import Any, Callable

from . import layout
from .layout import WORKERS_FILE, run_id
from .liveness import WRITER_FILE, WRITER_FILES, Writing, boot_id, pid_namespace
from .owned import encoded, identity_of, make_private_folder, open_file, private_folder, replace_file
from .segments import LEAST_FREE_SHARE, Segment, room_for_segment

_SHM = "/dev/shm"
LOOK_AGAIN_S = 1.0
"""Seconds until room is checked again after there was none: counting uncopied data takes a system call for each
segment, and the thread that copies runs once a second."""
RESERVE_FILE = "reserve"
_RESERVE_BYTES = 64 * 1024
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_MOST_NAMES = 1_000_000
_made: dict[str, int] = {}
"""By how a name begins and ends, how many spools this process has made so: the hang monitor identifies a spool by
its name, which is not used again once it was removed."""
_TICK_NS = 3_000_000_000
"""Nanoseconds after a change for which the next check reports one again: the kernel's times stand still for up to 10
ms, and clocks are adjusted. Checks are a second apart."""


def spool_root(run: str) -> str:
    """Where the ranks' spools of a run lie on this host: the same for all launchers of that run, and another one for
    each run, be it of the same path.

    Containers may share ``/dev/shm`` but not their processes, so the pid namespace is part of the name.
    """
    # A directory that no launcher has made has its path only.
    return os.path.join(_base(), f"{own_roots_prefix()}{_place_number()}-{run_id(run) or path_name(run)}")


def _place_number() -> int:
    """The number of this pid namespace; where hosts may share the storage, of this host too, whose first namespaces
    have one number."""
    namespace = pid_namespace()
    if _base() == _SHM:
        return namespace
    identity = f"{boot_id()} {namespace}".encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=7).digest(), "big")


def own_roots_prefix() -> str:
    """How the names of this user's roots begin."""
    return f"ddpdoctor-{os.getuid()}-"


def own_roots_pattern(run_id: str | None) -> str:
    """What the paths of the roots of a run match, in any container; those of all runs if it has no id."""
    return os.path.join(glob.escape(_base()), f"{own_roots_prefix()}*-{run_id or ''}*")


def path_name(run: str) -> str:
    """The replacement for the id of a run that has none, from its path."""
    return "path" + hashlib.blake2b(os.path.abspath(run).encode(), digest_size=8).hexdigest()


def _base() -> str:
    return _SHM if os.access(_SHM, os.W_OK) else tempfile.gettempdir()


def roots_of(run: str) -> list[str]:
    """The roots of a run on this host, of all containers. Never raises."""
    found, known = [spool_root(run)], run_id(run)
    pattern = own_roots_pattern(known) if known else f"{glob.escape(found[0])}-*"
    return [*found, *sorted({*glob.glob(pattern)} - {*found})]


def spools_in(root: str) -> list[str]:
    """Paths of the spools in a root, sorted; none where it is missing or not this user's own. Never raises."""
    try:
        with private_folder(root) as root_fd, os.scandir(root_fd) as entries:
            return sorted(
                os.path.join(root, entry.name) for entry in entries if entry.is_dir(follow_symlinks=False)
            )
    except OSError:
        return []


def make_spool_root(run: str) -> str:
    """Make the private folder for the ranks' spools of a run; if another user has created that name, a random suffix
    is added. Raises OSError."""
    root = spool_root(run)
    try:
        make_private_folder(root)
        return root
    except OSError:
        if not os.path.lexists(root):
            raise
    for other in sorted(glob.glob(f"{glob.escape(root)}-*")):
        try:
            with private_folder(other):
                return other
        except OSError:
            continue
    return tempfile.mkdtemp(prefix=f"{os.path.basename(root)}-", dir=os.path.dirname(root))


class Spool:
    """The writing side, one per rank. ``write`` copies into memory and never raises. One thread at a time writes to a stream."""

    def __init__(self, root: str, rank: int, run: str) -> None:
        """Make the spool of a rank whose folder in ``run`` is claimed when something is copied there first. Raises
        OSError."""
        self._root = root
        self._target = layout.target_before_claim(run)
        make_private_folder(root)
        with private_folder(root) as root_fd:
            self._name = _new_folder(root_fd, rank)
            self.directory = os.path.join(root, self._name)
            try:
                with private_folder(self._name, root_fd) as spool_fd:
                    self._writing = Writing(spool_fd)
                    replace_file(layout.TARGET_FILE, spool_fd, os.fsencode(self._target))
                    _reserve(spool_fd)
            except OSError:
                _remove_begun(self._name, root_fd)
                raise
        self._streams: dict[str, Segment] = {}
        self._shared: list[tuple[Segment, memoryview]] = []
        self._no_room_until_s = 0.0
        self._changed_ns = 0
        self._closed = False
        self.dropped = 0
        self.error: str | None = None
        self.is_the_jobs: Callable[[BaseException], bool] = lambda error: False
        """Whether an error was raised by a handler of a signal, in the midst of this; ``write`` raises it then."""

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
            if self.is_the_jobs(error):
                raise
            self.dropped += 1
            self.error = str(error)
            return False

    def _next(self, stream: str, full: Segment | None, least: int) -> Segment:
        if time.monotonic() < self._no_room_until_s:
            raise OSError(self.error or "there was no room a moment ago")
        try:
            with layout.opened_spool(self.directory) as spool_fd:
                saved = 0 if full is None else full.in_file(spool_fd)
                # What is no longer in a file, because that was removed, is written once more.
                unsaved = b"" if full is None else full.memory[saved : full.used]
                position = 0 if full is None else full.start + saved
                room, name = room_for_segment(spool_fd), f"{stream}.{position:015d}"
                with suppress(FileNotFoundError):
                    os.unlink(
                        name, dir_fd=spool_fd
                    )  # left when a handler of the job's raised in the midst of what follows
                try:
                    segment = Segment(name, spool_fd, position, max(room, len(unsaved) + least))
                    segment.memory[: len(unsaved)] = unsaved
                    segment.used = len(unsaved)
                    self._streams[stream] = segment
                except BaseException:
                    # Who copies takes the last file of a stream for the one that is written to.
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=spool_fd)
                    raise
        except OSError as error:
            if self.is_the_jobs(error):
                raise
            self._no_room_until_s = time.monotonic() + LOOK_AGAIN_S
            raise self._reason(error) from error
        if full is not None:
            full.close()
        return segment

    def _reason(self, error: OSError) -> OSError:
        """The error as a user should read it."""
        if isinstance(error, FileNotFoundError):
            return OSError(f"{self.directory} was removed while the job ran")
        if error.errno in _NO_ROOM:
            return OSError(_short_of_room(self._root))
        return error

    def restore(self) -> bool:
        """Check whether the spool's files still exist by name; make those again that were removed: True then. For
        one thread, but not the one that writes. Raises OSError."""
        if self._closed:
            return False
        with suppress(FileNotFoundError), layout.opened_spool(self.directory) as spool_fd:
            if self._is_whole(spool_fd):
                return False
        make_private_folder(self._root)
        with private_folder(self._root) as root:
            make_private_folder(self._name, root)
            with private_folder(self._name, root) as spool_fd:
                replace_file(layout.TARGET_FILE, spool_fd, os.fsencode(self._target))
                self._writing.end()
                self._writing = Writing(spool_fd)
                for segment in list(self._streams.values()):
                    try:
                        if not segment.is_in(spool_fd):
                            segment.save(spool_fd)
                    except (FileExistsError, ValueError):
                        continue  # the thread that writes was faster
        self._no_room_until_s = 0.0
        return True

    def _is_whole(self, spool_fd: int) -> bool:
        if identity_of(layout.TARGET_FILE, spool_fd) is None:
            return False
        if layout.is_unclaimed(self._target):
            self._target = layout.read_target(spool_fd)
        missing = [each for each in list(self._streams.items()) if not each[1].is_in(spool_fd)]
        # One that was full, copied and removed meanwhile has been followed by another.
        return self._writing.is_in(spool_fd) and all(
            self._streams.get(name) is not old for name, old in missing
        )

    def keep(self, name: str, data: bytes) -> None:
        """Write ``data`` as the document of that ``name``, to be copied to the run directory. Raises OSError."""
        with layout.opened_spool(self.directory) as spool_fd:
            try:
                replace_file(name, spool_fd, data)
            except OSError as error:
                if (
                    name != layout.RANK_FILE
                    or error.errno not in _NO_ROOM
                    or identity_of(RESERVE_FILE, spool_fd) is None
                ):
                    raise
                os.unlink(RESERVE_FILE, dir_fd=spool_fd)
                replace_file(name, spool_fd, data)
            if name == layout.RANK_FILE:
                _reserve(spool_fd)

    def keep_document(self, name: str, document: dict[str, Any]) -> None:
        """Write a JSON document, as ``keep`` does. Raises OSError."""
        self.keep(name, encoded(document))

    def withdraw(self, name: str) -> None:
        """Remove the document of that ``name`` from the spool. Raises OSError."""
        with layout.opened_spool(self.directory) as spool_fd, suppress(FileNotFoundError):
            os.unlink(name, dir_fd=spool_fd)

    def shared(self, name: str, size: int) -> memoryview:
        """Memory of ``size`` bytes, as numbers of eight bytes each, all 0, that is the content of a new file here and survives the
        process; until ``close``: who writes to it gets ValueError then. Raises OSError."""
        with layout.opened_spool(self.directory) as spool_fd:
            segment = Segment(name, spool_fd, 0, size)
        numbers = memoryview(segment.memory).cast("q")
        self._shared.append((segment, numbers))
        return numbers

    def open_text(self, name: str) -> int:
        """A descriptor of a file here to whose end text is written. Raises OSError."""
        with layout.opened_spool(self.directory) as spool_fd:
            return open_file(name, spool_fd, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def directory_changed(self) -> bool:
        """Whether a file may have been added, removed or replaced here since the last call; by one system call.
        Never raises."""
        try:
            changed_ns = os.stat(self.directory).st_mtime_ns
        except OSError:
            return True
        before, self._changed_ns = self._changed_ns, changed_ns
        # A file that came in the same tick of the clock, but after the look, changes nothing that can be seen.
        return changed_ns != before or time.time_ns() - changed_ns < _TICK_NS

    def hand_over_trace(self, raw: str, header: dict[str, Any], max_bytes: int, number: int = 0) -> None:
        """Queue the profiler's trace in the private folder ``raw`` for compression, see :mod:`.handover`;
        ``header``'s members are put first in it. ``number`` is that of a window requested while the job runs. Raises
        OSError."""
        order = {"folder": raw, "header": header, "max_bytes": max_bytes}
        with layout.opened_spool(self.directory) as spool_fd:
            replace_file(layout.handover_file(number), spool_fd, encoded(order))

    def claimed(self) -> str | None:
        """The rank's folder in the run directory; None where it has none yet. Raises OSError."""
        target = layout.target_of(self.directory)
        return None if layout.is_unclaimed(target) else target

    def close(self) -> None:
        """Close the segments; their content stays until it is copied."""
        self._closed = True
        segments, self._streams = list(self._streams.values()), {}
        for segment, numbers in self._shared:
            numbers.release()
            segments.append(segment)
        self._shared.clear()
        for segment in segments:
            segment.close()
        try:
            with layout.opened_spool(self.directory) as spool_fd:
                self._writing.end(spool_fd)
        except OSError:
            self._writing.end()


def _reserve(spool_fd: int) -> None:
    """Reserve room for rank.json, which reports what could not be stored. Never raises."""
    if identity_of(RESERVE_FILE, spool_fd) is None:
        with suppress(OSError):
            replace_file(RESERVE_FILE, spool_fd, bytes(_RESERVE_BYTES))


def _remove_begun(name: str, root: int) -> None:
    with suppress(OSError):
        with private_folder(name, root) as spool_fd:
            for file in (*WRITER_FILES, layout.TARGET_FILE):
                if identity_of(file, spool_fd) is not None:
                    os.unlink(file, dir_fd=spool_fd)
        os.rmdir(name, dir_fd=root)


def _new_folder(root: int, rank: int) -> str:
    """Make a folder for a rank of this process; an earlier process of the same number may have left one."""
    pid = os.getpid()
    key = f"{rank}-{pid}"
    for repeat in range(_made.get(key, 0), _MOST_NAMES):
        name = f"{rank:05d}.{repeat}-{pid}" if repeat else f"{rank:05d}-{pid}"
        try:
            os.mkdir(name, 0o700, dir_fd=root)
        except FileExistsError:
            continue
        _made[key] = repeat + 1
        return name
    raise FileExistsError(f"rank {rank} has left {_MOST_NAMES} spools of process {pid}")


def _short_of_room(root: str) -> str:
    base = os.path.dirname(root)
    try:
        storage = os.statvfs(base)
        free, whole = (count * storage.f_frsize / 1e6 for count in (storage.f_bavail, storage.f_blocks))
    except OSError:
        return f"{base} is full"
    return (
        f"{base} is full ({free:.1f} of {whole:.0f} MB are free, which are left to the job); give the job more, "
        "as with `docker run --shm-size=16g`"
    )


WORKERS_SEGMENT = f"{WORKERS_FILE}.{0:015d}"
"""The file in the spool: one piece, from the beginning on."""
_FIRST_BYTES = 64 * 1024
"""Allowed at the beginning of a recording, and once more each time that its age doubles."""
_YOUNG_S = 30.0
"""Age of a recording up to which its first doubling counts."""


def accept_workers(spool: Spool) -> None:
    """Let workers of this rank record. Raises OSError."""
    os.close(spool.open_text(WORKERS_SEGMENT))


def spool_of_process(root: str, pid: int) -> str | None:
    """The newest spool in ``root`` of the rank that is this process and lets its workers record; None where there is none. Never
    raises."""
    found = []
    for spool in spools_in(root):
        named = layout.parse_spool_name(spool)
        if named is not None and named[1] == pid:
            try:
                found.append((os.stat(os.path.join(spool, WORKERS_SEGMENT)).st_ctime_ns, spool))
            except OSError:
                continue
    return max(found)[1] if found else None


def recorded_s(spool: str) -> float:
    """For how long the rank of a spool has been recorded, s. Raises OSError."""
    return max(0.0, time.time() - os.stat(os.path.join(spool, WRITER_FILE)).st_mtime)


def append_lines(spool: str, data: bytes) -> bool:
    """Append whole lines to the workers' file of a spool; False, and nothing of them, where its limit is reached or
    storage is short. Raises OSError where the spool is gone."""
    most = _FIRST_BYTES * (1 + log2(1 + recorded_s(spool) / _YOUNG_S))
    with layout.opened_spool(spool) as spool_fd:
        handle = open_file(WORKERS_SEGMENT, spool_fd, os.O_WRONLY | os.O_APPEND)
        try:
            storage = os.fstatvfs(handle)
            if storage.f_bavail < storage.f_blocks * LEAST_FREE_SHARE:
                return False
            if os.fstat(handle).st_size + len(data) > most:
                return False
            return os.write(handle, data) == len(data)
        finally:
            os.close(handle)
