"""Reading tables of operations: what is whole is used, what is not is told in one sentence."""

from __future__ import annotations

import polars as pl
import pytest

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace.operations import find_operations, read_operations


def table(**changed):
    columns = {
        "dp_rank": [0, 0, 0],
        "stage": [0, 0, 1],
        "rank": [0, 0, 4],
        "step": [7, 7, 7],
        "optype": ["optimizer", "forward-compute", "forward-compute"],
        "start_ts": [2.0, 0.5, 1.0],
        "duration": [0.25, 1.0, 0.5],
        "seq_id": [0, 0, 0],
        "mc": [-1, 0, 0],
        "mb_id": [-1, 0, 0],
        "gmc": [-1, 0, 1],
    }
    return pl.DataFrame(columns | changed)


@pytest.fixture
def no_trial(monkeypatch):
    """The process that tries first whether a table can be read imports nothing, and finds nothing wrong."""
    monkeypatch.setattr("ddpdoctor.trace.operations._PROBE", "")


def test_rows_are_sorted_and_kinds_numbered(tmp_path):
    table().with_columns(pl.col("optype").cast(pl.Categorical)).write_parquet(tmp_path / "trace-x.parquet")
    (tmp_path / "meta-x.yaml").write_text("world_size: 8\n")
    (file,) = find_operations(str(tmp_path))
    ops = read_operations(file)
    assert ops.kinds == ("forward-compute", "optimizer")
    assert ops.kind.tolist() == [0, 1, 0]
    assert ops.rank.tolist() == [0, 0, 4]
    assert ops.end_s.tolist() == [1.5, 2.25, 1.5]
    assert (ops.world_size, ops.notes) == (8, [])


def test_rows_without_a_time_or_a_place_are_left_out_and_counted(tmp_path):
    broken = [
        {"start_ts": None},
        {"start_ts": float("nan")},
        {"duration": -1.0},
        {"duration": float("inf")},
        {"rank": None},
        {"rank": 2**62},
        {"stage": -1},
        {"mb_id": -2},
        {"start_ts": 1e300},
        {"duration": 1e300},
        {"optype": None},
    ]
    row = table().row(1, named=True)
    odd = pl.DataFrame([row | each for each in broken], schema=table().schema)
    pl.concat([table(), odd]).write_parquet(tmp_path / "trace.parquet")
    ops = read_operations(str(tmp_path / "trace.parquet"))
    assert ops.size == 3 and ops.end_s.tolist() == [1.5, 2.25, 1.5]
    assert f"{len(broken)} operation(s) lack a time or a place" in ops.notes[0]


def test_metadata_that_names_no_size_is_told(tmp_path, no_trial):
    table().write_parquet(tmp_path / "trace-x.parquet")
    for text in ("world_size: many", "[]", "a: ["):
        (tmp_path / "meta-x.yaml").write_text(text)
        ops = read_operations(str(tmp_path / "trace-x.parquet"))
        assert ops.world_size is None
        assert "names no world_size" in ops.notes[0]


def test_no_process_is_started_for_other_parquet_files(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "ddpdoctor.trace.operations._crash_reason", lambda *_: pytest.fail("a process was started")
    )
    for number in range(3):
        pl.DataFrame({"optype": [1], "x": [number]}).write_parquet(tmp_path / f"part-{number}.parquet")
    assert find_operations(str(tmp_path)) == []


def test_other_files_are_not_taken_for_it(tmp_path):
    pl.DataFrame({"a": [1]}).write_parquet(tmp_path / "other.parquet")
    (tmp_path / "text.parquet").write_text("PAR1 no")
    (tmp_path / "trace.json").write_text("{}")
    assert find_operations(str(tmp_path)) == []
    assert find_operations(str(tmp_path / "missing")) == []


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (table().drop("gmc"), r"lacks the column\(s\) gmc\."),
        (table(start_ts=["a", "b", "c"]), "wrong type"),
        (table(duration=[None, None, None]), "holds no operation"),
        (table().clear(), "holds no operation"),
        (None, "cannot be read as Parquet"),
    ],
)
def test_unusable_files_are_named(tmp_path, content, sentence):
    file = tmp_path / "trace.parquet"
    if content is None:
        file.write_bytes(b"PAR1" + b"\0" * 20)
    else:
        content.write_parquet(file)
    with pytest.raises(UnusableInput, match=sentence) as caught:
        read_operations(str(file))
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\0" * 100 + b"PAR1", b"no table"])
def test_what_is_no_parquet_is_one_sentence(tmp_path, content):
    (tmp_path / "trace.parquet").write_bytes(content)
    assert find_operations(str(tmp_path)) == []
    with pytest.raises(UnusableInput, match="cannot be read as Parquet") as raised:
        read_operations(str(tmp_path / "trace.parquet"))
    assert "\n" not in str(raised.value)


def test_a_table_with_more_rows_than_bytes_is_not_unpacked(tmp_path, no_trial, monkeypatch):
    monkeypatch.setattr("ddpdoctor.trace.operations._FREE_ROWS", 0)
    path = str(tmp_path / "trace.parquet")
    pl.concat([table()] * 20_000).write_parquet(path)
    with pytest.raises(UnusableInput, match="it has more rows than bytes"):
        read_operations(path)


def test_a_table_that_would_take_days_is_refused(tmp_path, no_trial, monkeypatch):
    monkeypatch.setattr("ddpdoctor.trace.operations._MAX_SIMULATED", 8)
    table().write_parquet(tmp_path / "trace.parquet")
    with pytest.raises(UnusableInput, match="3 operations, to be replayed 3 times"):
        read_operations(str(tmp_path / "trace.parquet"))


def test_a_table_in_which_nothing_takes_time_is_refused(tmp_path, no_trial):
    table(duration=[0.0, 0.0, 0.0]).write_parquet(tmp_path / "trace.parquet")
    with pytest.raises(UnusableInput, match="holds no operation that takes any time"):
        read_operations(str(tmp_path / "trace.parquet"))


@pytest.mark.parametrize(
    "text", ["world_size: " + "9" * 30, "[" * 5000, "a: 2020-99-99", "\x00", "world_size: true"]
)
def test_metadata_of_any_kind_is_no_trouble(tmp_path, no_trial, text):
    table().write_parquet(tmp_path / "trace-x.parquet")
    (tmp_path / "meta-x.yaml").write_text(text)
    ops = read_operations(str(tmp_path / "trace-x.parquet"))
    assert ops.world_size is None and "names no world_size" in ops.notes[0]


def test_a_table_that_ends_the_process_that_reads_it(tmp_path, monkeypatch) -> None:
    """As Parquet of odd contents does: polars aborts, which no exception tells."""
    table = tmp_path / "trace-odd.parquet"
    table.write_bytes(b"PAR1 which aborts its reader PAR1")
    monkeypatch.setattr("ddpdoctor.trace.operations._PROBE", "import os; os.abort()")
    with pytest.raises(UnusableInput, match="was ended by signal 6"):
        read_operations(str(table))
    assert find_operations(str(tmp_path)) == []
