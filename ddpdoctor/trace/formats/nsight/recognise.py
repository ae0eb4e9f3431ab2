"""Whether a file is an export of Nsight Systems, by its name and first bytes."""

from __future__ import annotations

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace.formats import Candidate

from .address import MAGIC, is_sqlite, split
from .database import Database
from .tables import OF_EXPORTS

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
    try:
        with Database(path) as database:
            return not OF_EXPORTS.isdisjoint(database.tables)
    except UnusableInput:
        return False
