"""Files that call themselves exports of Nsight Systems, and were made by anybody: refused in a sentence, or read without what is odd."""

from __future__ import annotations

import os
import random
import sqlite3
import struct
import time
from pathlib import Path

import pytest

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace import find_traces, load_trace, load_traces
from ddpdoctor.trace.processes import read_one
from tests.trace.nsight_export import export
from tests.trace.trace_files import document, event, events, is_cut, kernel, write

pytestmark = pytest.mark.extended

KERNELS, RANGES, CALLS = "CUPTI_ACTIVITY_KIND_KERNEL", "NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_RUNTIME"


@pytest.fixture
def path(tmp_path):
    """A small sound export of one process."""
    trace = load_trace(write(tmp_path / "t.json", document(events(30))))
    return export(tmp_path / "rank0.sqlite", [trace])


def changed(path, *statements):
    with sqlite3.connect(path) as db:
        for statement in statements:
            db.execute(statement)
    db.close()
    return path


def count(trace, category):
    return int(trace.category_mask(category).sum())


def test_views_and_virtual_tables_are_not_read(path):
    """A view's text is a program; so is a virtual table's."""
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
    columns = "1 AS start, 2 AS end, 0 AS eventType, 'step 1' AS text, 1 AS globalTid, NULL AS textId"
    changed(
        path,
        f"ALTER TABLE {RANGES} RENAME TO other",
        f"CREATE VIEW {RANGES} AS {endless} SELECT {columns} FROM n",
        f"DROP TABLE {CALLS}",
        f"CREATE VIRTUAL TABLE {CALLS} USING fts5(start, end, globalTid, correlationId, nameId)",
    )
    trace = load_trace(path)
    assert count(trace, "kernel") == 30
    assert count(trace, "cpu_op") == count(trace, "cuda_runtime") == 0


def test_generated_columns_cost_their_table(path):
    changed(
        path,
        f"ALTER TABLE {RANGES} RENAME TO other",
        f"CREATE TABLE {RANGES} (start INT, end INT AS (hex(zeroblob(1000000000))), text TEXT, globalTid INT)",
    )
    assert count(load_trace(path), "cpu_op") == 0


def test_values_of_other_types_are_absent(path):
    changed(
        path,
        f"UPDATE {KERNELS} SET start = 'soon' WHERE rowid = 1",
        f"UPDATE {KERNELS} SET end = x'00ff' WHERE rowid = 2",
        f"UPDATE {KERNELS} SET start = 1.5 WHERE rowid = 3",
        f"UPDATE {KERNELS} SET start = -9223372036854775808 WHERE rowid = 4",
        f"UPDATE {KERNELS} SET end = 9223372036854775807 WHERE rowid = 5",
        f"UPDATE {KERNELS} SET end = start - 1 WHERE rowid = 6",
        f"UPDATE {KERNELS} SET deviceId = 'first', streamId = 99999999999, correlationId = -7 WHERE rowid = 7",
        f"UPDATE {KERNELS} SET demangledName = 'name', shortName = 4000000, mangledName = 'x' WHERE rowid = 8",
        f"UPDATE {RANGES} SET text = x'ff00fe' WHERE rowid = 1",
        f"UPDATE {RANGES} SET globalTid = 'main' WHERE rowid = 2",
    )
    trace = load_trace(path)
    assert count(trace, "kernel") == 24
    assert any("6 event(s) without a usable time" in note for note in trace.meta.notes)
    device = trace.category_mask("kernel")
    assert (trace.stream[device] == -1).sum() == (trace.device[device] == -1).sum() == 1
    assert "" in {trace.names[i] for i in trace.name[device]}
    assert count(trace, "cpu_op") == 28, "one without a text, and one of no thread of the process"


def test_names_of_tables_and_columns_are_taken_as_they_are(path):
    changed(
        path,
        'CREATE TABLE "x""; DROP TABLE StringIds; --" (a INT)',
        f'ALTER TABLE {KERNELS} ADD COLUMN "e""nd" INT',
        "CREATE TABLE other (id INTEGER PRIMARY KEY, value TEXT)",
    )
    assert count(load_trace(path), "kernel") == 30


def test_texts_that_are_too_long_are_cut(path):
    changed(path, f"UPDATE {RANGES} SET text = 'aten::' || hex(zeroblob(100000)) WHERE rowid = 1")
    assert max(map(len, load_trace(path).names)) <= 1 << 15


def test_strings_without_a_key_are_found(path):
    changed(
        path,
        "CREATE TABLE copy AS SELECT * FROM StringIds",
        "DROP TABLE StringIds",
        "ALTER TABLE copy RENAME TO StringIds",
    )
    assert 'void k<float, {1}>("x")' in load_trace(path).names


def test_payloads_that_do_not_fit_their_schemas_say_nothing(tmp_path):
    reduced = {"Collective name": "allreduce", "Process Group Name": "0", "Group size": 2, "dtype": "Float"}
    reduced |= {"In msg nelems": 10, "Out msg nelems": 10}
    content = []
    for i in range(12):
        content.append(event("cudaLaunchKernelExC", 100.0 + 50 * i, 5.0, "cuda_runtime", correlation=i + 1))
        content.append(kernel("ncclDevKernel_AllReduce(int)", 120.0 + 50 * i, 9.0, 13, i + 1, **reduced))
    path = export(tmp_path / "a.sqlite", [load_trace(write(tmp_path / "t.json", document(content)))])
    with sqlite3.connect(path) as db:
        data = db.execute(
            f"SELECT binaryData FROM {RANGES} WHERE binaryData IS NOT NULL ORDER BY start"
        ).fetchall()
        whole = data[1][0]
        odd = [whole[:20], whole[:-1], whole + b"x" * 10_000, b"\xff" * len(whole), b"", "text", 7, 1.5]
        odd += [
            whole[:16] + struct.pack("<Q", 2**63) + whole[24:],
            whole[:8] + struct.pack("<I", 1) + whole[12:],
        ]
        rows = [
            r
            for (r,) in db.execute(f"SELECT rowid FROM {RANGES} WHERE binaryData IS NOT NULL ORDER BY start")
        ]
        for row, value in zip(rows[1:], odd, strict=False):
            db.execute(f"UPDATE {RANGES} SET binaryData = ? WHERE rowid = ?", (value, row))
    db.close()
    trace = load_trace(path)
    assert len(trace.collectives.event) == 12 - len(odd)


def test_a_file_that_is_cut_off_is_told(path, tmp_path):
    whole = Path(path).read_bytes()
    outcomes = set()
    for part in range(1, 12):
        cut = tmp_path / f"cut{part}.sqlite"
        cut.write_bytes(whole[: len(whole) * part // 12])
        trace, reason = read_one(str(cut), None, False)
        outcomes.add(trace is None)
        assert trace is not None or reason.startswith(f"{cut}"), reason
        assert trace is None or trace.size
        assert "(" not in reason or "Error" not in reason, reason
    assert True in outcomes


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 40))]
)
def test_bytes_that_were_changed_never_do_more_harm_than_to_the_file(path, tmp_path, seed):
    rng = random.Random(seed)
    data = bytearray(Path(path).read_bytes())
    for _ in range(rng.choice((1, 5, 60))):
        data[rng.randrange(100 if seed % 4 == 0 else len(data))] = rng.randrange(256)
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(data)
    trace, reason = read_one(str(broken), None, False)
    assert trace is not None or (reason.startswith(str(broken)) and "Error:" not in reason), reason
    find_traces([str(tmp_path)])


def test_pages_that_repeat_without_end_are_given_up(tmp_path):
    """Each page of a tree points to one other page only, eighty times: rows without number in a small file."""
    path = tmp_path / "loop.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA page_size = 512")
        db.execute(f"CREATE TABLE {KERNELS} (start INT, end INT, globalPid INT, demangledName INT)")
        db.executemany(
            f"INSERT INTO {KERNELS} VALUES (?, ?, ?, ?)", [(i, i + 1, 1 << 24, 1) for i in range(1500)]
        )
        (root,) = db.execute("SELECT rootpage FROM sqlite_master").fetchone()
    db.close()
    data = bytearray(path.read_bytes())

    def page(number):
        return slice((number - 1) * 512, number * 512)

    top = data[page(root)]
    assert top[0] == 5, "an inner page"
    leaf, inner = (
        struct.unpack_from(">I", top, struct.unpack_from(">H", top, 12 + 2 * i)[0])[0] for i in (0, 1)
    )

    def all_to(target):
        made = bytearray(top)
        for i in range(struct.unpack_from(">H", top, 3)[0]):
            struct.pack_into(">I", made, struct.unpack_from(">H", top, 12 + 2 * i)[0], target)
        struct.pack_into(">I", made, 8, target)
        return made

    data[page(root)], data[page(inner)] = all_to(inner), all_to(leaf)
    path.write_bytes(data)
    with pytest.raises(UnusableInput, match="holds more rows than it has room for"):
        load_trace(str(path))


def with_kernels(path, count):
    """Its first kernel so many times more; the bytes of a page."""
    with sqlite3.connect(path) as db:
        row = db.execute(
            f"SELECT start, end, deviceId, contextId, streamId, globalPid FROM {KERNELS}"
        ).fetchone()
        db.executemany(
            f"INSERT INTO {KERNELS} (start, end, deviceId, contextId, streamId, globalPid, demangledName, shortName) "
            "VALUES (?, ?, ?, ?, ?, ?, 1, 1)",
            [row] * count,
        )
        (size,) = db.execute("PRAGMA page_size").fetchone()
    db.close()
    return size


def test_reading_ends_in_time(path, monkeypatch):
    with_kernels(path, 40_000)
    real, passed = time.monotonic, iter(range(10**9))
    monkeypatch.setattr(time, "monotonic", lambda: real() + 1000.0 * next(passed))
    trace, reason = read_one(path, None, False)
    told = [reason] if trace is None else list(trace.meta.notes)
    assert any("takes longer to read than a file of its size can" in text for text in told)


def test_what_is_no_export_is_refused_in_a_sentence(tmp_path):
    other = tmp_path / "runs.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE runs (id INT)")
    db.close()
    with pytest.raises(UnusableInput, match="is an SQLite database, but no export of Nsight Systems"):
        load_trace(str(other))
    empty = changed(str(tmp_path / "empty.sqlite"), f"CREATE TABLE {KERNELS} (start INT, end INT)")
    with pytest.raises(UnusableInput, match=r"holds no kernel and no NVTX range: record with nsys profile"):
        load_trace(empty)
    text = tmp_path / "text.sqlite"
    text.write_text("no database")
    with pytest.raises(UnusableInput, match="is not a profiler trace"):
        load_trace(str(text))


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "rank0.sqlite")
    with pytest.raises(UnusableInput, match="No profiler trace"):
        find_traces([str(tmp_path)])


def test_names_of_files_may_hold_anything(path, tmp_path):
    odd = tmp_path / "re port?mode=rwc&x=%2e#process-0 ü.sqlite"
    Path(path).rename(odd)
    assert load_trace(str(odd)).size == load_trace(str(odd)).size > 0
    beside = tmp_path / "a.sqlite#process-0"
    odd.rename(beside)
    assert load_trace(str(beside)).meta.source == str(beside)


def test_nothing_is_written_beside_it(path):
    folder = Path(path).parent
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    load_trace(path)
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_what_was_read_before_the_damage_is_used(path):
    changed(path, "DROP TABLE ThreadNames")
    size = with_kernels(path, 200_000)
    data = bytearray(Path(path).read_bytes())
    data[-2 * size :] = b"\xff" * (2 * size)
    Path(path).write_bytes(data)
    trace = load_trace(path)
    assert is_cut(trace) and count(trace, "kernel") > 100_000 and count(trace, "cpu_op") == 30
    assert any("what was read before is used" in note for note in trace.meta.notes)


def test_a_damaged_process_does_not_cost_the_others(path, tmp_path):
    (tmp_path / "rank1.sqlite").write_bytes(Path(path).read_bytes()[:5000])
    loaded = load_traces([path, str(tmp_path / "rank1.sqlite")], jobs=1)
    assert [trace.meta.rank for trace in loaded.traces] == [0] and len(loaded.failed) == 1


def test_a_process_whose_kernels_are_nobodys_is_asked_for_anew(tmp_path):
    """Versions that do not say which process ran a kernel: two that launched cannot be told apart."""
    trace = load_trace(write(tmp_path / "t.json", document(events(30))))
    path = changed(
        export(tmp_path / "a.sqlite", [trace, trace]),
        f"UPDATE {KERNELS} SET globalPid = NULL",
    )
    with pytest.raises(UnusableInput, match="does not say which of its 2 processes ran which kernel"):
        load_trace(path)
