"""One file of columns → the columns."""

from __future__ import annotations

import io

from msgspec.structs import replace

from ddpdoctor.errors import UnusableInput
from ddpdoctor.rundir import reason_of
from ddpdoctor.trace.columns import RankTrace, is_archive, placed, read_archive
from ddpdoctor.trace.formats import Candidate
from ddpdoctor.trace.sources import open_place


def recognises(candidate: Candidate) -> bool:
    """See :class:`ddpdoctor.trace.formats.Format`."""
    return is_archive(candidate.path)


def read(path: str, rank: int | None) -> RankTrace:
    """See :class:`ddpdoctor.trace.formats.Format`."""
    try:
        with open_place(path) as stream:
            trace = read_archive(stream if stream.seekable() else io.BytesIO(stream.read()), path)
    except OSError as error:
        raise UnusableInput(f"{path} cannot be read: {reason_of(error).lower()}.") from None
    return replace(trace, meta=placed(trace.meta, path, rank))
