"""The page in which a rank counts its steps: read from outside, whatever becomes of the spool."""

from __future__ import annotations

import os
import shutil

from ddpdoctor.rundir import Heartbeat, Spool, make_spool_root
from ddpdoctor.rundir.heartbeat import HEARTBEAT_FILE, HeartbeatReader
from tests.launch.launched import make_run


def test_steps_are_read_also_when_the_spool_is_gone_and_after_the_end(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    root = make_spool_root(str(run))
    spool = Spool(root, 3, str(run))
    reader = HeartbeatReader(spool.directory)
    assert reader.read() is None  # not made yet
    heart = Heartbeat(spool)
    first = reader.read()
    assert first is not None and (first.steps, first.in_order) == (0, False)
    heart.step(1, 1_000)
    shutil.rmtree(root)
    heart.step(2, 2_000)
    heart.report_written(100, 7)
    heart.report_written(50, 9)
    seen = reader.read()
    assert seen is not None and (seen.steps, seen.step_end_ns) == (2, 2_000)
    assert (seen.reports, seen.own_bytes, seen.own_faults) == (2, 150, 9)
    heart.end(2)
    ended = reader.read()
    assert ended is not None and ended.in_order
    heart.step(3, 3_000)  # a job that trains on after it destroyed its process group
    after = reader.read()
    assert after is not None and not after.in_order
    spool.close()
    heart.step(4, 4_000)
    heart.report_written(1, 1)
    assert HeartbeatReader(spool.directory).read() is None


def test_what_is_no_such_page_is_none(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    root = make_spool_root(str(run))
    spool = Spool(root, 0, str(run))
    path = os.path.join(spool.directory, HEARTBEAT_FILE)
    for content in (b"", b"x" * 63, b"\xff" * 200):
        with open(path, "wb") as file:
            file.write(content)
        assert HeartbeatReader(spool.directory).read() is None
    shutil.rmtree(root)
    Heartbeat(spool).step(1, 1)  # nowhere to count: nothing is raised
