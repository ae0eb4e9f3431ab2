"""Reads SQLite files that ``nsys export --type sqlite`` writes from a report of Nsight Systems.

A file has the events of all processes started by one ``nsys``. Each process that is a rank has an address, see :func:`parts`.
The schema differs between versions and the file is untrusted: ``database`` looks up tables and columns, reads only plain tables, and
allows for missing ones. ``identity`` finds the processes that are ranks, with rank, world size, host and clock. ``build`` reads the events
of device and host. ``nccl`` reads NCCL's description of its calls. ``reader`` calls these, and infers the steps.
"""

from __future__ import annotations

from ddpdoctor.trace.columns import RankTrace

from .recognise import file_of, parts, recognises


def read(path: str, rank: int | None) -> RankTrace:
    """See :class:`ddpdoctor.trace.formats.Format`."""
    # Every analysed file is tested with ``recognises``, so the rest of the reader is imported only if it is needed.
    from .reader import read as read_export

    return read_export(path, rank)
