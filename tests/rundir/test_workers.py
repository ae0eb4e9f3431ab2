"""The file to which data loader workers append."""

from __future__ import annotations

import os
import time

import pytest

from ddpdoctor.rundir import WORKERS_FILE
from ddpdoctor.rundir import (
    spool as spools,
)
from ddpdoctor.rundir.draining import drain
from ddpdoctor.rundir.spool import Spool, accept_workers, append_lines, make_spool_root, spool_of_process

LINE = b'{"pid":1}' + b" " * 1000 + b"\n"


@pytest.fixture
def spool(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    made = Spool(make_spool_root(str(run)), 3, str(run))
    yield made
    made.close()
    drain(made.directory, remove=True)


def copied(spool: Spool) -> bytes | None:
    try:
        with open(os.path.join(drain(spool.directory), WORKERS_FILE), "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def test_it_is_copied_as_it_grows(spool):
    with pytest.raises(FileNotFoundError):
        append_lines(spool.directory, LINE)
    accept_workers(spool)
    assert copied(spool) is None
    assert append_lines(spool.directory, LINE)
    assert copied(spool) == LINE
    assert append_lines(spool.directory, b"more\n") and append_lines(spool.directory, LINE)
    assert copied(spool) == LINE + b"more\n" + LINE


def test_its_size_has_a_limit_that_grows_with_age(spool):
    accept_workers(spool)
    young = sum(append_lines(spool.directory, LINE) for _ in range(200))
    assert 60 < young < 70
    old = time.time() - 3600
    os.utime(os.path.join(spool.directory, spools.WRITER_FILE), (old, old))
    assert sum(append_lines(spool.directory, LINE) for _ in range(2000)) == pytest.approx(6.9 * 64, rel=0.1)


def test_workers_find_the_spool_of_the_process_that_started_them(spool):
    root = os.path.dirname(spool.directory)
    assert spool_of_process(root, os.getpid()) is None
    accept_workers(spool)
    assert spool_of_process(root, os.getpid()) == spool.directory
    assert spool_of_process(root, os.getpid() + 1) is None
    assert spool_of_process(f"{root}-of-nobody", os.getpid()) is None


def test_it_leaves_storage_to_the_job(spool, monkeypatch):
    accept_workers(spool)
    monkeypatch.setattr(spools, "LEAST_FREE_SHARE", 1.1)
    assert not append_lines(spool.directory, LINE)
