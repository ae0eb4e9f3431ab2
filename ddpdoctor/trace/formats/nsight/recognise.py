"""Whether a file is an export of Nsight Systems, by its name and first bytes, and what of it is read.

Asked of every file that is analysed: what opens a database is imported where there is one.
"""

from __future__ import annotations

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace.formats import Candidate
from ddpdoctor.trace.sources import is_url

from .address import MAGIC, address, is_sqlite, split

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
    from .database import Database
    from .tables import OF_EXPORTS

    try:
        with Database(path) as database:
            return not OF_EXPORTS.isdisjoint(database.tables)
    except UnusableInput:
        return False


def parts(candidate: Candidate) -> tuple[str, ...]:
    """An address for each rank in the file; () where it holds one, or is no file of Nsight Systems on this machine."""
    path = candidate.path
    if is_url(path) or not (candidate.head or b"").startswith(MAGIC):
        return ()
    from .database import DamagedError
    from .processes import ranks_in

    try:
        found = ranks_in(path)
    except (UnusableInput, DamagedError):  # its reader tells
        return ()
    return tuple(address(path, i, len(found)) for i in range(len(found))) if len(found) > 1 else ()
