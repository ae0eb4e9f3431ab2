"""How a process in a file is named: ``report.sqlite#process-3`` is the fourth of its ranks."""

from __future__ import annotations

import os
import re
import stat

from ddpdoctor.trace.sources import open_binary

_PART = re.compile(r"(?P<file>.+)#process-(?P<number>\d{1,6})", re.DOTALL)
MAGIC = b"SQLite format 3\0"


def address(path: str, number: int, count: int) -> str:
    """Of the process with this number among so many in the file at ``path``; in the order of text they stand as numbered."""
    return f"{path}#process-{number:0{len(str(count - 1))}d}"


def split(path: str) -> tuple[str, int | None]:
    """(file, number of the process), None where the path names the file alone."""
    match = _PART.fullmatch(path)
    if match is None or is_sqlite(path):  # a file may be called anything
        return path, None
    return match["file"], int(match["number"])


def file_of(path: str) -> str:
    """The file in which the process that ``path`` names is; ``path`` where it names none."""
    return split(path)[0]


def is_sqlite(path: str) -> bool:
    """Whether there is a regular file that begins as those of SQLite."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116
            return False
        with open_binary(path) as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False
