"""A run directory that was received from somebody: nothing in it makes the reader wait, leave it, or fail."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import pytest

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.errors import UnusableInput
from ddpdoctor.rundir import Note, bounded_lines, is_run_directory, open_regular, read_json, write_json
from ddpdoctor.rundir.reader import RunDirectory

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures" / "slow-data-one-rank"
OPTIONS = Options(cache=False, jobs=1)
RANK = "ranks/00001"


@pytest.fixture
def run(tmp_path) -> Path:
    copied = shutil.copytree(FIXTURE, tmp_path / "run", ignore=shutil.ignore_patterns("trace.json.gz"))
    return Path(copied)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    other = Path(str(path) + ".outside")
    path.rename(other)
    path.symlink_to(other)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    os.truncate(path, 1 << 40)


def deep(path: Path) -> None:
    path.write_text('{"a":' * 50_000)


STEPS = f"{RANK}/steps.jsonl"


@pytest.mark.parametrize(
    ("spoil", "names"),
    [
        (fifo, ("manifest.json", STEPS)),
        (link, ("manifest.json", STEPS)),
        (endless, ("manifest.json", STEPS)),
        (sparse, ("manifest.json", f"{RANK}/rank.json")),
        (deep, (f"{RANK}/rank.json",)),
        (deep, ("manifest.json", STEPS)),
        pytest.param(sparse, (STEPS,), marks=pytest.mark.extended),
    ],
)
def test_an_odd_file_costs_what_it_held_and_is_told(run, spoil, names):
    for name in names:
        spoil(run / name)
    found = analyze(str(run), OPTIONS)
    assert found.steps.count > 0
    for name in names:
        assert any(str(run / name) in note for note in found.notes), found.notes


def test_a_link_is_named_as_one(run):
    link(run / RANK / "rank.json")
    (note,) = [note for note in map(str, RunDirectory.open(str(run)).notes) if "rank.json" in note]
    assert "it is a link, and links in a run directory are not followed" in note


@pytest.mark.parametrize("folder", ["ranks", RANK, "hosts", "hosts/host1"])
def test_linked_folders_are_not_followed(run, tmp_path, folder):
    (run / folder).rename(tmp_path / "outside")
    (run / folder).symlink_to(tmp_path / "outside")
    opened = RunDirectory.open(str(run))
    assert len(opened.ranks) == {"ranks": 0, RANK: 1}.get(folder, 2)
    assert not opened.telemetry or folder in ("ranks", RANK)
    assert any("link" in note for note in map(str, opened.notes))


def test_a_linked_trace_is_not_read_and_told(run, tmp_path):
    shutil.copy(FIXTURE / RANK / "trace.json.gz", tmp_path / "trace.json.gz")
    (run / RANK / "trace.json.gz").symlink_to(tmp_path / "trace.json.gz")
    opened = RunDirectory.open(str(run))
    assert opened.ranks[1].trace is None
    assert any("trace.json.gz is a link" in note for note in map(str, opened.notes))


def test_a_run_directory_may_be_named_by_a_link(run, tmp_path):
    (tmp_path / "latest").symlink_to(run)
    assert len(RunDirectory.open(str(tmp_path / "latest")).ranks) == 2


def test_a_fifo_as_the_only_file_is_no_run_directory(tmp_path):
    os.mkfifo(tmp_path / "manifest.json")
    assert not is_run_directory(str(tmp_path))
    with pytest.raises(UnusableInput):
        analyze(str(tmp_path), OPTIONS)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"[" * 100_000, b'{"a": 1', b"[1]", b"\0" * 100, b'{"a": ' + b"9" * 5000 + b"}"],
)
def test_what_is_no_document_is_one_sentence(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    notes: list[Note] = []
    assert read_json(str(tmp_path / "x.json"), notes) is None and len(notes) == 1


def test_a_line_without_end_is_cut_and_nothing_behind_it_read(monkeypatch):
    monkeypatch.setattr("ddpdoctor.rundir.files.MOST_LINE_BYTES", 100)
    source = io.BytesIO(b'{"a":1}\n' + b'{"b":"' + b"x" * 1000 + b"\nbehind it\n")
    first, cut = bounded_lines(source)
    assert first == b'{"a":1}\n' and cut.endswith(b"...\n") and len(cut) < 100


def test_numbers_beyond_64_bits_are_none_and_named(tmp_path):
    notes: list[Note] = []
    (tmp_path / "x.json").write_text('{"a": [1, 1e999], "b": 18446744073709551616, "c": NaN, "d": -5}')
    assert read_json(str(tmp_path / "x.json"), notes) == {"a": [1, None], "b": None, "c": None, "d": -5}
    assert [note.text for note in notes] == [
        f"{tmp_path}/x.json: fields with values that they cannot have are ignored: "
        "a (inf), b (18446744073709551616), c (nan)."
    ]


def test_a_planted_link_is_replaced_and_not_written_through(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    path = tmp_path / "rank.json"
    for name in (path, Path(f"{path}.{os.getpid()}.tmp")):
        name.symlink_to(victim)
    write_json(str(path), {"a": 1})
    assert victim.read_text() == "mine" and not path.is_symlink() and path.read_text() == '{"a":1}'


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    for name in ("fifo", "link", "."):
        with pytest.raises(OSError):
            open_regular(str(tmp_path / name))
    folder = os.open(tmp_path, os.O_RDONLY)
    for handle in (open_regular(str(tmp_path / "link"), follow=True), open_regular("file", dir_fd=folder)):
        assert os.read(handle, 9) == b"x"
        os.close(handle)
    os.close(folder)


def test_machines_of_one_name_are_told_apart(tmp_path) -> None:
    """Containers of one machine share its clock, machines of one name do not."""
    run = Path(shutil.copytree(FIXTURE, tmp_path / "run"))
    for rank, boot in ((0, "a1"), (1, "b2")):
        path = run / "ranks" / f"0000{rank}" / "rank.json"
        info = json.loads(path.read_text())
        path.write_text(json.dumps({**info, "host": "localhost", "boot": boot}))
    opened = RunDirectory.open(str(run))
    assert [record.host for record in opened.ranks] == ["localhost", "localhost-2"]
    assert "2 machines are named localhost: numbers distinguish them." in map(str, opened.notes)
