"""A format is a folder: one that is put beside the others is found, read and analysed, and nothing else changes."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace import Collectives, find_traces, formats, load_trace, load_traces
from ddpdoctor.trace.archive import read_archive, write_archive
from tests.trace.trace_files import document, events, write

ADDED = Path(__file__).parent / "added"
STEP_NS = 10_000_000

COLUMNS = Collectives.__struct_fields__


@pytest.fixture
def added(monkeypatch):
    """The folder ``added/spans`` stands among the formats."""
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(ADDED)])


def spans(folder, rank, steps=8):
    """Steps of 10 ms, of which 9 ms are one operator."""
    lines = [f"#spans rank={rank} world=2"]
    for step in range(steps):
        begin_ns = 1000 + step * STEP_NS
        lines.append(f"{begin_ns + 500} {STEP_NS * 9 // 10} cpu_op aten::mm")
        lines.append(f"{begin_ns} {STEP_NS} user_annotation ProfilerStep#{step + 1}")
    return write(folder / f"{rank}.spans", "\n".join(lines))


def test_a_format_is_added_by_one_folder(tmp_path, added):
    files = [spans(tmp_path, rank) for rank in (0, 1)]
    json = write(tmp_path / "c.json", document(events(5), rank=2))
    assert find_traces([str(tmp_path)]).files == (*files, json)
    trace = load_trace(files[1])
    assert (trace.meta.rank, trace.size, trace.name_of(0)) == (1, 16, "ProfilerStep#1")
    assert load_trace(files[1], rank=5).meta.rank == 5 and load_trace(json).meta.rank == 2
    assert [t.meta.rank for t in load_traces(files, jobs=1).traces] == [0, 1]
    diagnosis = analyze(files, Options(cache=False, jobs=1))
    assert diagnosis.job.ranks_seen == [0, 1]
    assert (diagnosis.steps.count, round(diagnosis.steps.median_ms)) == (8, 10)


def test_its_columns_can_be_kept(tmp_path, added):
    """In the cache and in digests, whose columns have the types that the table declares."""
    trace = load_trace(spans(tmp_path, 0))
    kept = io.BytesIO()
    write_archive(kept, trace)
    kept.seek(0)
    again = read_archive(kept, "kept.columns")
    assert again.names == trace.names and (again.start_ns == trace.start_ns).all()
    narrow = replace(trace, collectives=Collectives(**dict.fromkeys(COLUMNS, np.empty(0, np.int32))))
    kept = io.BytesIO()
    write_archive(kept, narrow)
    kept.seek(0)
    assert read_archive(kept, "kept.columns").collectives.sequence.dtype == np.int64


def test_what_is_wrong_with_a_file_of_it_is_one_sentence(tmp_path, added):
    empty = write(tmp_path / "0.spans", "#spans rank=0 world=1")
    with pytest.raises(UnusableInput, match="it ends after its first line"):
        load_trace(empty)


def test_without_the_folder_nobody_knows_it(tmp_path):
    path = spans(tmp_path, 0)
    with pytest.raises(UnusableInput, match="No profiler trace in"):
        find_traces([str(tmp_path)])
    with pytest.raises(UnusableInput, match="does not begin like JSON"):
        load_trace(path)


def test_what_can_be_read_once_only_is_told_by_its_name_alone(tmp_path):
    """Nothing is read ahead of a pipe, nor waited for: its reader would miss it."""
    os.mkfifo(tmp_path / "rank0.json")
    (tmp_path / "rank1.json").mkdir()
    for name in ("rank0.json", "rank1.json", "none.json"):
        assert formats.Candidate(str(tmp_path / name)).head is None
