"""The user's cache folder, used only where nobody else can have written: what is kept there is believed later."""

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
    """``$XDG_CACHE_HOME/ddpdoctor/<name>``, by default below ``~/.cache``. RuntimeError where there is no home folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ddpdoctor" / name


def is_own(folder: Path) -> bool:
    """Whether a folder of :func:`cache_folder`, and the one around it, are real folders of this user that nobody else may
    write to."""
    return all(_is_own(place, stat.S_ISDIR) for place in (folder.parent, folder))


def make_own(folder: Path) -> bool:
    """Makes a folder of :func:`cache_folder`; whether it then :func:`is_own`. In another user's home folder, where root may
    write, none is made: that user could not write to it."""
    around = folder.parent
    existing = next((place for place in (around, *around.parents) if place.exists()), around)
    if existing.stat().st_uid not in {0, os.geteuid()}:
        return False
    around.parent.mkdir(parents=True, exist_ok=True)
    for place in (around, folder):
        place.mkdir(mode=0o700, exist_ok=True)
    return is_own(folder)


def own_entries(folder: Path, suffix: str) -> list[Path]:
    """Files of a folder of :func:`cache_folder` that are entries, or what a killed process left of one; nothing else there is
    ddpdoctor's to remove. Raises OSError."""
    entry = re.compile(rf"[0-9a-f]{{40}}{re.escape(suffix)}|\.ddpdoctor-[0-9a-f]{{16}}\.new")
    return [file for file in folder.iterdir() if entry.fullmatch(file.name) and not file.is_dir()]


def keep_newest(folder: Path, suffix: str, *, most_bytes: float = inf, most: float = inf) -> None:
    """Removes those of :func:`own_entries` that were used longest ago until the rest is no more than this. Raises OSError."""
    entries = []
    for file in own_entries(folder, suffix):
        with contextlib.suppress(OSError):  # another process may be removing them too
            status = file.lstat()
            entries.append((status.st_mtime, status.st_size, file))
    left, left_bytes = len(entries), sum(size for _, size, _ in entries)
    for _, size, file in sorted(entries):
        if left <= most and left_bytes <= most_bytes:
            return
        file.unlink(missing_ok=True)
        left, left_bytes = left - 1, left_bytes - size


def open_own(file: Path) -> BinaryIO:
    """A file that this user wrote, and nobody else may; through no link. Raises OSError."""
    handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not _is_own(handle, stat.S_ISREG):
        os.close(handle)
        raise OSError(errno.EACCES, "somebody else may have written it", str(file))
    return os.fdopen(handle, "rb")


def _is_own(place: Path | int, is_of_kind: Callable[[int], bool]) -> bool:
    try:
        status = os.fstat(place) if isinstance(place, int) else place.lstat()
    except OSError:
        return False
    return (
        is_of_kind(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & _WRITABLE_BY_OTHERS
    )
