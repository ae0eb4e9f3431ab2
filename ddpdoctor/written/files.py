"""Single files, and how they are put in place: whole, and never over what is not ddpdoctor's own."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.rundir import is_recorded_file, is_run_directory, open_regular
from ddpdoctor.rundir.owned import resolve_own_links
from ddpdoctor.written.forms import Form

STDOUT = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
"""Paths that stand for this process's standard output."""
_OPEN_ALREADY = re.compile(r"/dev/(fd/\d+|stdin|stdout|stderr)|/proc/(self|\d+)/fd/\d+")
"""What a process has open, such as a shell's process substitution: it is written into, whatever it is."""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EMLINK, errno.EXDEV)
"""What file systems without hard links say."""

_TRIES = 20
"""Of putting a file in a place that others write at the same time."""

Identity = tuple[int, int, int, int]


def is_stdout(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` stands for standard output."""
    return os.fspath(path) in STDOUT


def check_file(path: str | os.PathLike[str], form: Form) -> None:
    """Raises DdpDoctorError if :func:`write_file` would refuse ``path``: also before long work."""
    if is_stdout(path):
        return
    with in_words(path):
        place = place_of(path)
        folder = place.parent
        if not folder.is_dir():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        if not _is_open_already(place) and not _is_special(place):
            _judged(place, path, form)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def write_file(path: str | os.PathLike[str], content: str | bytes, form: Form, mode: int = 0o666) -> None:
    """Write ``content`` (text as UTF-8) with the seal of ``form``: a reader of ``path`` sees the old file or the new one.

    ``-`` is standard output. Links of the user's own are followed, and stay; within a run directory, which may have been
    received, they are refused. A FIFO or a device is written into. ``mode`` is that of a new file, less the umask.

    Raises DdpDoctorError if the file cannot be written, or another one is there that is not empty and not of this form;
    BrokenPipeError if nobody reads standard output.
    """
    data = form.sealed(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
    if is_stdout(path):
        _write_stdout(data)
        return
    with in_words(path):
        place = place_of(path)
        if _is_open_already(place) or _is_special(place):
            with os.fdopen(_opened_special(place), "wb") as special:
                special.write(data)
        else:
            put(place, data, lambda: _judged(place, path, form), mode)


def replace_file(path: Path, write: Callable[[BinaryIO], object], mode: int = 0o600) -> None:
    """Let ``write`` fill a file beside ``path`` that then replaces it; folders are made. For folders that are ddpdoctor's own:
    nothing is asked about what is there. Raises OSError and what ``write`` raises; ``path`` then is as before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _beside(path, mode) as (fresh, stream):
        write(stream)
        stream.close()
        fresh.replace(path)


def write_once(path: Path, data: bytes, mode: int = 0o666) -> bool:
    """Write a file that is never replaced; False if one is there that holds ``data`` already. Raises OSError, and
    FileExistsError if another is there."""

    def judge() -> None:
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "another file of that name is there", str(path))

    try:
        put(path, data, judge, mode)
    except FileExistsError:
        with os.fdopen(open_regular(str(path)), "rb") as file:
            if file.read(len(data) + 1) == data:
                return False
        raise
    return True


def place_of(path: str | os.PathLike[str], noun: str = "file") -> Path:
    """Where ``path`` leads. Raises OSError; DdpDoctorError in a recording."""
    if _is_open_already(path):
        return Path(path)
    absolute = Path(os.path.abspath(path))  # noqa: PTH100 - links stay as they are
    run = _run_around(absolute)
    for inside in (absolute, *absolute.parents):
        if run is None or inside == run:
            break
        if inside.is_symlink():
            raise OSError(errno.ELOOP, f"{inside} is a link inside a run directory")
    place = Path(resolve_own_links(absolute))
    if _run_around(place) is not None and place.exists() and not (place.is_file() or place.is_dir()):
        raise OSError(errno.EINVAL, "it is a pipe or a device inside a run directory")
    if is_recorded_file(os.path.realpath(place)):
        raise DdpDoctorError(f"{os.fspath(path)} is in a recorded run: name another {noun}.")
    return place


def _run_around(path: Path) -> Path | None:
    """The run directory in which ``path`` lies; None if it lies in none."""
    return next((folder for folder in path.parents if is_run_directory(str(folder))), None)


def _is_open_already(path: str | os.PathLike[str]) -> bool:
    return _OPEN_ALREADY.fullmatch(os.fspath(path)) is not None


def _is_special(place: Path) -> bool:
    """Whether a pipe or a character device is there. Raises OSError for what is neither, nor a regular file."""
    try:
        mode = place.stat().st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if stat.S_ISREG(mode):
        return False
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        return True
    raise OSError(errno.EINVAL, "it is a disk or a socket")


def _opened_special(place: Path) -> int:
    """Raises OSError if it is another user's by now, who would get the report."""
    given = _is_open_already(place)
    handle = os.open(place, os.O_WRONLY | os.O_CLOEXEC | (0 if given else os.O_NOFOLLOW))
    found = os.fstat(handle)
    if not given and (found.st_uid not in (os.geteuid(), 0) or stat.S_ISREG(found.st_mode)):
        os.close(handle)
        raise OSError(errno.EPERM, f"{place} is a pipe of another user, or no pipe")
    return handle


def _judged(place: Path, shown: str | os.PathLike[str], form: Form) -> Identity | None:
    """Identity of the file at ``place``, None if there is none. Raises DdpDoctorError if it may not be replaced, OSError."""
    try:
        handle = open_regular(str(place))
    except FileNotFoundError:
        return None
    with os.fdopen(handle, "rb") as file:
        fault = form.fault(file)
        if fault is not None:
            raise DdpDoctorError(f"{os.fspath(shown)} {fault}: name another file.")
        return identity(os.fstat(file.fileno()))


def identity(status: os.stat_result) -> Identity:
    """What tells whether a file is still the one that was looked at."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def put(place: Path, data: bytes, judge: Callable[[], Identity | None], mode: int) -> None:
    """``data`` as the file ``place``, once ``judge`` says what may be replaced there: nothing that came or changed since."""
    with _beside(place, mode) as (fresh, stream):
        stream.write(data)
        stream.close()
        for _ in range(_TRIES):
            seen = judge()
            if _moved(fresh, place, seen):
                return
    raise OSError(errno.EBUSY, "something else writes the same file")


def _moved(fresh: Path, place: Path, seen: Identity | None) -> bool:
    if seen is None:
        try:
            place.hardlink_to(fresh)
            return True
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        if os.path.lexists(place):
            return False
    elif not os.path.lexists(place) or identity(place.lstat()) != seen:
        return False
    fresh.replace(place)
    return True


@contextlib.contextmanager
def _beside(place: Path, mode: int) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file in the folder of ``place``, and its stream; what is left of it goes."""
    fresh = place.parent / f".ddpdoctor-{os.urandom(8).hex()}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(fresh, flags, mode)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield fresh, stream
    finally:
        fresh.unlink(missing_ok=True)


def _write_stdout(data: bytes) -> None:
    if sys.stdout is None:
        raise DdpDoctorError("cannot write to standard output: it is closed")
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        raise DdpDoctorError(f"cannot write to standard output: {error}") from error


@contextlib.contextmanager
def in_words(path: str | os.PathLike[str]) -> Iterator[None]:
    """An OSError within becomes a DdpDoctorError that names ``path``."""
    try:
        yield
    except OSError as error:
        raise DdpDoctorError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from error
