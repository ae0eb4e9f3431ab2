"""The files of ranks that have not joined their process group: reading them, also of foreign content, and removing them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddpdoctor.rundir.host_files import (
    append_unjoined,
    create_unjoined_file,
    read_unjoined,
    remove_root,
    remove_unjoined_file,
    unjoined_files,
)
from ddpdoctor.rundir.spool import make_spool_root, spools_in
from tests.launch.launched import make_run


@pytest.fixture
def root(tmp_path):
    found = make_spool_root(str(make_run(tmp_path / "run")))
    yield found
    for name in os.listdir(found) if Path(found).exists() else ():
        os.unlink(os.path.join(found, name))
    if Path(found).exists():
        os.rmdir(found)


def test_what_is_said_and_what_faulthandler_writes_between(root) -> None:
    handle, path = create_unjoined_file(root, 3)
    append_unjoined(handle, rank=3, signal=55)
    os.write(handle, b'Thread 0x07 (most recent call first):\n  File "/j/train.py", line 7 in build\n')
    append_unjoined(handle, joining_ns=12)
    os.write(handle, b'{"joining_ns": [1\n')
    os.close(handle)
    assert unjoined_files(root) == [(3, os.getpid(), path)] and spools_in(root) == []
    found = read_unjoined(path)
    assert found.about == {"rank": 3, "signal": 55, "joining_ns": 12}
    assert "line 7 in build" in found.faults and "joining" not in found.faults
    remove_unjoined_file(path)
    assert unjoined_files(root) == [] and read_unjoined(path).about == {}


def test_a_name_that_is_none_and_a_link_are_passed_over(root, tmp_path) -> None:
    for name in ("unjoined-x-1", "unjoined-1", "unjoined--", "joined-1-1"):
        (Path(root) / name).write_text("{}\n")
    (tmp_path / "elsewhere").write_text('{"rank": 1}\n')
    (Path(root) / "unjoined-1-1").symlink_to(tmp_path / "elsewhere")
    assert [(rank, pid) for rank, pid, _ in unjoined_files(root)] == [(1, 1)]
    assert read_unjoined(str(Path(root) / "unjoined-1-1")).about == {}


def test_what_is_left_of_them_does_not_keep_the_root(root) -> None:
    handle, _ = create_unjoined_file(root, 0)
    os.close(handle)
    remove_root(root)
    assert not Path(root).exists()
