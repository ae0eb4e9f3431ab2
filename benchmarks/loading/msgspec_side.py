"""Decompress a trace and decode it at once with msgspec into typed events, without columns."""

from __future__ import annotations

import gc
import sys
import zlib
from pathlib import Path

import msgspec

from ddpdoctor.trace.formats.kineto.events import Event


class Document(msgspec.Struct):
    """A trace, its events alone."""

    traceEvents: list[Event]  # noqa: N815


if __name__ == "__main__":
    gc.disable()
    data = Path(sys.argv[1]).read_bytes()
    if data.startswith(b"\x1f\x8b"):
        data = zlib.decompress(data, wbits=31)
    print(len(msgspec.json.decode(data, type=Document).traceEvents))
