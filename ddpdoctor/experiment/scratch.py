"""A trial's scratch folder, with a copy of the working directory. It is removed after the trial or, if ddpdoctor was killed, by the next
trial."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddpdoctor.rundir import is_run_directory, open_regular

_PREFIX, _LOCK = "ddpdoctor-trial-", "lock"
_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")
_MARK = b"ddpdoctor.trial/1\n"
"""Content of the lock file; folders without it are never removed."""


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder, locked while this process uses it. Raises OSError."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        unlocked = folder / f"{_LOCK}.new"
        with unlocked.open("xb") as lock:
            lock.write(_MARK)
            lock.flush()
            with contextlib.suppress(
                OSError
            ):  # a file system without locks: the next trial does not remove the folder
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                unlocked.rename(folder / _LOCK)
            yield folder


def _remove_abandoned(place: Path) -> None:
    """Remove scratch folders of this user whose process has ended: they may contain copies of a working directory."""
    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            own = (
                stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
            )
            if not own or _NAME.fullmatch(folder.name) is None:
                continue
            with os.fdopen(open_regular(str(folder / _LOCK)), "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if lock.read(len(_MARK) + 1) == _MARK:
                    shutil.rmtree(folder, ignore_errors=True)


MOST_BYTES, MOST_FILES = 4 << 30, 100_000
"""Limits of a copy. Each trial makes one: code is small, and datasets are better linked than copied."""
_FREE_SHARE = 0.5
"""Limit of a copy's share of the free space. The job needs space, too."""
_RUN, _SPECIAL, _UNREADABLE = "recorded run", "pipe, socket or device", "entry that may not be read"
_PLURAL = {
    _RUN: "recorded runs",
    _SPECIAL: "pipes, sockets or devices",
    _UNREADABLE: "entries that may not be read",
}


def copy_folder(source: Path, target: Path, excluded: Path) -> str:
    """Copy ``source`` to ``target``, without the folder ``excluded``. Returns sentences on files left out and on links out of it, or "".

    Raises OSError, and copies nothing, if the copy would exceed :data:`MOST_BYTES`, :data:`MOST_FILES` or half of the free space.
    """
    _check_size(source, os.path.realpath(excluded), target)
    left: Counter[str] = Counter()
    links = list[Path]()

    def is_left_out(path: Path) -> bool:
        kind = _kind(path)
        if kind is not None:
            left[kind] += 1
        elif path.is_symlink():
            links.append(path)
        return kind is not None or path.is_symlink() or os.path.realpath(path) == own

    def leave(folder: str, names: Sequence[str]) -> list[str]:
        return [name for name in names if is_left_out(Path(folder, name))]

    def copy(file: str, to: str) -> None:
        try:
            shutil.copy2(file, to)
        except PermissionError:
            left[_UNREADABLE] += 1
        except FileNotFoundError:  # the file was removed during the copy
            if os.path.lexists(file):
                raise

    own = os.path.realpath(excluded)
    try:
        shutil.copytree(source, target, ignore=leave, copy_function=copy)
    except shutil.Error as error:
        raise OSError(str(error.args[0][0][2])) from None
    out = sum(_copy_link(path, source, target) for path in links)
    kinds = [f"{count} {kind if count == 1 else _PLURAL[kind]}" for kind, count in left.items()]
    lacks = [f"The copy of the working directory lacks {' and '.join(kinds)}."] if kinds else []
    lead = "1 link leads" if out == 1 else f"{out} links lead"
    leads_out = [f"{lead} out of the copy: what the job writes there is not in a copy."] if out else []
    return " ".join([*lacks, *leads_out])


def _check_size(source: Path, excluded: str, target: Path) -> None:
    disk = os.statvfs(next(folder for folder in target.parents if folder.exists()))
    most_bytes = min(MOST_BYTES, int(disk.f_bavail * disk.f_frsize * _FREE_SHARE))
    sizes, files = 0, 0
    for size in _sizes(source, excluded):
        sizes, files = sizes + size, files + 1
        if sizes > most_bytes or files > MOST_FILES:
            why = (
                f"more than {MOST_FILES:,} files"
                if files > MOST_FILES
                else f"more than {most_bytes / 1e9:.1f} GB"
            )
            raise OSError(
                errno.EFBIG,
                f"{source} holds {why}, which is too much for a copy for each trial. Start ddpdoctor in a folder with the code "
                "only, with links to the data, or try without --cwd copy",
            )


def _sizes(folder: Path, excluded: str) -> Iterator[int]:
    """Size of each file to be copied, in bytes."""
    for parent, folders, files in os.walk(folder):
        inside = [Path(parent, name) for name in folders]
        folders[:] = [
            path.name
            for path in inside
            if not path.is_symlink() and _kind(path) is None and os.path.realpath(path) != excluded
        ]
        for name in files:
            with contextlib.suppress(OSError):
                status = Path(parent, name).lstat()
                yield status.st_size if stat.S_ISREG(status.st_mode) else 0


def _copy_link(path: Path, source: Path, target: Path) -> bool:
    """Copy the link ``path``; a link within ``source`` then points into the copy. Returns whether it points to a writable target outside,
    other than an executable file."""
    root, leads_to = os.path.realpath(source), os.path.realpath(path)
    inside = os.path.commonpath([root, leads_to]) == root
    place = target / path.relative_to(source)
    place.symlink_to(target / os.path.relpath(leads_to, root) if inside else leads_to)
    runs = os.path.isfile(leads_to) and os.access(leads_to, os.X_OK)  # noqa: PTH113
    return not inside and not runs and os.access(leads_to, os.W_OK)


def _kind(path: Path) -> str | None:
    """Reason why a file is not copied (one of the kinds above); None if it is copied."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return _UNREADABLE
    if stat.S_ISDIR(mode):
        if not os.access(path, os.R_OK | os.X_OK):
            return _UNREADABLE
        return _RUN if is_run_directory(str(path)) else None
    return None if stat.S_ISREG(mode) or stat.S_ISLNK(mode) else _SPECIAL
