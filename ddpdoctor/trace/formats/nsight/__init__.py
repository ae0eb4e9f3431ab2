"""The SQLite file that ``nsys export --type sqlite`` makes of a report of Nsight Systems.

One file holds what all processes under one ``nsys`` did; each process that is a rank is a part of its own, with an address
that :func:`parts` gives. The schema differs from version to version and anybody may have written the file: tables and their
columns are looked up in it (``database``), only plain tables are read, and what is missing is absent. Which processes are
ranks, and of which rank, job and clock (``identity``), NCCL's own description of its calls (``nccl``), and what device and host did
become the one table (``build``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.deferred import deferred

from .recognise import file_of, parts, recognises

if TYPE_CHECKING:
    from .reader import read


# Whatever file is analysed, this door is asked whether it is one of these; few are.
__getattr__ = deferred(__name__, {"reader": "read"})
