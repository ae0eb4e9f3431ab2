"""A container that was killed with the launcher in it leaves nothing in shared memory for ever."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from ddpdoctor.launch.leftovers import drain_stale_spools
from ddpdoctor.rundir import STEPS_FILE
from ddpdoctor.rundir.liveness import WRITER_FILE
from ddpdoctor.rundir.spool import Spool, make_spool_root
from tests.launch.launched import DEAD, make_run

_LINE = b'{"step":0,"t":[1,2]}\n'


def left_by_a_container(storage: Path, run: Path, monkeypatch: pytest.MonkeyPatch, days: float) -> Path:
    """A spool whose writer was in another pid namespace and was killed ``days`` ago; the manifest of ``run`` is open."""
    storage.mkdir()
    monkeypatch.setattr("ddpdoctor.rundir.spool._base", lambda: str(storage))
    root = Path(make_spool_root(str(run)))
    spool = Spool(str(root), 0, str(run))
    directory = Path(spool.directory)
    spool.write(STEPS_FILE, _LINE)
    writer = json.loads((directory / WRITER_FILE).read_bytes())
    spool.close()
    (directory / WRITER_FILE).write_text(json.dumps({**writer, "namespace": 1, "pid": DEAD}))
    then = time.time() - days * 86400
    for path in [*directory.iterdir(), directory, root]:
        os.utime(path, (then, then))
    return directory


def test_after_a_day_it_is_saved_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")
    spool = left_by_a_container(tmp_path / "storage", run, monkeypatch, days=2)
    drain_stale_spools(tmp_path / "storage" / "another")
    assert not spool.parent.exists()
    assert _LINE in (run / "ranks" / "00000" / STEPS_FILE).read_bytes()


def test_before_that_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")
    spool = left_by_a_container(tmp_path / "storage", run, monkeypatch, days=0.5)
    drain_stale_spools(tmp_path / "storage" / "another")
    assert spool.exists()
