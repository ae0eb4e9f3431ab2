"""Where traces lie: a path or a URL goes in, bytes come out.

A local file, a pipe or an object in a store is opened only if reading it comes to an end; it is decompressed piece by
piece, in a thread of its own, and never grows beyond what a trace can have. What is wrong with it is kept as words
for a note. Besides the bytes, only a file's name says something here: of which rank and host the trace may be.
"""

from .decompress import GZIP, LFS_POINTER, PIECE_BYTES, ZSTD, Source, prefetch
from .files import (
    MOST_RANKS,
    content_tag,
    expand_url,
    host_of_name,
    is_url,
    open_local,
    open_source,
    progress_to,
    rank_of_name,
    redact_url,
    report_progress,
)
