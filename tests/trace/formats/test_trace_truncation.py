"""A file that ends early gives all whole events before the break, a note, and never a traceback."""

import gzip
import json
import random

import pytest

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace import load_trace
from tests.trace.trace_files import document, events, is_cut, write

TEXT = json.dumps(document(events(150)), indent=1).encode()
HEAD = TEXT.index(b'"traceEvents": [') + len(b'"traceEvents": [')


def whole_events(text):
    """Complete events in a cut text, counted by an independent decoder."""
    decoder, count, at = json.JSONDecoder(), 0, HEAD
    text = text.decode("utf-8", "ignore")
    while True:
        while at < len(text) and text[at] in " \n,":
            at += 1
        try:
            found, at = decoder.raw_decode(text, at)
        except (json.JSONDecodeError, IndexError):
            return count
        count += found["ph"] == "X"


def load_cut(path, data):
    path.write_bytes(data)
    try:
        return load_trace(str(path))
    except UnusableInput as error:
        assert "\n" not in str(error) and str(path) in str(error)
        return None


@pytest.mark.extended
def test_plain_text_cut_anywhere(tmp_path):
    random.seed(1)
    end = TEXT.rindex(b"\n ],")
    cuts = (
        {random.randrange(len(TEXT)) for _ in range(120)}
        | set(range(HEAD - 30, HEAD + 260))
        | {end, end + 1, end + 2}
    )
    for cut in sorted(cuts):
        trace = load_cut(tmp_path / "cut.json", TEXT[:cut])
        expected = whole_events(TEXT[:cut]) if cut > HEAD else 0
        assert (trace.size if trace else 0) == expected, cut
        if trace:
            assert is_cut(trace) == (cut <= end + 2)
            assert trace.meta.rank == 0


def test_gzip_cut_at_random_places(tmp_path):
    random.seed(2)
    packed = gzip.compress(TEXT, 6, mtime=0)
    for cut in sorted(random.randrange(len(packed)) for _ in range(20)):
        readable = _readable(packed[:cut])
        trace = load_cut(tmp_path / "cut.json.gz", packed[:cut])
        assert (trace.size if trace else 0) == (whole_events(readable) if len(readable) > HEAD else 0)
        assert trace is None or is_cut(trace)


def _readable(packed):
    import zlib

    member = zlib.decompressobj(wbits=31)
    try:
        return member.decompress(packed) + member.flush()
    except zlib.error:
        return b""


def test_gzip_with_a_damaged_byte_keeps_what_came_before(tmp_path):
    packed = bytearray(gzip.compress(TEXT, 6, mtime=0))
    packed[len(packed) // 2] ^= 0xFF
    trace = load_cut(tmp_path / "damaged.json.gz", bytes(packed))
    assert trace is not None and trace.size > 50


def test_two_gzip_members_and_padding_are_one_file(tmp_path):
    half = len(TEXT) // 2
    packed = gzip.compress(TEXT[:half]) + gzip.compress(TEXT[half:]) + b"\0" * 512
    trace = load_cut(tmp_path / "a.json.gz", packed)
    assert trace.size == 450 and not is_cut(trace)


def test_a_lost_tail_costs_only_the_keys_in_it(tmp_path):
    document_text = json.dumps({"traceEvents": events(20), "distributedInfo": {"rank": 3}}).encode()
    path = write(tmp_path / "rank4.json", document_text[:-6])
    trace = load_trace(path)
    assert not is_cut(trace) and (trace.meta.rank, trace.meta.rank_from) == (4, "file name")


@pytest.mark.parametrize(
    ("where", "junk"),
    [
        (b"aten::op", b'}]{"""garbage[[['),
        (b"aten::op", b'", "'),
        (b'{"ph": "X", "cat"', b" ]xx[[ garbage "),
        (b'{"ph": "X", "cat"', b"{{{"),
        (b'{"ph": "X", "cat"', b"] x"),
    ],
)
def test_what_comes_after_junk_is_read_and_the_place_told(tmp_path, where, junk):
    text = json.dumps(document(events(150))).encode()
    middle = text.index(where, len(text) // 2)
    trace = load_cut(tmp_path / "junk.json", text[:middle] + junk + text[middle:])
    assert trace.size >= 447 and not is_cut(trace) and trace.meta.rank == 0
    assert any("damaged in one" in note or "malformed" in note for note in trace.meta.notes), trace.meta.notes
    assert not any("ends before" in note for note in trace.meta.notes)


@pytest.mark.parametrize("junk", [b"\0" * 100, b"}" * 50, b'"' * 51, b"\\" * 9, b"[[[[", bytes(range(256))])
def test_junk_in_the_middle_is_never_a_traceback(tmp_path, junk):
    middle = TEXT.index(b"aten::op5") + 4
    trace = load_cut(tmp_path / "junk.json", TEXT[:middle] + junk + TEXT[middle:])
    assert trace is not None and trace.size >= 5
