"""Writes single files atomically, without replacing files that ddpdoctor did not write, and recognises ddpdoctor's own files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.rundir import is_hollow, is_recorded_file, is_run_directory, open_regular
from ddpdoctor.rundir.owned import resolve_own_links

STDOUT = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
"""Paths of the standard output of this process."""
_OPEN_DESCRIPTOR = re.compile(r"/dev/(fd/\d+|stdin|stdout|stderr)|/proc/(self|\d+)/fd/\d+")
"""Paths of open file descriptors, such as those of process substitution. They are written to without further checks."""
_NO_HARD_LINK_ERRORS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EMLINK, errno.EXDEV)
"""Errors of hard links on file systems that do not support them."""

_MAX_ATTEMPTS = 20
"""Maximum number of attempts to replace a file that other processes write at the same time."""

Identity = tuple[int, int, int, int]


def is_stdout(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is standard output."""
    return os.fspath(path) in STDOUT


def check_file(path: str | os.PathLike[str], form: Form) -> None:
    """Raise DdpDoctorError if :func:`write_file` would refuse ``path``. Call this before long work."""
    if is_stdout(path):
        return
    with as_user_errors(path):
        place = resolve_target(path)
        folder = place.parent
        if not folder.is_dir():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        if not _is_open_descriptor(place) and not _is_special(place):
            _check_replaceable(place, path, form)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def write_file(path: str | os.PathLike[str], content: str | bytes, form: Form, mode: int = 0o666) -> None:
    """Write ``content`` (text as UTF-8) with the seal of ``form`` atomically: readers get the old file or the new one.

    ``-`` is standard output. Links are followed and kept, but refused inside a run directory, which may come from another machine.
    ``path`` may be a FIFO or a character device. ``mode``: permissions of a new file, before the umask.

    Raises DdpDoctorError if the file cannot be written, or if there is a non-empty file that is not of this form. Raises
    BrokenPipeError if standard output has no reader.
    """
    data = form.sealed(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
    if is_stdout(path):
        _write_stdout(data)
        return
    with as_user_errors(path):
        place = resolve_target(path)
        if _is_open_descriptor(place) or _is_special(place):
            with os.fdopen(_open_special(place), "wb") as special:
                special.write(data)
        else:
            write_checked(place, data, lambda: _check_replaceable(place, path, form), mode)


def replace_file(path: Path, write: Callable[[BinaryIO], object], mode: int = 0o600) -> None:
    """Replace ``path`` atomically by a file that ``write`` fills, and create missing folders. The existing file is not checked, so use
    this only in ddpdoctor's own folders. Raises OSError and the errors of ``write``; ``path`` is then unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _temporary_file(path, mode) as (fresh, stream):
        write(stream)
        stream.close()
        fresh.replace(path)


def write_once(path: Path, data: bytes) -> bool:
    """Write ``path`` if it does not exist. Returns False if it already has the content ``data``. Raises FileExistsError if it has other
    content, and other OSErrors."""

    def check() -> None:
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "another file of that name is there", str(path))

    try:
        write_checked(path, data, check, 0o666)
    except FileExistsError:
        with os.fdopen(open_regular(str(path)), "rb") as file:
            if file.read(len(data) + 1) == data:
                return False
        raise
    return True


def resolve_target(path: str | os.PathLike[str], noun: str = "file") -> Path:
    """``path`` with links resolved. Raises OSError if it must not be written to, DdpDoctorError if it is part of a recording."""
    if _is_open_descriptor(path):
        return Path(path)
    absolute = Path(os.path.abspath(path))  # noqa: PTH100 - links stay as they are
    run = _run_containing(absolute)
    for inside in (absolute, *absolute.parents):
        if run is None or inside == run:
            break
        if inside.is_symlink():
            raise OSError(errno.ELOOP, f"{inside} is a link inside a run directory")
    place = Path(resolve_own_links(absolute))
    if _run_containing(place) is not None and place.exists() and not (place.is_file() or place.is_dir()):
        raise OSError(errno.EINVAL, "it is a pipe or a device inside a run directory")
    if is_recorded_file(os.path.realpath(place)):
        raise DdpDoctorError(f"{os.fspath(path)} is in a recorded run: name another {noun}.")
    return place


def _run_containing(path: Path) -> Path | None:
    """The run directory that contains ``path``; None if there is none."""
    return next((folder for folder in path.parents if is_run_directory(str(folder))), None)


def _is_open_descriptor(path: str | os.PathLike[str]) -> bool:
    return _OPEN_DESCRIPTOR.fullmatch(os.fspath(path)) is not None


def _is_special(place: Path) -> bool:
    """Whether ``place`` is a FIFO or character device. Raises OSError if it exists and is neither that nor a regular file."""
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


def _open_special(place: Path) -> int:
    """Open a FIFO or device for writing. Raises OSError if it belongs to another user, who could read the report."""
    is_descriptor = _is_open_descriptor(place)
    handle = os.open(place, os.O_WRONLY | os.O_CLOEXEC | (0 if is_descriptor else os.O_NOFOLLOW))
    found = os.fstat(handle)
    if not is_descriptor and (found.st_uid not in (os.geteuid(), 0) or stat.S_ISREG(found.st_mode)):
        os.close(handle)
        raise OSError(errno.EPERM, f"{place} is a pipe of another user, or no pipe")
    return handle


def _check_replaceable(place: Path, shown: str | os.PathLike[str], form: Form) -> Identity | None:
    """Identity of the file at ``place``; None if there is none. Raises DdpDoctorError if it must not be replaced, and OSError."""
    try:
        handle = open_regular(str(place))
    except FileNotFoundError:
        return None
    with os.fdopen(handle, "rb") as file:
        why_not_replaceable = form.why_not_replaceable(file)
        if why_not_replaceable is not None:
            raise DdpDoctorError(f"{os.fspath(shown)} {why_not_replaceable}: name another file.")
        return identity(os.fstat(file.fileno()))


def identity(status: os.stat_result) -> Identity:
    """Device, inode, size and modification time, by which changes of a file are detected."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def write_checked(place: Path, data: bytes, check: Callable[[], Identity | None], mode: int) -> None:
    """Write ``data`` to ``place``. ``check`` returns the identity of the existing file, or raises if it must not be replaced. It is
    called again if the file appears or changes meanwhile. Raises OSError after :data:`_MAX_ATTEMPTS` attempts."""
    with _temporary_file(place, mode) as (fresh, stream):
        stream.write(data)
        stream.close()
        for _ in range(_MAX_ATTEMPTS):
            seen = check()
            if _move_into_place(fresh, place, seen):
                return
    raise OSError(errno.EBUSY, "something else writes the same file")


def _move_into_place(fresh: Path, place: Path, seen: Identity | None) -> bool:
    if seen is None:
        try:
            place.hardlink_to(fresh)
            return True
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_HARD_LINK_ERRORS:
                raise
        if os.path.lexists(place):
            return False
    elif not os.path.lexists(place) or identity(place.lstat()) != seen:
        return False
    fresh.replace(place)
    return True


@contextlib.contextmanager
def _temporary_file(place: Path, mode: int) -> Iterator[tuple[Path, BinaryIO]]:
    """Context with a temporary file in the folder of ``place`` and its stream. The file is removed at the end unless it was renamed."""
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
def as_user_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Context that converts an OSError into a DdpDoctorError that names ``path``."""
    try:
        yield
    except OSError as error:
        raise DdpDoctorError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from error


_HEAD_BYTES, _SEAL_BYTES = 4096, 200
_BLOCK_BYTES = 1 << 20
_SEAL = re.compile(rb"(?s).*\n[^\n]{0,8}ddpdoctor ([a-z-]{1,20}) sha256:([0-9a-f]{64})[^\n]{0,8}\n")


@dataclass(frozen=True)
class Form:
    """A kind of file that ddpdoctor writes. ``words``: its name in messages. Files are recognised by their beginning ``head``, or
    without it by a seal, which is enclosed in the two parts of ``comment``."""

    words: str
    kind: str = ""
    comment: tuple[bytes, bytes] = (b"<!-- ", b" -->")
    head: re.Pattern[bytes] | None = None

    def sealed(self, data: bytes) -> bytes:
        """``data`` with its seal, if this form has one."""
        return data if self.head is not None else data + self.seal_of(data)

    def seal_of(self, data: bytes) -> bytes:
        """The last line of a file with the content ``data``."""
        return self._seal(hashlib.sha256(data).hexdigest().encode())

    @property
    def seal_bytes(self) -> int:
        """Length of a seal, bytes."""
        return len(self._seal(b"0" * 64))

    def why_not_replaceable(self, file: BinaryIO) -> str | None:
        """Why ``file``, open at its beginning, must not be replaced; None if it is unchanged since ddpdoctor wrote it, or empty."""
        other = f"is not {self.words} that ddpdoctor wrote"
        if self.head is not None:
            head = file.read(_HEAD_BYTES)
            return None if not head or self.head.match(_unpacked(head)) else other
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _SEAL_BYTES))
        found = _SEAL.fullmatch(file.read(_SEAL_BYTES))
        if found is None or found[1] != self.kind.encode():
            return None if size == 0 else other
        file.seek(0)
        whole = hash_of(file, size - self.seal_bytes)
        return None if whole == found[2].decode() else "was changed after ddpdoctor wrote it"

    def _seal(self, digest: bytes) -> bytes:
        begin, end = self.comment
        return b"\n" + begin + b"ddpdoctor " + self.kind.encode() + b" sha256:" + digest + end + b"\n"


def _json_head(schema: str) -> re.Pattern[bytes]:
    return re.compile(rb'\s*\{\s*"schema":\s*"ddpdoctor\.' + schema.encode() + rb'/\d+"')


REPORT = Form("an HTML report", "report")
MARKDOWN = Form("a Markdown summary", "markdown")
JUNIT = Form("a JUnit file", "junit")
COMPARISON_PAGE = Form("an HTML comparison", "comparison")
HISTORY_PAGE = Form("an HTML history", "history")
PATCH = Form("a patch", "patch", (b"# ", b""))
BUNDLE = Form("a bundle", "bundle", (b"# ", b""))
DIAGNOSIS = Form("a diagnosis", head=_json_head("diagnosis"))
COMPARISON = Form("a comparison", head=_json_head("comparison"))
HISTORY = Form("a history", head=_json_head("history"))
TRIALS = Form("an answer of `try`", head=_json_head("trials"))
DOCTOR = Form("an answer of `doctor`", head=_json_head("doctor"))
SARIF = Form(
    "a SARIF log",
    head=re.compile(rb'\s*\{\s*"\$schema":[^,]*,\s*"version":[^,]*,\s*"runs":[\s\[{]*"tool":[\s{]*"driver":[\s{]*"name":\s*"ddpdoctor"'),
)  # fmt: skip
TIMELINE = Form(
    "a timeline", head=re.compile(rb'\{"displayTimeUnit":"ms","otherData":\{"producer":"ddpdoctor"')
)
EVENTS = Form("an event file of TensorBoard", head=re.compile(rb"(?s).{8,60}brain\.Event:\d"))


def hash_of(file: BinaryIO, size: int | None = None) -> str:
    """SHA-256 of the next ``size`` bytes of ``file``, None: of all. "" for a sparse file, which ddpdoctor never writes."""
    if is_hollow(os.fstat(file.fileno())):
        return ""
    whole, left = hashlib.sha256(), sys.maxsize if size is None else size
    while left > 0 and (block := file.read(min(_BLOCK_BYTES, left))):
        whole.update(block)
        left -= len(block)
    return whole.hexdigest()


def _unpacked(head: bytes) -> bytes:
    """``head``, decompressed if it is the beginning of a gzip file."""
    if not head.startswith(b"\x1f\x8b"):
        return head
    with contextlib.suppress(zlib.error):
        return zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES)
    return b""
