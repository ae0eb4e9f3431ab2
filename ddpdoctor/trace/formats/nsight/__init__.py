"""SQLite files that ``nsys export --type sqlite`` writes from a report of Nsight Systems.

A file has the events of all processes under one ``nsys``; each process that is a rank has an address, see :func:`parts`.
The schema differs between versions and the file is untrusted: ``database`` looks up tables and columns, reads plain tables
only, and treats missing ones as absent. ``identity`` finds the processes that are ranks, their rank, job and clock.
``build`` reads the events of device and host, ``nccl`` NCCL's own description of its calls; ``reader`` infers the steps and puts all
together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.deferred import deferred

from .recognise import file_of, parts, recognises

if TYPE_CHECKING:
    from .reader import read


# Every analysed file is tested with ``recognises``, so the rest of the reader is imported only if it is needed.
__getattr__ = deferred(__name__, {"reader": "read"})
