"""A rank's spool, where its records are written first.

The training thread must never wait for storage, and its records must survive ``kill -9``. So the rank writes to short segment
files in memory-backed local storage (``/dev/shm``), which remain when its process ends. Another process or thread copies them to
the run directory (:mod:`.draining`), which may be on a slow or shared file system. JSON documents are also written here first,
and then copied.

::

    /dev/shm/ddpdoctor-<user>-<pid namespace>-<run id>/     the root: one per run and host, private
        <rank:05d>-<pid>/                                    the spool of one rank
            target                                           its folder in the run directory, or RUN/ranks while it has none
            writer.json, writer                              the process that writes here, and a lock held by it; see :mod:`.liveness`
            lock                                             held by the process that copies
            steps.jsonl.000000000065536                      a segment: the stream, and the position of its first byte

A rank writes to a segment through mapped memory, because a system call in each step would be the most expensive part of
recording. The size of the file in the run directory shows how much has been copied, so any process can continue an interrupted
copy. If another program, such as a cleaner of temporary files or systemd at a logout, removes the files of a running rank, the
rank recreates them from its newest segments.

Data loader workers append to one file in the spool of the rank that started them. There may be many workers, and they may be
restarted for each epoch or killed at any time. So each write is one system call that appends complete lines, there are no locks,
and workers create no files. The longer the rank has been recorded, the larger the file may be; lines beyond this limit are not
written.
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
from .liveness import WRITER_FILE, WRITER_FILES, WriterMark, boot_id, pid_namespace
from .owned import encoded, identity_of, make_private_folder, open_file, private_folder, replace_file
from .segments import LEAST_FREE_SHARE, UNNAMED_BYTES, Segment, room_for_segment

_SHM = "/dev/shm"
RETRY_S = 1.0
"""If there was no room, seconds until the next check for room. Not earlier, because counting uncopied data takes a system call
per segment, and the thread that copies, and so makes room, runs once a second."""
RESERVE_FILE = "reserve"
_RESERVE_BYTES = 64 * 1024
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_MOST_NAMES = 1_000_000
_created: dict[str, int] = {}
"""Number of spools that this process has created, by rank and process id. The hang monitor identifies a spool by its name, so the
name of a spool that was removed must not be used again."""
_TICK_NS = 3_000_000_000
"""For this long after a change, ns, each check reports it again, because a further change may have the same file time: file times
advance in steps of up to 10 ms, and clocks are adjusted. Checks are a second apart."""


def may_change_unseen(changed_ns: int) -> bool:
    """Whether a folder that was changed at ``changed_ns``, epoch ns, may change again without a different file time."""
    return time.time_ns() - changed_ns < _TICK_NS


def spool_root(run: str) -> str:
    """Path of the root of a run's spools on this host: the same for all launchers of the run, but different for each run, even of
    runs with the same path. The pid namespace is part of the name, because containers may share ``/dev/shm`` and still have
    different processes."""
    # A run directory that no launcher created has no id, so its path is used.
    return os.path.join(_base(), f"{own_roots_prefix()}{_place_number()}-{run_id(run) or path_name(run)}")


def _place_number() -> int:
    """The number of this pid namespace. If spools are not in ``/dev/shm``, hosts may share the storage; then it is a hash that
    includes the host, because the first pid namespace has the same number on all hosts."""
    namespace = pid_namespace()
    if _base() == _SHM:
        return namespace
    identity = f"{boot_id()} {namespace}".encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=7).digest(), "big")


def own_roots_prefix() -> str:
    """Beginning of the names of this user's roots."""
    return f"ddpdoctor-{os.getuid()}-"


def own_roots_pattern(run_id: str | None) -> str:
    """Glob pattern for the roots of a run in any container, or of all runs if ``run_id`` is None."""
    return os.path.join(glob.escape(_base()), f"{own_roots_prefix()}*-{run_id or ''}*")


def path_name(run: str) -> str:
    """Name, made from its path, for a run that has no id."""
    return "path" + hashlib.blake2b(os.path.abspath(run).encode(), digest_size=8).hexdigest()


def _base() -> str:
    return _SHM if os.access(_SHM, os.W_OK) else tempfile.gettempdir()


def roots_of(run: str) -> list[str]:
    """The roots of a run on this host, in all containers. Never raises."""
    found, known = [spool_root(run)], run_id(run)
    pattern = own_roots_pattern(known) if known else f"{glob.escape(found[0])}-*"
    return [*found, *sorted({*glob.glob(pattern)} - {*found})]


def spools_in(root: str) -> list[str]:
    """Sorted paths of the spools in a root; [] if it is missing or not this user's. Never raises."""
    try:
        with private_folder(root) as root_fd, os.scandir(root_fd) as entries:
            return sorted(
                os.path.join(root, entry.name) for entry in entries if entry.is_dir(follow_symlinks=False)
            )
    except OSError:
        return []


def make_spool_root(run: str) -> str:
    """Create the private root for the spools of a run. If another user has taken the name, a random suffix is added. Raises
    OSError."""
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
    """The writing side of a spool, one per rank. ``write`` copies into memory, and raises nothing but what a signal handler of
    the job raised. Only one thread at a time may write to a stream."""

    def __init__(self, root: str, rank: int, run: str) -> None:
        """Create the spool of a rank. (Its folder in ``run`` is created later, when something is copied there for the first
        time.) Raises OSError."""
        self._root = root
        self._target = layout.target_before_claim(run)
        make_private_folder(root)
        with private_folder(root) as root_fd:
            self._name = _new_folder(root_fd, rank)
            self.directory = os.path.join(root, self._name)
            try:
                with private_folder(self._name, root_fd) as spool_fd:
                    self._writing = WriterMark(spool_fd)
                    replace_file(layout.TARGET_FILE, spool_fd, os.fsencode(self._target))
                    _reserve(spool_fd)
            except OSError:
                _remove_incomplete(self._name, root_fd)
                raise
        self._streams: dict[str, Segment] = {}
        self._shared: list[tuple[Segment, memoryview]] = []
        self._detached: list[Segment] = []
        """Full segments of a removed spool that are not in its files; the segment after each is in no file either."""
        self._no_room_until_s: dict[str, float] = {}
        """By stream."""
        self._changed_ns = 0
        self._closed = False
        self.dropped = 0
        self.error: str | None = None
        self.is_from_job_handler: Callable[[BaseException], bool] = lambda error: False
        """Returns whether an error that the spool caught was raised by a signal handler of the job, during the spool's work.
        ``write`` raises such an error again."""

    def write(self, stream: str, data: bytes) -> bool:
        """Append ``data`` (complete lines) to a stream. If it cannot be written, for example for lack of room, counts it in
        ``dropped`` and returns False."""
        try:
            segment = self._streams.get(stream)
            if segment is None or segment.used + len(data) > segment.size:
                segment = self._next_segment(stream, segment, len(data))
            begin = segment.used
            segment.used = end = begin + len(data)
            segment.memory[begin:end] = data
            return True
        except (OSError, ValueError) as error:
            if self.is_from_job_handler(error):
                raise
            self.dropped += 1
            self.error = str(error)
            return False

    def _next_segment(self, stream: str, full: Segment | None, least: int) -> Segment:
        if time.monotonic() < self._no_room_until_s.get(stream, 0.0):
            raise OSError(self.error or "there was no room a moment ago")
        try:
            with layout.opened_spool(self.directory) as spool_fd:
                saved = 0 if full is None else full.bytes_in_file(spool_fd)
                # If the segment's file was removed, what was in it is written to the new one.
                unsaved = b"" if full is None else full.memory[saved : full.used]
                position = 0 if full is None else full.start + saved
                room, name = room_for_segment(spool_fd), f"{stream}.{position:015d}"
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=spool_fd)  # left by a call that a signal handler interrupted
                try:
                    segment = Segment(name, spool_fd, position, max(room, len(unsaved) + least))
                    segment.memory[: len(unsaved)] = unsaved
                    segment.used = len(unsaved)
                    self._streams[stream] = segment
                except BaseException:
                    # If the file remained, a copying process would take it, the last file of the stream, for the one being
                    # written.
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=spool_fd)
                    raise
        except OSError as error:
            if self.is_from_job_handler(error):
                raise
            if not isinstance(error, FileNotFoundError) or (full is not None and full.is_unnamed):
                self._no_room_until_s[stream] = time.monotonic() + RETRY_S
                raise self._reason(error) from error
            return self._unnamed_segment(stream, full, least)
        if full is not None:
            full.close()
        return segment

    def _unnamed_segment(self, stream: str, full: Segment | None, least: int) -> Segment:
        """A segment for a stream of a removed spool; ``restore`` saves it, and the one before it."""
        position = 0 if full is None else full.start + full.used
        segment = Segment(f"{stream}.{position:015d}", None, position, max(UNNAMED_BYTES, least))
        if full is not None and full not in self._detached:
            self._detached.append(full)
        self._streams[stream] = segment
        return segment

    def _reason(self, error: OSError) -> OSError:
        """An error with the reason in words for the user."""
        if isinstance(error, FileNotFoundError):
            return OSError(f"{self.directory} was removed while the job ran")
        if error.errno in _NO_ROOM:
            return OSError(_no_room_reason(self._root))
        return error

    def restore(self) -> bool:
        """If the target, the writer's mark or segments of the spool were removed, recreate them (not the shared pages, the
        workers' file and the reserve). Returns whether any were missing. Must be called on another thread than the writing one.
        Raises OSError."""
        if self._closed:
            return False
        with suppress(FileNotFoundError), layout.opened_spool(self.directory) as spool_fd:
            if self._is_complete(spool_fd):
                return False
        make_private_folder(self._root)
        with private_folder(self._root) as root:
            make_private_folder(self._name, root)
            with private_folder(self._name, root) as spool_fd:
                replace_file(layout.TARGET_FILE, spool_fd, os.fsencode(self._target))
                self._writing.end()
                self._writing = WriterMark(spool_fd)
                # In the order of their positions, because a copier fills gaps.
                for segment in self._detached[:]:
                    segment.save_detached(spool_fd)
                    self._detached.remove(segment)
                    segment.close()
                for segment in list(self._streams.values()):
                    try:
                        if not segment.is_in(spool_fd):
                            segment.save(spool_fd)
                    except (FileExistsError, ValueError):
                        continue  # the writing thread has created or closed it meanwhile
        self._no_room_until_s.clear()
        return True

    def _is_complete(self, spool_fd: int) -> bool:
        if identity_of(layout.TARGET_FILE, spool_fd) is None:
            return False
        if layout.is_unclaimed(self._target):
            self._target = layout.read_target(spool_fd)
        missing = [each for each in list(self._streams.items()) if not each[1].is_in(spool_fd)]
        # A segment does not count as missing if it was full, copied and removed meanwhile: then another has replaced it in its
        # stream.
        return (
            not self._detached
            and self._writing.is_in(spool_fd)
            and all(self._streams.get(name) is not old for name, old in missing)
        )

    def keep(self, name: str, data: bytes) -> None:
        """Write ``data`` to the spool as the document ``name``, which is then copied to the run directory. For rank.json, the
        reserve is used if there is no room. Raises OSError."""
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
        """Like ``keep``, for a JSON document. Raises OSError."""
        self.keep(name, encoded(document))

    def withdraw(self, name: str) -> None:
        """Remove the document ``name`` from the spool. Raises OSError."""
        with layout.opened_spool(self.directory) as spool_fd, suppress(FileNotFoundError):
            os.unlink(name, dir_fd=spool_fd)

    def shared(self, name: str, size: int) -> memoryview:
        """Create a file of ``size`` zero bytes and return its mapped memory as 8-byte integers. The file remains when the process
        ends. After ``close``, access to the memory raises ValueError. Raises OSError."""
        with layout.opened_spool(self.directory) as spool_fd:
            segment = Segment(name, spool_fd, 0, size)
        numbers = memoryview(segment.memory).cast("q")
        self._shared.append((segment, numbers))
        return numbers

    def open_text(self, name: str) -> int:
        """Open a file of the spool for appending text. Raises OSError."""
        with layout.opened_spool(self.directory) as spool_fd:
            return open_file(name, spool_fd, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def directory_changed(self) -> bool:
        """Whether a file of the spool may have been added, removed or replaced since the last call. Takes one system call. Never
        raises."""
        try:
            changed_ns = os.stat(self.directory).st_mtime_ns
        except OSError:
            return True
        before, self._changed_ns = self._changed_ns, changed_ns
        # If another file is added after this check, but in the same clock tick, the folder's time does not change. So recent
        # changes are reported again.
        return changed_ns != before or may_change_unseen(changed_ns)

    def hand_over_trace(self, raw: str, header: dict[str, Any], max_bytes: int, number: int = 0) -> None:
        """Queue the profiler's trace, which is in the private folder ``raw``, for compression (see :mod:`.handover`). The members
        of ``header`` are put at its beginning. ``number``: that of the window if it was requested. Raises OSError."""
        order = {"folder": raw, "header": header, "max_bytes": max_bytes}
        with layout.opened_spool(self.directory) as spool_fd:
            replace_file(layout.handover_file(number), spool_fd, encoded(order))

    def rank_folder(self) -> str | None:
        """The rank's folder in the run directory; None if it has none yet. Raises OSError."""
        target = layout.target_of(self.directory)
        return None if layout.is_unclaimed(target) else target

    def close(self) -> None:
        """Close the segments. Their files remain until they have been copied."""
        self._closed = True
        segments, self._streams = [*self._detached, *self._streams.values()], {}
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
    """Reserve room for rank.json, which must still be written if storage is full, because it reports what could not be stored.
    Never raises."""
    if identity_of(RESERVE_FILE, spool_fd) is None:
        with suppress(OSError):
            replace_file(RESERVE_FILE, spool_fd, bytes(_RESERVE_BYTES))


def _remove_incomplete(name: str, root: int) -> None:
    with suppress(OSError):
        with private_folder(name, root) as spool_fd:
            for file in (*WRITER_FILES, layout.TARGET_FILE):
                if identity_of(file, spool_fd) is not None:
                    os.unlink(file, dir_fd=spool_fd)
        os.rmdir(name, dir_fd=root)


def _new_folder(root: int, rank: int) -> str:
    """Create a folder for a rank of this process. If an earlier process with the same id has left one, its name gets a number."""
    pid = os.getpid()
    key = f"{rank}-{pid}"
    for repeat in range(_created.get(key, 0), _MOST_NAMES):
        name = f"{rank:05d}.{repeat}-{pid}" if repeat else f"{rank:05d}-{pid}"
        try:
            os.mkdir(name, 0o700, dir_fd=root)
        except FileExistsError:
            continue
        _created[key] = repeat + 1
        return name
    raise FileExistsError(f"rank {rank} has left {_MOST_NAMES} spools of process {pid}")


def _no_room_reason(root: str) -> str:
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
"""The workers' file in the spool: a single segment at position 0."""
_FIRST_BYTES = 64 * 1024
"""Bytes that the workers' file may contain at the beginning of a recording; as many more each time the recording's age
doubles."""
_YOUNG_S = 30.0
"""Doublings count from about this age of a recording on, s."""


def accept_workers(spool: Spool) -> None:
    """Allow the workers of this rank to record. Raises OSError."""
    os.close(spool.open_text(WORKERS_SEGMENT))


def spool_of_process(root: str, pid: int) -> str | None:
    """The newest spool in ``root`` of the rank with process id ``pid`` that allows its workers to record; None if there is none.
    Never raises."""
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
    """Seconds since the recording of a spool's rank began. Raises OSError."""
    return max(0.0, time.time() - os.stat(os.path.join(spool, WRITER_FILE)).st_mtime)


def append_lines(spool: str, data: bytes) -> bool:
    """Append complete lines to the workers' file of a spool. If the file's size limit is reached or there is little storage left,
    writes nothing and returns False. Raises OSError if the spool is gone."""
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
