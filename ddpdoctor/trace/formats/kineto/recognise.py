"""Whether a file is a JSON trace, by the text it begins with: other JSON lies beside traces, too."""

from __future__ import annotations

import zlib
from pathlib import Path

from ddpdoctor.trace.formats import HEAD_BYTES, Candidate
from ddpdoctor.trace.sources import GZIP, LFS_POINTER, ZSTD

_OWN = b'"otherData":{"producer":"ddpdoctor"'
"""What ``ddpdoctor export`` writes into a timeline: no recording, though it looks like a trace."""
_KEYS = (b'"traceEvents"', b'"baseTimeNanoseconds"', b'"deviceProperties"', b'"distributedInfo"')
"""Keys of a whole trace, of which one stands in the first text of each."""
_FIRST_EVENT_BYTES = 4096
"""Within them stands a first event, or our own mark."""


def recognises(candidate: Candidate) -> bool:
    """See :class:`ddpdoctor.trace.formats.Format`.

    What cannot be looked into is told by its name alone, and so is a Git LFS pointer in a trace's place.
    """
    named = ".json" in Path(candidate.path).name.lower()
    head = candidate.head
    if head is None or head.startswith((LFS_POINTER, ZSTD)):
        return named
    if head.startswith(GZIP):
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, HEAD_BYTES)
        except zlib.error:
            return named
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text.startswith(b"["):
        return b'"ph"' in text[:_FIRST_EVENT_BYTES] or (named and not text[1:].strip(b" \t\r\n]"))
    if not text.startswith(b"{") or _OWN in text[:_FIRST_EVENT_BYTES]:
        return False
    is_cut = len(head) == HEAD_BYTES
    return any(key in text for key in _KEYS) or (is_cut and "trace" in candidate.path.lower())
