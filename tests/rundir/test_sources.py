"""Hashes of source files, and what is not read."""

from __future__ import annotations

import json
import os
import time

import pytest

from ddpdoctor.rundir.sources import MOST_SOURCE_BYTES, note_sources, read_sources, source_bytes

TEXT = b"import torch\n"


def noted(tmp_path, files, started_ns=None):
    """What a run says of these files, in which a rank was sampled."""
    rank = tmp_path / "run" / "ranks" / "00000"
    rank.mkdir(parents=True)
    lines = [{"where": n, "file": str(path), "line": 1, "function": "main"} for n, path in enumerate(files)]
    (rank / "samples.jsonl").write_text(
        "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    )
    now = time.time_ns() + 10**9 if started_ns is None else started_ns
    note_sources(str(tmp_path / "run"), "node1", [str(rank)], now)
    found = read_sources(str(tmp_path / "run"))
    return found[0] if found else {}


def test_a_sampled_file_has_its_hash(tmp_path):
    script = tmp_path / "train.py"
    script.write_bytes(TEXT)
    hashes = noted(tmp_path, [script, "train.py", "<string>", tmp_path / "missing.py"])
    assert list(hashes) == [str(script)] and len(hashes[str(script)]) == 64


def test_a_file_that_was_changed_in_the_run_has_none(tmp_path):
    script = tmp_path / "train.py"
    script.write_bytes(TEXT)
    assert noted(tmp_path, [script], started_ns=1) == {str(script): None}


def fifo(path):
    os.mkfifo(path)


def link(path):
    path.with_name("there.py").write_bytes(TEXT)
    path.symlink_to(path.with_name("there.py"))


def large(path):
    path.touch()
    os.truncate(path, MOST_SOURCE_BYTES + 1)


@pytest.mark.parametrize("make", [fifo, link, large, os.mkdir])
def test_what_is_no_plain_file_is_not_read(tmp_path, make):
    path = tmp_path / "train.py"
    make(path)
    with pytest.raises(OSError):
        source_bytes(str(path))
    assert noted(tmp_path, [path]) == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_not_read(tmp_path):
    path = tmp_path / "train.py"
    path.write_bytes(TEXT)
    os.chown(path, 12345, 12345)
    with pytest.raises(OSError, match="another user"):
        source_bytes(str(path))


def test_a_device_is_not_read():
    with pytest.raises(OSError):
        source_bytes("/dev/zero")


def test_a_run_directory_that_says_nonsense_has_no_hashes(tmp_path):
    folder = tmp_path / "hosts" / "node1"
    folder.mkdir(parents=True)
    for text in ("[", "[]", '{"files": 3}', '{"files": {"/a": 3}}'):
        (folder / "sources.json").write_text(text)
        assert all(hashed is None for files in read_sources(str(tmp_path)) for hashed in files.values())
