"""The one table that every format becomes: a rank's profiler events as columns, in memory and as a file.

Arrays of numbers and interned names go in; a :class:`RankTrace` comes out, whose rows are events in the order of time.
All that is measured is asked of it, by masks over names and categories. It can be written (``.columns``: the cache,
and what ``ddpdoctor digest`` makes) and read back, where every column is checked: whoever wrote the file may have
written anything.
"""

from .archive import (
    LIMIT_NS,
    LONGEST_NS,
    NUMBERS_OF_DEVICES,
    SCHEMA,
    SUFFIX,
    is_archive,
    read_archive,
    relocated,
    write_archive,
)
from .table import (
    KNOWN_NAMES,
    Collectives,
    IdColumn,
    IntColumn,
    InternPool,
    RankTrace,
    TraceMeta,
    memoized,
    sorted_order,
)
