"""Recognises exports of Nsight Systems by name and first bytes, and lists their ranks.

Every analysed file is tested, so the code that opens databases is imported only if needed.
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
    """Address of process ``number`` of ``count`` in the file at ``path``. The numbers are padded, so addresses sort by number."""
    return f"{path}#process-{number:0{len(str(count - 1))}d}"


def split(path: str) -> tuple[str, int | None]:
    """(File, number of the process or None) of a path that may be an address."""
    match = _PART.fullmatch(path)
    if match is None or is_sqlite(path):  # a file's name may look like an address
        return path, None
    return match["file"], int(match["number"])


def file_of(path: str) -> str:
    """The file of the address ``path``; ``path`` itself if it is not an address."""
    return split(path)[0]


def is_sqlite(path: str) -> bool:
    """Whether ``path`` is a regular file that begins with SQLite's magic bytes."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116
            return False
        with open_local(path) as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


_SUFFIX = ".sqlite"
"""Suffix of the files of ``nsys export``."""


def recognises(candidate: Candidate) -> bool:
    """See :class:`ddpdoctor.trace.formats.Format`.

    An SQLite file without the usual suffix is opened to check its tables, because many programs write SQLite.
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
    """Address of each rank in the file; () if it has one rank or is not a local export of Nsight Systems."""
    path = candidate.path
    if is_url(path) or not (candidate.head or b"").startswith(MAGIC):
        return ()
    from .database import DamagedError
    from .identity import ranks_in

    try:
        found = ranks_in(path)
    except (UnusableInput, DamagedError):  # the reader reports it
        return ()
    return tuple(part_address(path, i, len(found)) for i in range(len(found))) if len(found) > 1 else ()
