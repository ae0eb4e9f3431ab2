"""What a gzip file holds, whoever decompresses it: whole, cut off, damaged, of several members."""

from __future__ import annotations

import gzip
import json
import random
import zlib

import pytest

from ddpdoctor.trace.sources import Source
from tests.trace.trace_files import document, events

PIECES = "ddpdoctor.trace.sources"
TEXT = json.dumps(document(events(3000)), indent=1).encode()
PACKED = gzip.compress(TEXT, 6, mtime=0)


class OtherError(Exception):
    """No zlib.error."""


class Quick:
    """Decompresses as zlib does; it cannot be copied, and has errors of its own."""

    def __init__(self, wbits):
        self._member = zlib.decompressobj(wbits=wbits)

    def decompress(self, data, most):
        try:
            return self._member.decompress(data, most)
        except zlib.error as error:
            raise OtherError from error

    def __getattr__(self, name):
        if name not in ("eof", "unused_data", "unconsumed_tail"):
            raise AttributeError(name)
        return getattr(self._member, name)


def isal():
    return pytest.importorskip("isal.isal_zlib").decompressobj


def flipped(seed):
    data = bytearray(PACKED)
    data[random.Random(seed).randrange(20, len(data))] ^= 4
    return bytes(data)


FILES = {
    "whole": PACKED,
    "two members": PACKED + PACKED,
    "padded": PACKED + bytes(5000),
    "signed": PACKED + b"signature",
    "cut off": PACKED[: len(PACKED) // 2],
    "second one cut off": PACKED + PACKED[: len(PACKED) // 2],
    "without its checksum": PACKED[:-4],
    **{f"damaged {seed}": flipped(seed) for seed in range(8)},
}


@pytest.mark.parametrize(
    "quick",
    [pytest.param(lambda: Quick, id="another"), pytest.param(isal, id="isal", marks=pytest.mark.extended)],
)
@pytest.mark.parametrize("name", FILES)
def test_what_is_quicker_gives_what_zlib_gives(tmp_path, monkeypatch, name, quick):
    monkeypatch.setattr(f"{PIECES}._READ_BYTES", 1 << 12)
    monkeypatch.setattr(f"{PIECES}._UNLIMITED_BYTES", 0)
    (tmp_path / "t.json.gz").write_bytes(FILES[name])
    found = []
    for inflate in (None, quick()):
        monkeypatch.setattr(f"{PIECES}._isal_decompressor", lambda inflate=inflate: inflate)
        source = Source(str(tmp_path / "t.json.gz"))
        found.append((b"".join(source.pieces(1 << 14)), source.read_error))
    assert found[0] == found[1]
    assert found[1][0][:100] == TEXT[:100] and (found[1][1] is None) == (name in [*FILES][:4])
