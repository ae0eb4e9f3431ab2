"""A format is a folder: one that is put beside the others is found, read and analysed, and nothing else changes."""

from __future__ import annotations

import importlib
import io
import os
import sys
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
    assert load_trace(files[1], rank=5).meta.rank == 5 and load_trace(Path(json)).meta.rank == 2
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


@pytest.fixture
def write_format(tmp_path, monkeypatch):
    """A function that adds the format ``broken``, for files that begin with ``#broken``, with the given code."""
    folder = tmp_path / "formats"
    folder.mkdir()
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(folder)])

    def write_code(code):
        monkeypatch.delitem(sys.modules, "ddpdoctor.trace.formats.broken", raising=False)
        importlib.invalidate_caches()
        return write(folder / "broken.py", RECOGNISES + code)

    yield write_code
    sys.modules.pop("ddpdoctor.trace.formats.broken", None)


RECOGNISES = "def recognises(candidate): return (candidate.head or b'').startswith(b'#broken')\n"


@pytest.mark.parametrize(
    "code, error",
    [
        ("def read(path, rank): return {}['rank']", "KeyError: 'rank', in {code}, line 2"),
        (
            "def read(path, rank): return {}['rank']\ndef parts(candidate): return ()\ndef file_of(path): return 1 / 0",
            "KeyError: 'rank', in {code}, line 2",
        ),
        ("def read(path, rank): pass", "TypeError: read returned NoneType instead of RankTrace"),
        ("", "AttributeError: module 'ddpdoctor.trace.formats.broken' has no attribute 'read'"),
    ],
)
def test_an_error_in_a_reader_names_file_and_format_and_the_others_are_read(
    tmp_path, write_format, code, error
):
    module = write_format(code)
    other, file = write(tmp_path / "1.json", document(events(5), rank=1)), write(tmp_path / "0", "#broken")
    loaded = load_traces([file, other])
    assert [trace.meta.rank for trace in loaded.traces] == [1]
    said = error.format(code=module)
    assert loaded.failed == [
        (file, f"{file} cannot be read: the reader of the format broken ({said}) failed.")
    ]


@pytest.mark.parametrize(
    "code, error",
    [
        (
            "import no_such_package",
            "ModuleNotFoundError: No module named 'no_such_package', in {code}, line 2",
        ),
        ("def read(", "SyntaxError: '(' was never closed (broken.py, line 2)"),
        ("def recognises(candidate): return 1 / 0", "ZeroDivisionError: division by zero, in {code}, line 2"),
        (
            "def parts(candidate): return 1 / 0\ndef file_of(path): return path",
            "ZeroDivisionError: division by zero, in {code}, line 2",
        ),
    ],
)
def test_a_format_that_cannot_inspect_files_is_named_and_the_others_are_read(
    tmp_path, write_format, code, error
):
    said = f"Not considered, because of errors in their readers: the format broken ({error.format(code=write_format(code))})."
    (tmp_path / "in").mkdir()
    files = [write(tmp_path / "in" / f"{rank}.json", document(events(5), rank)) for rank in (0, 1)]
    write(tmp_path / "in" / "2.broken", "#broken")
    found = find_traces([str(tmp_path / "in")])
    assert set(files) <= set(found.files) and found.notes == (said,)
    if "parts" not in code:
        with pytest.raises(UnusableInput) as told:
            load_trace(str(tmp_path / "in" / "2.broken"))
        assert str(told.value).endswith(said)
