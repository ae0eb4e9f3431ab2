"""Output files are replaced as a whole: written beside, then renamed. What is no regular file is written into."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
from pathlib import Path

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.rundir import is_run_directory
from ddpdoctor.rundir.owned import behind_links

STDOUT = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
"""Paths that stand for this process's standard output."""


_OWN_FILES = ("/dev/fd/", "/dev/std", "/proc/")
"""What a process has open already lies here."""


def is_stdout(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` stands for standard output."""
    return os.fspath(path) in STDOUT


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write ``content`` (text as UTF-8): a reader of ``path`` sees the old file or the new one, never a half.

    ``-`` is standard output. Links of one's own are followed, and stay. What exists and is no regular file, such as a FIFO
    or a device, is written into: nothing is put in its place. But within a run directory, which may have been received,
    nothing leads out of it: a link or a FIFO in the file's place is replaced.

    Raises DdpDoctorError where the file cannot be written, BrokenPipeError where nobody reads standard output.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    if is_stdout(path):
        _write_stdout(data)
        return
    try:
        inside = _run_around(path)
        if inside is not None:
            _replace(_without_links(_absolute(path), inside), data)
            return
        place = os.fspath(path) if os.fspath(path).startswith(_OWN_FILES) else behind_links(_absolute(path))
        if _is_special(place):
            with os.fdopen(_opened_special(place), "wb") as special:
                special.write(data)
        else:
            # What has the name by now is replaced, whatever it is, and never written through.
            _replace(Path(place), data)
    except OSError as error:
        raise DdpDoctorError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from error


def _run_around(path: str | os.PathLike[str]) -> Path | None:
    """The run directory in which ``path`` lies; None where it lies in none."""
    return next((folder for folder in _absolute(path).parents if is_run_directory(str(folder))), None)


def _absolute(path: str | os.PathLike[str]) -> Path:
    """Whole and without dots; links stay as they are."""
    return Path(os.path.abspath(path))  # noqa: PTH100


def _without_links(path: Path, run: Path) -> Path:
    """``path``, where no folder between the run directory and it is a link. Raises OSError."""
    for folder in path.parents:
        if folder == run:
            break
        if folder.is_symlink():
            raise OSError(errno.ELOOP, f"{folder} is a link inside a run directory")
    return path


def _opened_special(place: str) -> int:
    """Raises OSError where it is another user's by now, who would get the report."""
    own = 0 if place.startswith(_OWN_FILES) else os.O_NOFOLLOW
    handle = os.open(place, os.O_WRONLY | os.O_CLOEXEC | own)
    if own and os.fstat(handle).st_uid not in (os.geteuid(), 0):
        os.close(handle)
        raise OSError(errno.EPERM, f"{place} is a pipe of another user")
    return handle


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


def _is_special(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` exists and is no regular file, or is one that a process has open already. Raises OSError."""
    if os.fspath(path).startswith(_OWN_FILES):
        return True
    try:
        os.stat(path)  # noqa: PTH116
    except FileNotFoundError:
        return False
    return not Path(path).is_file()


def _replace(target: Path, data: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:80]}.", suffix=".new")
    fresh = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        # mkstemp gives 0600; a report is meant to be passed on, so it gets what the umask would have given.
        umask = os.umask(0)
        os.umask(umask)
        fresh.chmod(0o666 & ~umask)
        fresh.replace(target)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
