"""A run belongs to its own launchers only: what an earlier one of the same path left behind stays out of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddpdoctor.launch.directory import JobIdentity, open_run
from ddpdoctor.launch.leftovers import clear_spools_of_earlier_runs, drain_spools
from ddpdoctor.rundir import new_run_id
from ddpdoctor.rundir.draining import drain, recover
from ddpdoctor.rundir.layout import OtherRunError, run_id
from ddpdoctor.rundir.liveness import started as is_alive
from ddpdoctor.rundir.spool import spool_root
from tests.hook.recording import forked
from tests.waiting import until

from .launched import (
    TINY,
    clean_environment,
    kill,
    left_behind,
    make_run,
    pids_of,
    run_under,
    running,
    steps_taken,
)

LINE = b'{"step":0}\n'


pytestmark = pytest.mark.usefixtures("no_spool_stays")


@pytest.mark.torchrun
@pytest.mark.extended
def test_a_new_run_of_the_path_of_a_dead_one(tmp_path) -> None:
    """All of the first run is killed, its directory deleted, and the same command started again."""
    job, run = forked(TINY, "--step-ms", "5", "--steps"), tmp_path / "run"
    with running(tmp_path, [*job, "100000"]) as first:
        until(lambda: steps_taken(run) > 100, first)
        pids = pids_of(run)
        os.killpg(first.pid, signal.SIGKILL)
        kill(pids)
    until(lambda: not any(map(is_alive, pids)))
    old_root = Path(spool_root(str(run)))
    assert list(old_root.glob("*/steps.jsonl.*"))
    shutil.rmtree(run)
    again = run_under(tmp_path, [*job, "60"])
    assert again.process.returncode == 0, again.process.stderr
    for rank in (0, 1):
        assert [step["step"] for step in again.steps(rank)] == list(range(60))
    assert not old_root.exists() and "could not" not in again.process.stderr


def test_each_run_has_spools_of_its_own_and_all_its_launchers_share_them(tmp_path) -> None:
    alone, host = JobIdentity(None, None), socket.gethostname()
    document = {
        "schema": "ddpdoctor.run/1",
        "host": host,
        "pid": os.getpid(),
        "started_ns": time.time_ns(),
        "ended_ns": None,
    }
    launches = [open_run(tmp_path / "run", "", alone, {**document, "run_id": new_run_id()}) for _ in range(3)]
    assert [launch.owner for launch in launches] == [True, False, False]
    ids = {json.loads(launch.record.read_text())["run_id"] for launch in launches}
    assert ids == {run_id(str(tmp_path / "run"))}
    root = spool_root(str(tmp_path / "run"))
    (tmp_path / "run" / "manifest.json").unlink()
    assert spool_root(str(tmp_path / "run")) == root, "the launchers' records tell it, too"
    shutil.rmtree(tmp_path / "run")
    open_run(tmp_path / "run", "", alone, {**document, "run_id": new_run_id()})
    assert spool_root(str(tmp_path / "run")) != root


def test_a_launcher_and_ranks_that_outlive_their_run_leave_the_next_one_alone(tmp_path) -> None:
    document = {"schema": "ddpdoctor.run/1", "host": "here", "pid": 1, "run_id": new_run_id()}
    old = open_run(tmp_path / "run", "", JobIdentity(None, None), document)
    spool = left_behind(old.run, pid=os.getpid())
    shutil.rmtree(old.run)
    run = make_run(tmp_path / "run")
    manifest = (run / "manifest.json").read_bytes()
    (run / "ranks" / "00000").mkdir(parents=True)
    with pytest.raises(OtherRunError, match="another run"):
        drain(str(spool))
    with pytest.raises(OtherRunError):
        old.finish(ended_ns=1, exit_code=0)
    assert (run / "manifest.json").read_bytes() == manifest
    assert not list((run / "ranks" / "00000").iterdir())


def test_what_a_deleted_run_left_goes_when_a_run_starts_there(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    dead, living = left_behind(run), left_behind(run, 1, os.getpid())
    elsewhere = left_behind(make_run(tmp_path / "other"))
    shutil.rmtree(run)
    make_run(run)
    clear_spools_of_earlier_runs(run, Path(spool_root(str(run))))
    assert not dead.exists()
    assert living.exists(), "its rank still writes there"
    assert elsewhere.exists()
    assert drain_spools(elsewhere.parent) == []
    assert (tmp_path / "other" / "ranks" / "00000" / "steps.jsonl").read_bytes() == LINE


def test_a_run_that_was_moved_keeps_what_waits_for_it(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    waiting = left_behind(run)
    os.rename(run, tmp_path / "kept")
    make_run(run)
    clear_spools_of_earlier_runs(run, Path(spool_root(str(run))))
    assert waiting.exists()
    shutil.copytree(tmp_path / "kept", tmp_path / "copy")
    recover(str(tmp_path / "kept"))
    assert (tmp_path / "kept" / "ranks" / "00000" / "steps.jsonl").read_bytes() == LINE
    assert not (run / "ranks").exists()


def test_a_copy_takes_nothing_from_the_original(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    left_behind(run)
    shutil.copytree(run, tmp_path / "copy")
    recover(str(tmp_path / "copy"))
    assert (run / "ranks" / "00000" / "steps.jsonl").read_bytes() == LINE
    assert not list((tmp_path / "copy" / "ranks" / "00000").iterdir())


@pytest.mark.torchrun
def test_a_rank_does_not_join_another_run_than_its_launchers(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    root = spool_root(str(run))
    shutil.rmtree(run)
    make_run(run)
    script = tmp_path / "job.py"
    script.write_text("import torch; from ddpdoctor.hook import lifetime; print(lifetime.arm(0, 1))")
    variables = {"DDPDOCTOR_RUN": str(run), "DDPDOCTOR_SPOOL": root, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(forked(script, ranks=0), env={**clean_environment(), **variables},
                          capture_output=True, text=True)  # fmt: skip
    assert done.stdout == "None\n" and "another run" in done.stderr
    assert not (run / "ranks").exists()
