"""The user's cache folder. Its content is trusted, so it is used only if no other user can write to it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import BinaryIO

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folder(name: str) -> Path:
    """``$XDG_CACHE_HOME/ddpdoctor/<name>``, by default in ``~/.cache``. Raises RuntimeError if there is no home folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ddpdoctor" / name


def is_private(folder: Path) -> bool:
    """Whether a folder of :func:`cache_folder` and its parent are folders of this user, not links, that no other user can write to."""
    return all(_is_private_entry(place, stat.S_ISDIR) for place in (folder.parent, folder))


def make_private(folder: Path) -> bool:
    """Create a folder of :func:`cache_folder`. Returns whether it :func:`is_private`. As root, does nothing in another user's home
    folder, because that user could not write to the new folder."""
    around = folder.parent
    existing = next((place for place in (around, *around.parents) if place.exists()), around)
    if existing.stat().st_uid not in {0, os.geteuid()}:
        return False
    around.parent.mkdir(parents=True, exist_ok=True)
    for place in (around, folder):
        place.mkdir(mode=0o700, exist_ok=True)
    return is_private(folder)


def cache_entries(folder: Path, suffix: str) -> list[Path]:
    """Entries in a folder of :func:`cache_folder`, and temporary files left by killed processes. No other files may be removed. Raises
    OSError."""
    entry = re.compile(rf"[0-9a-f]{{40}}{re.escape(suffix)}|\.ddpdoctor-[0-9a-f]{{16}}\.new")
    return [file for file in folder.iterdir() if entry.fullmatch(file.name) and not file.is_dir()]


def keep_newest(folder: Path, suffix: str, *, max_bytes: float = inf, max_files: float = inf) -> None:
    """Remove the least recently used :func:`cache_entries` until at most ``max_files`` and ``max_bytes`` are left. Raises OSError."""
    entries = []
    for file in cache_entries(folder, suffix):
        with contextlib.suppress(OSError):  # another process may remove it at the same time
            status = file.lstat()
            entries.append((status.st_mtime, status.st_size, file))
    left, left_bytes = len(entries), sum(size for _, size, _ in entries)
    for _, size, file in sorted(entries):
        if left <= max_files and left_bytes <= max_bytes:
            return
        file.unlink(missing_ok=True)
        left, left_bytes = left - 1, left_bytes - size


def open_private(file: Path) -> BinaryIO:
    """Open a file of this user, not a link, that no other user can write to. Raises OSError."""
    handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not _is_private_entry(handle, stat.S_ISREG):
        os.close(handle)
        raise OSError(errno.EACCES, "another user may have written it", str(file))
    return os.fdopen(handle, "rb")


def _is_private_entry(place: Path | int, has_type: Callable[[int], bool]) -> bool:
    try:
        status = os.fstat(place) if isinstance(place, int) else place.lstat()
    except OSError:
        return False
    return (
        has_type(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & _WRITABLE_BY_OTHERS
    )
