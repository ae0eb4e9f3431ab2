"""The common table of all formats: one rank's profiler events as columns (:class:`RankTrace`), in memory and as a file.

Rows are events sorted by time; names are interned. ``measure`` selects events by masks over names and categories. A
``.columns`` file (the cache, and the output of ``ddpdoctor digest``) is checked column by column when it is read, because
it may come from an untrusted source.
"""

from .archive import (
    NUMBERS_OF_DEVICES,
    SCHEMA,
    SUFFIX,
    is_archive,
    read_archive,
    relocated,
    write_archive,
)
from .table import (
    CUDA_CALLS,
    KNOWN_NAMES,
    LIMIT_NS,
    MAX_DURATION_NS,
    RUNTIME_CALLS,
    Collectives,
    ColumnParts,
    IdColumn,
    IntColumn,
    Interner,
    InternPool,
    RankTrace,
    TraceMeta,
    memoized,
    sorted_order,
)
