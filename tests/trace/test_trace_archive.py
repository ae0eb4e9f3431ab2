"""Digests of traces: the same columns, or one sentence."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from pathlib import Path

import pytest
from test_trace_load import assert_same, job
from trace_files import document, events, kernel, write

from ddpdoctor.errors import DdpDoctorError, UnusableInput
from ddpdoctor.trace import archive, find_traces, load_trace, load_traces
from ddpdoctor.trace.digest import loose_targets, write_digests

CONTENT = [*events(20), kernel("ncclDevKernel_x", 5, **{"Collective name": "allreduce", "Seq": 3})]


def digested(path, out):
    (made,) = write_digests(loose_targets((path,), out)).files
    return made


def test_a_digest_gives_what_the_trace_gives(tmp_path):
    for name, content in (
        ("rank-3.json.gz", document(CONTENT)),
        ("node1_4711.16941282015450.pt.trace.json", CONTENT),
        ("rank-5.json", json.dumps(document(CONTENT))[:-3000]),
    ):
        path = write(tmp_path / name, content)
        made, trace = load_trace(digested(path, tmp_path / "out")), load_trace(path)
        assert made.meta.source.startswith(str(tmp_path / "out" / name)) and len(made.meta.notes) == len(
            trace.meta.notes
        )
        meta = dataclasses.replace(made.meta, source=path, notes=trace.meta.notes)
        assert_same(dataclasses.replace(made, meta=meta), trace)


def test_rank_and_host_are_those_of_the_traces_place(tmp_path):
    (tmp_path / "rank_2").mkdir()
    path = write(tmp_path / "rank_2" / "t.json", CONTENT)
    made = digested(path, tmp_path / "rank_7")
    assert (load_trace(made).meta.rank, load_trace(made).meta.rank_from) == (2, "file name")
    assert load_trace(made, 4).meta.rank == 4


def test_a_folder_of_digests_is_a_job(tmp_path):
    files = find_traces(job(tmp_path, range(3), world_size=3)).files
    targets = loose_targets(files, tmp_path / "out")
    assert len(write_digests(targets, jobs=1).files) == 3
    loaded = load_traces(find_traces([str(tmp_path / "out")]).files)
    assert [t.meta.rank for t in loaded.traces] == [0, 1, 2]


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "text", "members"])
def test_a_damaged_digest_is_one_sentence(tmp_path, damage):
    path = digested(write(tmp_path / "rank0.json", document(CONTENT)), tmp_path)
    data = bytearray(Path(path).read_bytes())
    data[len(data) // 2] ^= 0xFF
    damaged = {"cut": data[:300], "flip": bytes(data), "empty": b"", "text": b"no", "members": b""}
    Path(path).write_bytes(damaged[damage])
    if damage == "members":
        with zipfile.ZipFile(path, "w") as made:
            made.writestr("other", "x")
    with pytest.raises(UnusableInput, match="is no whole file of columns") as raised:
        load_trace(path)
    assert path in str(raised.value) and "\n" not in str(raised.value)


def test_a_digest_of_another_schema_is_one_sentence(tmp_path, monkeypatch):
    path = write(tmp_path / "rank0.json", document(CONTENT))
    with monkeypatch.context() as older:
        older.setattr(archive, "SCHEMA", "ddpdoctor.columns/1")
        made = digested(path, tmp_path)
    with pytest.raises(
        UnusableInput, match=r"holds ddpdoctor\.columns/1 columns, this version of ddpdoctor reads"
    ):
        load_trace(made)


def test_a_target_that_cannot_be_written_is_one_sentence(tmp_path):
    path = write(tmp_path / "rank0.json", document(CONTENT))
    (tmp_path / "file").write_text("")
    with pytest.raises(DdpDoctorError, match="cannot be written"):
        digested(path, tmp_path / "file" / "below")
