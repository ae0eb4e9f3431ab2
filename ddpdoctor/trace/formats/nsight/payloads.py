"""The binary payloads that NCCL hangs on its NVTX ranges, by the schemas that the file itself describes.

They are in a file that was exported with ``--include-blobs``. A payload begins with a head of 32 bytes, which names its schema and its
size; the fields stand behind it where the schema's entries say. What does not fit together says nothing.
"""

from __future__ import annotations

import struct
from collections import defaultdict

from .database import Database

Fields = dict[str, int]
"""Label of an entry, as NCCL describes it, → value."""

RANKS, RANK, COMMUNICATOR, MESSAGE_BYTES = (
    "No. of ranks",
    "Rank",
    "NCCL communicator ID",
    "Message size [bytes]",
)
"""Labels of the entries that tell something here."""
_HEAD = struct.Struct("<IIIIQQ")
"""Domain, reserved, schema, reserved, size of the payload, size with this head."""
_FORMATS = {
    4: struct.Struct("<i"),
    5: struct.Struct("<I"),
    17: struct.Struct("<q"),
    18: struct.Struct("<Q"),
    22: struct.Struct("<Q"),
}
"""Whole numbers by NVTX's type: int and its unsigned one, those of 64 bits, and size_t (nvToolsExtPayload.h)."""
_LONGEST_BYTES = 1 << 12


class Payloads:
    """Decodes what the ranges of one file carry."""

    def __init__(self, database: Database) -> None:
        self._fields: dict[int, list[tuple[str, struct.Struct, int]]] = defaultdict(list)
        listed = database.small("NVTX_PAYLOAD_SCHEMA_ENTRIES", "schemaId", "type", "name", "offset")
        for schema, kind, name, offset in dict.fromkeys(listed):
            at = 0 if offset is None else offset
            known = isinstance(name, str) and isinstance(schema, int) and isinstance(kind, int)
            if known and kind in _FORMATS and isinstance(at, int) and 0 <= at < _LONGEST_BYTES:
                self._fields[schema].append((name, _FORMATS[kind], at))

    def of(self, data: bytes | None) -> Fields:
        """What a range's payload holds; {} without one, or where it is none that the file describes."""
        if data is None or not _HEAD.size <= len(data) <= _LONGEST_BYTES:
            return {}
        _, _, schema, _, size, whole = _HEAD.unpack_from(data)
        if whole != len(data) or size != len(data) - _HEAD.size:
            return {}
        return {
            name: kind.unpack_from(data, _HEAD.size + at)[0]
            for name, kind, at in self._fields.get(schema, ())
            if at + kind.size <= size
        }
