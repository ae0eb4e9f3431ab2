"""Opens and decompresses traces: a path or URL goes in, bytes come out.

Only regular files, FIFOs with a writer, and objects at URLs are opened. They are decompressed in pieces by a separate
thread, up to a bounded ratio. A read error ends the stream and is kept as text for a note. Also derives rank and host from
file names.
"""

from .decompress import GZIP, LFS_POINTER, PIECE_BYTES, ZSTD, Source, prefetch
from .files import (
    MAX_RANKS,
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
