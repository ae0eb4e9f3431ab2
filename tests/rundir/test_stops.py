"""What a job that stopped leaves: on its way to the run directory, and read there, whoever wrote it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.rundir import ENDING_FILE, FAULTS_FILE, PROGRESS_FILE, STALL_FILE, STANDING_FILE, STEPS_FILE
from ddpdoctor.rundir.draining import drain, recover
from ddpdoctor.rundir.host_files import copy_host_documents, keep_host_document
from ddpdoctor.rundir.requests import ask, request_in
from ddpdoctor.rundir.spool import Spool, make_spool_root
from ddpdoctor.rundir.stops import STANDING_SCHEMA, read_stops
from tests.launch.launched import make_run

PROGRESS = {
    "schema": "ddpdoctor.progress/1",
    "rank": 1,
    "pid": 4242,
    "at_ns": 10**18,
    "step": 40,
    "phase": "data",
    "frames": [["/a/t.py", 57, "load"]],
    "groups": {"0": [26, -1, 25]},
}


@pytest.fixture
def spool(tmp_path: Path):
    run = make_run(tmp_path / "run")
    root = make_spool_root(str(run))
    found = Spool(root, 1, str(run))
    found.write(STEPS_FILE, b'{"step":0,"t":[1,2],"thin":true}\n')
    yield found
    if Path(found.directory).exists():
        drain(found.directory, remove=True)
    for name in os.listdir(root):
        os.unlink(os.path.join(root, name))
    os.rmdir(root)


def rank_folder(tmp: Path) -> Path:
    return tmp / "run" / "ranks" / "00001"


def test_last_words_are_carried_once_somebody_asks(tmp_path, spool) -> None:
    """Storage is not written to each second of a long step."""
    spool.keep_document(PROGRESS_FILE, PROGRESS)
    drain(spool.directory)
    assert not (rank_folder(tmp_path) / PROGRESS_FILE).exists()
    ask(spool.directory, 3)
    assert request_in(spool.directory) == 3
    drain(spool.directory)
    assert (rank_folder(tmp_path) / PROGRESS_FILE).exists()
    spool.keep_document(STANDING_FILE, {**PROGRESS, "schema": STANDING_SCHEMA, "request": 3})
    drain(spool.directory)
    found = read_stops(str(tmp_path / "run"), []).ranks[0]
    assert found.progress is not None and found.standing is not None and found.standing["request"] == 3
    assert (Path(spool.directory) / STANDING_FILE).exists()


@pytest.mark.parametrize("how", ["remove", "recover"])
def test_last_words_of_a_dead_rank(tmp_path, spool, how: str) -> None:
    spool.keep_document(PROGRESS_FILE, PROGRESS)
    spool.keep_document(ENDING_FILE, {**PROGRESS, "schema": "ddpdoctor.ending/1", "how": "in_order"})
    handle = spool.open_text(FAULTS_FILE)
    os.write(handle, b"Fatal Python error: Segmentation fault\n")
    os.close(handle)
    drain(spool.directory, remove=True) if how == "remove" else recover(str(tmp_path / "run"))
    (found,) = read_stops(str(tmp_path / "run"), []).ranks
    assert found.progress is not None and found.progress["groups"] == {"0": [26, -1, 25]}
    assert found.ending is not None and found.faults.startswith("Fatal")
    assert Path(spool.directory).exists() is (how == "recover")


def test_a_hosts_documents_are_carried_once(tmp_path, spool) -> None:
    root, run, known = os.path.dirname(spool.directory), str(tmp_path / "run"), dict[str, int]()
    stall = {"schema": "ddpdoctor.stall/2", "host": "../host a", "state": "lasts", "ranks": []}
    keep_host_document(root, STALL_FILE, stall)
    copy_host_documents(root, run, known)
    written = tmp_path / "run" / "hosts" / ".._host_a" / STALL_FILE
    assert json.loads(written.read_text()) == stall
    written.unlink()
    copy_host_documents(root, run, known)
    assert not written.exists()


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({"frames": [["a", "b", {}]]}, {"frames"}),
        ({"groups": {"0": ["x"]}}, {"groups"}),
        ({"pid": -1, "step": "many"}, {"pid", "step"}),
    ],
)
def test_fields_of_other_types_are_left_out_and_told(
    tmp_path, fields: dict[str, Any], left: set[str]
) -> None:
    folder = rank_folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / PROGRESS_FILE).write_text(json.dumps({**PROGRESS, **fields}))
    notes: list[Any] = []
    (found,) = read_stops(str(tmp_path / "run"), notes).ranks
    assert found.progress is not None and set(PROGRESS) - set(found.progress) == left
    assert len(notes) == 1 and all(name in str(notes[0]) for name in left)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema":"else"}', "[" * 10_000])
def test_what_is_no_document_is_told(tmp_path, text: str) -> None:
    folder = rank_folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / STANDING_FILE).write_text(text)
    (folder / FAULTS_FILE).symlink_to("/etc/passwd")
    notes: list[Any] = []
    (found,) = read_stops(str(tmp_path / "run"), notes).ranks
    assert found.standing is None and found.faults == "" and len(notes) == 2
    assert "faults.txt cannot be read: it is a link" in str(notes[1])
