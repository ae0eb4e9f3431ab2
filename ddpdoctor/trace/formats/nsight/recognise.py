"""Whether a file is an export of Nsight Systems, by its name and first bytes, and what of it is read.

Asked of every file that is analysed: what opens a database is imported where there is one.
"""

from __future__ import annotations

import os
import re
import stat

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace.formats import Candidate
from ddpdoctor.trace.sources import is_url, open_local

_PART = re.compile(r"(?P<file>.+)#process-(?P<number>\d{1,6})", re.DOTALL)
MAGIC = b"SQLite format 3\0"


def part_address(path: str, number: int, count: int) -> str:
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
        with open_local(path) as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


_SUFFIX = ".sqlite"
"""As ``nsys export`` names its files."""


def recognises(candidate: Candidate) -> bool:
    """See :class:`ddpdoctor.trace.formats.Format`.

    Many programs keep SQLite files: one that has not the usual name is looked into.
    """
    path, number = split(candidate.path)
    if number is not None:
        return is_sqlite(path)
    if not (candidate.head or b"").startswith(MAGIC):
        return False
    return path.endswith(_SUFFIX) or (is_sqlite(path) and is_export(path))


def is_export(path: str) -> bool:
    """Whether the SQLite file at ``path`` has a table of Nsight Systems."""
    from .database import EXPORT_TABLES, Database

    try:
        with Database(path) as database:
            return not EXPORT_TABLES.isdisjoint(database.tables)
    except UnusableInput:
        return False


def parts(candidate: Candidate) -> tuple[str, ...]:
    """An address for each rank in the file; () where it holds one, or is no file of Nsight Systems on this machine."""
    path = candidate.path
    if is_url(path) or not (candidate.head or b"").startswith(MAGIC):
        return ()
    from .database import DamagedError
    from .identity import ranks_in

    try:
        found = ranks_in(path)
    except (UnusableInput, DamagedError):  # its reader tells
        return ()
    return tuple(part_address(path, i, len(found)) for i in range(len(found))) if len(found) > 1 else ()
