"""The SQLite file that ``nsys export --type sqlite`` makes of a report of Nsight Systems.

One file holds what all processes under one ``nsys`` did; each process that is a rank is a part of its own, with an address
that :func:`parts` gives. The schema differs from version to version and anybody may have written the file: tables and their
columns are looked up in it (``database``), only plain tables are read, and what is missing is absent. Which processes are
ranks (``processes``), of which rank, job and clock they are (``identity``), what the device did (``device``), the host
(``host``, ``ranges``), and NCCL's own description of its calls (``payloads``, ``nccl``) become the one table (``build``).
"""

from .address import file_of
from .processes import parts
from .read import read
from .recognise import recognises

__all__ = ["file_of", "parts", "read", "recognises"]
