"""Opens this user's folders and files so that no other user can replace them.

Memory-backed storage and temporary folders are open to every user of a machine. Another user who knows a name can create it
first, as a link, a pipe or a folder. So each file is opened relative to its folder's descriptor, no link is followed, and the
opened file is checked rather than the name.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_OTHERS = 0o077
"""Mode bits that give other users access to a folder."""
_MOST_PARTS = 4096
"""Upper limit of the components of a path, including those of the links in it."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LOCK = struct.Struct("@hhqqi0q")
"""Linux's ``struct flock``: kind, whence, start, length, process id."""
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Without O_NONBLOCK, opening a pipe blocks until its other end is opened."""


class UntrustedFileError(OSError):
    """The file or folder belongs to another user, is accessible to others, or is not a plain file or folder."""


def _refuse(path: str, why: str) -> UntrustedFileError:
    return UntrustedFileError(errno.EPERM, why, path)


@contextmanager
def private_folder(path: str, dir_fd: int | None = None) -> Iterator[int]:
    """Open a folder that belongs to this user and is not accessible to others, relative to ``dir_fd`` if given. Raises OSError,
    UntrustedFileError."""
    with folder(path, dir_fd) as handle:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid():
            raise _refuse(path, "it belongs to another user")
        if status.st_mode & _OTHERS:
            raise _refuse(path, "it is open to other users")
        yield handle


@contextmanager
def folder(path: str, dir_fd: int | None = None, links: bool = False) -> Iterator[int]:
    """Open a folder; a link to one only if ``links``. Raises OSError."""
    handle = os.open(path, _FOLDER | (0 if links else os.O_NOFOLLOW), dir_fd=dir_fd)
    try:
        yield handle
    finally:
        os.close(handle)


def make_private_folder(path: str, dir_fd: int | None = None) -> None:
    """Create a folder that is not accessible to other users; an existing one must meet that condition. Raises OSError,
    UntrustedFileError."""
    try:
        os.mkdir(path, 0o700, dir_fd=dir_fd)
    except FileExistsError:
        with private_folder(path, dir_fd):
            pass


def open_file(name: str, dir_fd: int | None, flags: int, mode: int = 0o600) -> int:
    """Open a plain file in a folder. It must have no other hard link. Raises OSError, UntrustedFileError."""
    handle = os.open(name, flags | _NO_LINK, mode, dir_fd=dir_fd)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise _refuse(name, "it is no plain file")
        if status.st_nlink > 1:
            raise _refuse(name, "it has another name elsewhere")
    except BaseException:
        os.close(handle)
        raise
    return handle


def read_file(name: str, dir_fd: int, start: int = 0) -> bytes:
    """Read a plain file from ``start`` on. Raises OSError, UntrustedFileError."""
    with open(open_file(name, dir_fd, os.O_RDONLY), "rb") as source:
        source.seek(start)
        return source.read()


def read_object(name: str, dir_fd: int) -> dict[str, Any] | None:
    """Read the JSON object in a plain file; None if there is no such file or it contains anything else. Raises OSError,
    UntrustedFileError."""
    try:
        found = json.loads(read_file(name, dir_fd))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def encoded(document: Any) -> bytes:
    """Encode a document as JSON."""
    return json.dumps(document, separators=(",", ":"), default=str).encode()


def replace_file(name: str, dir_fd: int | None, data: bytes, mode: int = 0o600) -> None:
    """Replace the file ``name`` as a whole, relative to ``dir_fd`` if given. Raises OSError; ``name`` is then unchanged."""
    temporary = f"{name}.{os.getpid()}.tmp"
    with suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=dir_fd)  # left by an earlier process with this id, or by another user
    try:
        with open(open_file(temporary, dir_fd, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
            out.write(data)
        os.replace(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=dir_fd)
        raise


def is_own(handle: int) -> bool:
    """Whether an open folder has the owner that a file created there by this process would have. That is this user, except on file
    systems that assign all files to one user (NFS with ``all_squash``, FUSE, vfat). There, a file is created to find out."""
    owner = os.fstat(handle).st_uid
    if owner == os.geteuid():
        return True
    probe = f".ddpdoctor-{os.urandom(8).hex()}.tmp"
    try:
        made = open_file(probe, handle, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except OSError:
        return False
    try:
        return os.fstat(made).st_uid == owner
    finally:
        os.close(made)
        os.unlink(probe, dir_fd=handle)


def is_own_folder(path: str) -> bool:
    """Whether the folder at ``path`` is this user's, as far as the file system distinguishes users, and not writable for all users.
    Raises OSError."""
    with folder(path, links=True) as handle:
        return is_own(handle) and not os.fstat(handle).st_mode & stat.S_IWOTH


def resolve_own_links(path: str | os.PathLike[str]) -> str:
    """Resolve all links in ``path``, including the last component, to an absolute path. Raises OSError if a link or pipe on the way
    belongs to another user, who may have placed it, e.g. in /tmp."""
    resolved, rest = os.sep, _parts(os.fspath(path))
    for _ in range(_MOST_PARTS):
        if not rest:
            return resolved
        resolved, rest = os.path.join(resolved, rest[0]), rest[1:]
        try:
            # A single open gives both kind and target; between two calls it could be replaced.
            handle = os.open(resolved, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            found = os.fstat(handle)
            if stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode):
                continue
            if found.st_uid not in (os.geteuid(), 0):
                raise OSError(errno.EPERM, f"{resolved} is a link or a pipe of another user")
            if stat.S_ISLNK(found.st_mode):
                target = os.path.join(os.path.dirname(resolved), os.readlink("", dir_fd=handle))
                resolved, rest = os.sep, [*_parts(target), *rest]
        finally:
            os.close(handle)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _parts(path: str) -> list[str]:
    return [part for part in os.path.normpath(path).split(os.sep) if part]


def lock_now(handle: int) -> bool:
    """Lock an open file. Returns False if another process holds the lock. Raises OSError. A record lock belongs to a process:
    unlike with flock(2), a forked child does not inherit it."""
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def lock_holder(name: str, dir_fd: int) -> int | None:
    """The process that holds the lock of a file in a folder, by its id in this pid namespace, 0 if it has none there. None if no
    process holds it, or there is no such file. Raises OSError.

    The lock is queried, not taken: two processes that try to take it would each look like the holder to the other. Must not be
    called by the holder, because closing the file would release the lock.
    """
    try:
        handle = open_file(name, dir_fd, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_, pid = _LOCK.unpack(fcntl.fcntl(handle, fcntl.F_GETLK, asked))
    finally:
        os.close(handle)
    return None if kind == fcntl.F_UNLCK else max(0, pid)


def unlock(handle: int) -> None:
    """Release the lock of an open file."""
    fcntl.lockf(handle, fcntl.LOCK_UN)


def file_identity(handle: int) -> tuple[int, int] | None:
    """The identity of the file of a descriptor, which may have been reused since; None if it is closed."""
    try:
        status = os.fstat(handle)
    except OSError as error:
        if error.errno is None:
            raise  # raised by a signal handler
        return None
    return status.st_dev, status.st_ino


def identity_of(name: str, dir_fd: int) -> tuple[int, int] | None:
    """The identity of the file with this name in a folder."""
    try:
        status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except OSError as error:
        if error.errno is None:
            raise  # raised by a signal handler
        return None
    return status.st_dev, status.st_ino
