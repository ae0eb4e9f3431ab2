"""Spools of dead ranks are gathered, those of living ones kept; orphans are known by their environment."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

from ddpdoctor.launch.leftovers import (
    HostRanks,
    drain_spools,
    drain_stale_spools,
    end_orphaned_ranks,
    is_alive,
)
from ddpdoctor.rundir import Spool
from tests.hook.recording import REPOSITORY

from .launched import clean_environment, run_under


def write_rank(run, folder, **fields):
    (run / "ranks" / folder).mkdir(parents=True)
    (run / "ranks" / folder / "rank.json").write_text(json.dumps(fields))


def spool_of(root, target, pid):
    target.mkdir(parents=True)
    spool = Spool(str(root), str(target))
    spool.write("steps.jsonl", b'{"step":0}\n')
    renamed = root / f"{target.name}-{pid}"
    os.rename(spool.directory, renamed)
    return renamed


def test_ranks_of_this_host_only(tmp_path):
    write_rank(tmp_path, "00000", rank=0, host="here", pid=10)
    write_rank(tmp_path, "00001", rank=1, host="there", pid=11)
    ranks = HostRanks(tmp_path, "here")
    assert ranks.pids() == [10]
    write_rank(tmp_path, "00000.1", rank=0, host="here", pid=12)
    assert ranks.pids() == [10, 12]
    assert ranks.pid_by_rank() == {0: 12}
    assert ranks.recorded() == 3


def test_spools_of_dead_ranks_are_copied_and_removed_those_of_living_ones_kept(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    root = tmp_path / "spool"
    gone = spool_of(root, tmp_path / "run" / "ranks" / "00000", dead.pid)
    kept = spool_of(root, tmp_path / "run" / "ranks" / "00001", os.getpid())
    assert drain_spools(root) == []
    for rank in ("00000", "00001"):
        assert (tmp_path / "run" / "ranks" / rank / "steps.jsonl").read_bytes() == b'{"step":0}\n'
    assert not gone.exists() and kept.exists()


def test_stale_spools_of_killed_launchers_are_cleared(tmp_path):
    yesterday = time.time() - 2 * 24 * 3600
    stale, fresh = (tmp_path / f"ddpdoctor-{os.getuid()}-{name}" for name in ("stale", "fresh"))
    for root in (stale, fresh):
        spool_of(root, tmp_path / root.name / "00000", 2**22 + 1)
    for path in (*stale.rglob("*"), stale):
        os.utime(path, (yesterday, yesterday))
    drain_stale_spools(tmp_path / f"ddpdoctor-{os.getuid()}-mine")
    assert not stale.exists()
    assert fresh.exists()


def test_only_marked_orphans_are_ended_and_stubborn_ones_too(tmp_path, monkeypatch):
    monkeypatch.setattr("ddpdoctor.launch.leftovers._GRACE_S", 0.3)
    stubborn = "import signal,time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    marked = {**os.environ, "MARK": "mine"}
    processes = [
        subprocess.Popen([sys.executable, "-c", stubborn], env=environment, stdout=subprocess.PIPE)
        for environment in (marked, dict(os.environ))
    ]
    try:
        for process in processes:
            process.stdout.readline()
        for rank, process in enumerate(processes):
            write_rank(tmp_path, f"{rank:05d}", rank=rank, host=socket.gethostname(), pid=process.pid)
        ended = end_orphaned_ranks(HostRanks(tmp_path, socket.gethostname()), "MARK", "mine")
        assert ended == [processes[0].pid]
        assert processes[0].wait(10) == -signal.SIGKILL
        assert is_alive(processes[1].pid)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


def test_waits_for_a_trace_that_is_being_saved(tmp_path):
    write_rank(tmp_path, "00000", rank=0, host="h", pid=os.getpid(), window={"state": "saving"})
    write_rank(tmp_path, "00001", rank=1, host="h", pid=2**22 + 1, window={"state": "saving"})
    write_rank(tmp_path, "00002", rank=2, host="h", pid=os.getpid(), window={"state": "saved"})
    assert HostRanks(tmp_path, "h").saving() == [os.getpid()]


SAVES_A_TRACE = f"""
import os, sys
sys.path.insert(0, {str(REPOSITORY)!r})
from ddpdoctor.rundir import id_of_root
from ddpdoctor.rundir.raw_traces import raw_folder
with raw_folder(os.environ["TMPDIR"], id_of_root(os.environ["DDPDOCTOR_SPOOL"])) as folder:
    print(os.listdir(os.environ["TMPDIR"]), flush=True)
    os.kill(os.getpid(), 9)
"""


def test_the_raw_trace_of_a_killed_rank_goes_with_its_run(tmp_path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    recorded = run_under(
        tmp_path, [sys.executable, "-c", SAVES_A_TRACE], environment=clean_environment(TMPDIR=str(temporary))
    )
    assert recorded.process.returncode == -signal.SIGKILL
    assert "ddpdoctor-raw-" in recorded.process.stdout
    assert not list(temporary.iterdir())
