"""Reads the ``.columns`` files that ``ddpdoctor digest`` writes, recognised by their suffix.

The content is checked (:func:`ddpdoctor.trace.archive.read_archive`). Rank and host are those of the original trace, not
derived from the path of the copy.
"""

from __future__ import annotations

import io

from msgspec.structs import replace

from ddpdoctor.errors import UnusableInput
from ddpdoctor.rundir import reason_of
from ddpdoctor.trace.archive import is_archive, read_archive, relocated
from ddpdoctor.trace.columns import RankTrace
from ddpdoctor.trace.formats import Candidate
from ddpdoctor.trace.sources import open_source


def recognises(candidate: Candidate) -> bool:
    """See :class:`ddpdoctor.trace.formats.Format`."""
    return is_archive(candidate.path)


def read(path: str, rank: int | None) -> RankTrace:
    """See :class:`ddpdoctor.trace.formats.Format`."""
    try:
        with open_source(path) as stream:
            trace = read_archive(stream if stream.seekable() else io.BytesIO(stream.read()), path)
    except OSError as error:
        raise UnusableInput(f"{path} cannot be read: {reason_of(error).lower()}.") from None
    return replace(trace, meta=relocated(trace.meta, path, rank))
