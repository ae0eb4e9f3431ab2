"""What a file from somebody else may do to the reader: nothing but cost one sentence."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.trace import find_traces, load_trace
from ddpdoctor.trace.classify import step_number
from ddpdoctor.trace.formats.kineto.stream import repair_event, scan
from ddpdoctor.trace.processes import read_one
from ddpdoctor.trace.sources import PIECE_BYTES, Source
from tests.trace.trace_files import document, event, events, is_cut, kernel, write

pytestmark = pytest.mark.extended

HEAD = b'{"traceEvents":[{"ph":"X","cat":"cpu_op","name":"aten::add","pid":1,"tid":1,"ts":1.0,"dur":2.0},'
BLOCK_BYTES = 1 << 20

READ_WITH_LITTLE = """
import re, resource, sys
from pathlib import Path
from ddpdoctor.trace import load_trace
import polars
used = int(re.search(r"VmSize:[ \\t]+([0-9]+)", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + (500 << 20),) * 2)
trace = load_trace(sys.argv[1])
print(trace.size, *trace.meta.notes, sep="\\n")
"""


def bomb(path: Path, filling: bytes, blocks: int, begin: bytes = b"") -> str:
    """A trace of one sound event and ``blocks`` MiB of ``filling``, compressed."""
    with gzip.open(path, "wb", compresslevel=6) as out:
        out.write(HEAD + begin)
        for _ in range(blocks):
            out.write(filling * (BLOCK_BYTES // len(filling)))
    return str(path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "filling",
    [
        pytest.param(b"a", id="text"),
        pytest.param(b'\\"', id="escapes", marks=pytest.mark.extended),
        pytest.param(b"[", id="brackets", marks=pytest.mark.extended),
        pytest.param(b'{"ph":x},', id="malformed"),
    ],
)
def test_a_small_file_of_one_huge_event_takes_neither_all_memory_nor_all_time(tmp_path, filling):
    begin = b'{"ph":"X","name":"' if filling in (b"a", b'\\"') else b""
    path = bomb(tmp_path / "rank0.json.gz", filling, 70, begin)
    done = subprocess.run(
        [sys.executable, "-c", READ_WITH_LITTLE, path], capture_output=True, text=True, timeout=120
    )
    size, *notes = done.stdout.splitlines()
    assert (done.returncode, size) == (0, "1"), done.stderr
    assert all(note.startswith(path) for note in notes)
    whys = ("in one go that are no events", "in too many places", "200-fold")
    assert any(why in note for note in notes for why in whys)


def test_a_file_may_not_grow_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr("ddpdoctor.trace.sources._UNLIMITED_BYTES", BLOCK_BYTES)
    path = bomb(tmp_path / "rank0.json.gz", b'{"ph":"X","ts":1,"pad":"%s"},' % (b"a" * 1000), 30)
    trace = load_trace(path)
    assert 1 < trace.size < 20_000 and is_cut(trace)
    assert any(f"{path} is truncated: it is compressed more than 200-fold" in n for n in trace.meta.notes)


def test_zstd_is_handed_on_in_small_pieces(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    content = HEAD + b" " * (40 << 20) + b'{"ph":"X","ts":1}]}'
    (tmp_path / "t.json.zst").write_bytes(zstandard.ZstdCompressor().compress(content))
    read = Source(str(tmp_path / "t.json.zst"))
    pieces = list(read.pieces())
    assert b"".join(pieces) == content and read.read_error is None
    assert max(map(len, pieces)) <= PIECE_BYTES + 256 * (128 << 10) // 4


def test_many_members_and_frames_are_one_trace(tmp_path):
    text = json.dumps(document(events(300))).encode()
    parts = [text[i : i + 500] for i in range(0, len(text), 500)]
    zeros = b"\0" * 512
    (tmp_path / "a.json.gz").write_bytes(b"".join(gzip.compress(p) + zeros for p in [b"", *parts, b""]))
    write(tmp_path / "b.json", text)
    assert load_trace(str(tmp_path / "a.json.gz")).size == load_trace(str(tmp_path / "b.json")).size
    read = Source(str(tmp_path / "a.json.gz"))
    assert b"".join(read.pieces()) == text and read.read_error is None


@pytest.mark.parametrize("tail", [b"", b"{}]}"])
def test_a_sparse_file_is_not_read_to_its_end(tmp_path, tail):
    with (tmp_path / "rank0.json").open("wb") as out:
        out.write(HEAD + tail)
        out.truncate(1 << 42)
    assert load_trace(str(tmp_path / "rank0.json")).size == 1


def test_an_event_that_is_too_long_is_passed_over_and_the_next_ones_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("ddpdoctor.trace.formats.kineto.stream.MAX_EVENT_BYTES", 1 << 16)
    monkeypatch.setattr(Source.pieces, "__defaults__", (1 << 14,))
    long = event("aten::long", args="x" * (1 << 18))
    path = write(tmp_path / "t.json.gz", document([*events(200), long, *events(200)]))
    trace = load_trace(path)
    assert trace.size == 2 * 600 and "aten::long" not in trace.names
    assert any("1 event(s) longer than" in note for note in trace.meta.notes)


def test_an_event_with_a_long_stack_is_read(tmp_path):
    stack = ";".join(f"train.py({i}): function_{i}" for i in range(20_000))
    path = write(tmp_path / "t.json.gz", document([*events(5), event("aten::deep", **{"Call stack": stack})]))
    assert "aten::deep" in load_trace(path).names


def test_looking_for_the_end_of_an_event_is_linear():
    """Each took minutes or gigabytes where it looks twice at the same text."""
    for text in (b'"' + b'\\"' * (1 << 20), b"{" * (1 << 21), b"]" * (1 << 21), b'"' * (1 << 20)):
        assert scan(text).spans == []
        repair_event(text)
    assert step_number("step" + " " * 100_000 + "x") is None


ODD = ["NaN", "-1e18", "18446744073709551616", "1" + "0" * 400, "1e300", '"x"', "[]", '{"a":[1]}', "true"]
EVENT_FIELDS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args")


def odd_documents(odd: str):
    """A trace with ``odd`` in each field of some event, in each argument, and around the events."""
    steps = [event(f"ProfilerStep#{i}", 1_000_000 + 60 * i, 50, "user_annotation") for i in range(4)]
    base = [*events(10), *steps]
    for field in EVENT_FIELDS:
        yield document([*base, {**event("odd"), field: "@"}])
    arguments = ("External id", "correlation", "stream", "device", "bytes", "Input Dims", "Seq", "Group size")
    texts = ("Collective name", "Process Group Name", "dtype", "Src Rank")
    yield document([*base, kernel(**dict.fromkeys(arguments + texts, "@"))])
    yield document([*base, event("aten::mm", **{"Input Dims": "@"})])
    for field in ("rank", "world_size", "backend", "pg_config"):
        yield document(base, distributedInfo={"rank": 0, "world_size": 2, field: "@"})
    for field in ("baseTimeNanoseconds", "deviceProperties", "distributedInfo", "host_name"):
        yield document(base, **{field: "@"})
    yield document(base, deviceProperties=[{"name": "@", "computeMajor": "@", "computeMinor": "@"}])


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd[:12])
def test_whatever_a_field_holds_the_rest_is_analysed(tmp_path, odd):
    """Every third document through the whole analysis: with nine odd values, each field a few times."""
    good = write(tmp_path / "rank1.json", document(events(10), rank=1))
    for number, top in enumerate(odd_documents(odd)):
        path = write(tmp_path / f"odd{number}.json", json.dumps(top).replace('"@"', odd))
        trace, reason = read_one(path, 0, False)
        assert trace is not None, (reason, top)
        assert trace.size >= 30
        if (number + ODD.index(odd)) % 3 == 0:
            assert analyze([path, good], Options(cache=False, jobs=1, job=1)).steps is not None


def test_ranks_and_times_that_cannot_be_are_told(tmp_path):
    content = [*events(5), event("far", ts=9e15), event("long", dur=9e15)]
    job = {"rank": 10**12, "world_size": -(2**70)}
    path = write(tmp_path / "t.json", document(content, distributedInfo=job, baseTimeNanoseconds=2**62))
    meta = load_trace(path).meta
    assert (meta.rank, meta.world_size, meta.clock) == (None, None, "relative")
    assert [n for n in meta.notes if "is ignored" in n] == [
        f"{path}: its {key} cannot be {value} and is ignored."
        for key, value in (("baseTimeNanoseconds", 2**62), ("rank", 10**12), ("world_size", -(2**70)))
    ]
    assert any("1 event(s) without a usable time" in note for note in meta.notes)


def test_times_that_a_base_takes_out_of_range_are_left_out(tmp_path):
    metadata = {"Collective name": "allreduce", "Seq": 4}
    content = [event("far", ts=4e15, **metadata), *events(5), kernel("ncclDevKernel_x", 5, **metadata)]
    trace = load_trace(write(tmp_path / "t.json", document(content)))
    assert "far" not in {trace.name_of(row) for row in range(trace.size)}
    assert [trace.name_of(row) for row in trace.collectives.event] == ["ncclDevKernel_x"]


def test_too_many_categories_are_no_trace(tmp_path):
    content = [event(cat=f"c{i}") for i in range(10_001)]
    _, reason = read_one(write(tmp_path / "t.json", document(content)), None, False)
    assert "is not a profiler trace: it names more than 10000 categories" in reason and "\n" not in reason


def test_only_files_are_opened_and_a_fifo_waits_for_its_writer(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "rank0.json")
    (tmp_path / "rank1.json").mkdir()
    write(tmp_path / "rank2.json", document(events(5)))
    assert find_traces([str(tmp_path)]).files == (str(tmp_path / "rank2.json"),)
    for path, says in (("/dev/zero", "it is not a file"), (str(tmp_path / "rank1.json"), "is a directory")):
        assert says in read_one(path, None, False)[1]
    fifo = str(tmp_path / "rank0.json")
    content = (tmp_path / "rank2.json").read_bytes()
    writer = threading.Thread(target=lambda: Path(fifo).write_bytes(content))
    writer.start()
    assert load_trace(fifo).size == 15
    writer.join()
    monkeypatch.setattr("ddpdoctor.trace.sources._WRITER_TIMEOUT_S", 0.1)
    assert "no program wrote to this fifo" in read_one(fifo, None, False)[1].lower()


def test_too_much_text_around_the_events_is_told(tmp_path):
    padding = "x" * (9 * BLOCK_BYTES)
    whole = document(events(3))
    for place, text in (("before", {"pad": padding} | whole), ("behind", whole | {"pad": padding})):
        path = write(tmp_path / f"{place}.json", json.dumps(text))
        meta = load_trace(path).meta
        assert [note for note in meta.notes if f"{path} holds too much text {place} its events" in note]
