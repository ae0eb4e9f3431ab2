"""Digests of traces: the same columns, or one sentence."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from pathlib import Path

import msgspec
import polars
import pytest

from ddpdoctor.errors import DdpDoctorError, UnusableInput
from ddpdoctor.trace import find_traces, load_trace, load_traces
from ddpdoctor.trace.digest import loose_targets, write_digests
from tests.trace.trace_files import assert_same, document, events, job, kernel, write

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
        meta = msgspec.structs.replace(made.meta, source=path, notes=trace.meta.notes)
        assert_same(msgspec.structs.replace(made, meta=meta), trace)


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
    with pytest.raises(UnusableInput, match="is not a complete file of columns") as raised:
        load_trace(path)
    assert path in str(raised.value) and "\n" not in str(raised.value)


def test_a_digest_of_another_schema_is_one_sentence(tmp_path, monkeypatch):
    path = write(tmp_path / "rank0.json", document(CONTENT))
    with monkeypatch.context() as older:
        older.setattr("ddpdoctor.trace.archive.SCHEMA", "ddpdoctor.columns/1")
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


def rewritten(path, change, table=None):
    """The digest at ``path`` with ``change`` made to its head, or to the columns of ``table``."""
    with zipfile.ZipFile(path) as whole:
        parts = {name: whole.read(name) for name in whole.namelist()}
    if table is None:
        head = json.loads(parts["head.json"])
        change(head)
        parts["head.json"] = json.dumps(head).encode()
    else:
        frame, target = polars.read_parquet(io.BytesIO(parts[f"{table}.parquet"])), io.BytesIO()
        change(frame).write_parquet(target)
        parts[f"{table}.parquet"] = target.getvalue()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name, content in parts.items():
            made.writestr(name, content)
    return path


def setting(column, value, kind=None):
    """All values of ``column`` but the first replaced."""

    def change(frame):
        values = [*frame[column].to_list()[:1], *[value] * (frame.height - 1)]
        return frame.with_columns(polars.Series(column, values, dtype=kind or frame[column].dtype))

    return change


UNSOUND = {
    "name out of range": ("events", setting("name", 10**6)),
    "name negative": ("events", setting("name", -1)),
    "lane out of range": ("events", setting("lane", 99)),
    "category out of range": ("events", setting("category", 99)),
    "shapes out of range": ("events", setting("shapes", 10**6)),
    "event out of range": ("collectives", lambda f: f.with_columns(event=polars.lit(10**6, polars.Int32))),
    "group out of range": ("collectives", lambda f: f.with_columns(group=polars.lit(-2, polars.Int32))),
    "times not a number": ("events", setting("start_ns", float("nan"), polars.Float64)),
    "times as text": ("events", lambda f: f.with_columns(start_ns=polars.lit("soon"))),
    "times missing": ("events", setting("duration_ns", None)),
    "times out of order": ("events", setting("start_ns", 0)),
    "times beyond": ("events", setting("start_ns", 2**63 - 1)),
    "durations negative": ("events", setting("duration_ns", -5)),
    "a column less": ("events", lambda f: f.drop("stream")),
    "a column more": ("events", lambda f: f.with_columns(other=polars.lit(1))),
    "rows less": ("events", lambda f: f.head(3)),
    "no rows": ("events", lambda f: f.head(0)),
    "rank": (None, lambda head: head["meta"].update(rank=2**64)),
    "rank negative": (None, lambda head: head["meta"].update(rank=-3)),
    "world size": (None, lambda head: head["meta"].update(world_size=10**15)),
    "clock": (None, lambda head: head["meta"].update(clock="none")),
    "notes": (None, lambda head: head["meta"].update(notes=["x"] * 101)),
    "note": (None, lambda head: head["meta"].update(notes=["x" * 10**5])),
    "device": (None, lambda head: head["meta"].update(devices=[{"computeMajor": "x"}])),
    "names": (None, lambda head: head.update(names=[1, 2])),
    "head too small": (None, lambda head: head.update(names=["x" * (9 << 20)])),
}


def test_a_digest_of_what_cannot_be_is_one_sentence_and_the_others_are_read(tmp_path):
    good = digested(write(tmp_path / "a.json", document(CONTENT)), tmp_path / "out")
    bad = {what: str(tmp_path / f"{what}.columns") for what in UNSOUND}
    for what, (table, change) in UNSOUND.items():
        shutil.copy(good, bad[what])
        rewritten(bad[what], change, table)
    loaded = load_traces([*bad.values(), good], jobs=1)
    assert [trace.meta.source for trace in loaded.traces] == [good]
    reasons = dict(loaded.failed)
    assert reasons.keys() == set(bad.values())
    for file, reason in reasons.items():
        assert file in reason and "is not a complete file of columns" in reason and "\n" not in reason


def test_a_link_is_not_digested_into_what_it_leads_to(tmp_path):
    """A trace that cannot be read goes along as it is, but not where a link leads elsewhere."""
    (tmp_path / "secret").write_bytes(b"\x1f\x8b a private key")
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "rank0.json.gz").symlink_to(tmp_path / "secret")
    good = write(tmp_path / "elsewhere.json", document(CONTENT, rank=1))
    (folder / "rank1.json").symlink_to(good)
    files = find_traces([str(folder)]).files
    digest = write_digests(loose_targets(files, tmp_path / "out"), jobs=1)
    assert [file for file, _ in digest.failed] == [str(folder / "rank0.json.gz")]
    assert len(digest.files) == 1 and load_trace(digest.files[0]).meta.rank == 1
    assert not any(b"private" in file.read_bytes() for file in (tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("file", "place"),
    [
        ("file:///etc/traces/rank0.json", "etc/traces/rank0.json.columns"),
        ("https://me:pw@host/a/../../b/rank0.json?sig=x", "host/a/b/rank0.json.columns"),
        ("memory://", "trace.columns"),
    ],
)
def test_the_digest_of_a_url_lies_below_the_named_folder(tmp_path, file, place):
    assert loose_targets((file,), tmp_path / "out") == {file: tmp_path / "out" / place}


def test_the_digests_of_traces_above_lie_below_the_named_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    targets = loose_targets(("../rank0.json", "rank1.json"), tmp_path / "out")
    assert [path.relative_to(tmp_path / "out").as_posix() for path in targets.values()] == [
        "rank0.json.columns",
        "here/rank1.json.columns",
    ]


def test_a_digest_that_ends_the_process_that_reads_it_costs_only_itself(tmp_path, monkeypatch):
    """Parquet made to harm does so; here the interpreter's own start does."""
    bad = digested(write(tmp_path / "a.json", document(CONTENT, rank=0)), tmp_path / "out")
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "sitecustomize.py").write_text("import os\nos.abort()\n")
    monkeypatch.syspath_prepend(str(tmp_path / "early"))
    with pytest.raises(UnusableInput, match="ended by signal 6"):
        load_traces([bad], jobs=1)
