"""The same columns at another place: what was told by a file's place is told anew."""

from __future__ import annotations

from msgspec.structs import replace

from ddpdoctor.trace.sources import host_of_name, rank_of_name

from .archive import is_archive
from .table import TraceMeta


def placed(meta: TraceMeta, path: str, rank: int | None) -> TraceMeta:
    """``meta`` of the same content at another place, read as ``rank`` if given.

    Rank and host that came from the trace's place are told anew, but not those of a file of columns: it keeps what was told
    where the trace lay.
    """
    number, origin, host = meta.rank, meta.rank_from, meta.host
    if rank is not None:
        number, origin = rank, "run directory"
    elif not is_archive(path) and origin != "distributedInfo":
        number = rank_of_name(path)
        origin = "" if number is None else "file name"
    if not is_archive(path) and host == host_of_name(meta.source):
        host = host_of_name(path)
    notes = tuple(
        path + note[len(meta.source) :] if note.startswith(meta.source) else note for note in meta.notes
    )
    return replace(meta, source=path, rank=number, rank_from=origin, host=host, notes=notes)
