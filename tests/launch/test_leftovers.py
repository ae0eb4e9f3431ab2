"""Spools of dead ranks are gathered, those of living ones kept."""

import json
import os
import shutil
import signal
import socket
import sys
import time

import pytest

from ddpdoctor.launch.leftovers import (
    HostRanks,
    drain_spools,
    drain_stale_spools,
)
from ddpdoctor.rundir import read_json
from ddpdoctor.rundir.layout import run_id
from ddpdoctor.rundir.liveness import boot_id, is_over, pid_namespace
from tests.hook.recording import REPOSITORY

from .launched import age, clean_environment, left_behind, make_run, run_under, written_by

pytestmark = pytest.mark.usefixtures("no_spool_stays")

HERE = socket.gethostname()


def write_rank(run, folder, **fields):
    (run / "ranks" / folder).mkdir(parents=True)
    here = {"boot": boot_id(), "pid_namespace": pid_namespace(), "started_ns": time.time_ns()}
    (run / "ranks" / folder / "rank.json").write_text(json.dumps({**here, **fields}))


def test_ranks_of_this_host_only(tmp_path):
    write_rank(tmp_path, "00000", rank=0, host="here", pid=10)
    write_rank(tmp_path, "00001", rank=1, host="there", pid=11)
    ranks = HostRanks(tmp_path, "here")
    assert ranks.all() == [(0, 10)]
    write_rank(tmp_path, "00000.1", rank=0, host="here", pid=12)
    assert ranks.all() == [(0, 10), (0, 12)]
    assert ranks.recorded() == 3


def test_process_ids_of_ranks_are_those_that_they_have_here(tmp_path):
    """A number that rank.json has is one of the rank's own pid namespace."""
    run = make_run(tmp_path / "run")
    write_rank(run, "00000", rank=0, host="here", pid=1)
    left_behind(run, 0, os.getpid())
    written_by(left_behind(run, 1, 1), 1, namespace=1)
    assert HostRanks(run, "here").pid_by_rank() == {0: os.getpid()}


def test_spools_of_dead_ranks_are_copied_and_removed_those_of_living_ones_kept(tmp_path):
    run = make_run(tmp_path / "run")
    gone, kept = left_behind(run, 0), left_behind(run, 1, os.getpid())
    assert drain_spools(gone.parent) == []
    for rank in ("00000", "00001"):
        assert (tmp_path / "run" / "ranks" / rank / "steps.jsonl").read_bytes() == b'{"step":0}\n'
    assert not gone.exists() and kept.exists()


def test_a_rank_whose_uncompressed_trace_is_gone_loses_nothing_else(tmp_path):
    """As where the job's script removes its TMPDIR, or the rank had a /tmp of its own."""
    run = make_run(tmp_path / "run")
    spool = left_behind(run, 0)
    order = {"folder": str(tmp_path / "gone"), "header": {}, "max_bytes": 1}
    (spool / "trace.handover").write_text(json.dumps(order))
    (spool / "rank.json").write_text(json.dumps({"rank": 0, "window": {"state": "saving"}}))
    (spool / "faults.txt").write_text("Fatal Python error: Segmentation fault\n")
    assert drain_spools(spool.parent) == []
    folder = run / "ranks" / "00000"
    window = json.loads((folder / "rank.json").read_text())["window"]
    assert window["state"] == "failed" and "its uncompressed trace is gone" in window["why"]
    assert (folder / "faults.txt").read_text().startswith("Fatal Python error")
    assert not spool.exists()


def test_a_spool_is_discarded_only_if_the_folder_of_its_rank_is_gone(tmp_path):
    run = make_run(tmp_path / "run")
    kept, gone = left_behind(run, 0), left_behind(run, 1)
    (kept / "trace.handover").write_text(json.dumps({"folder": str(tmp_path / "no trace")}))
    shutil.rmtree(run / "ranks" / "00001")
    said = drain_spools(kept.parent)
    assert kept.exists() and not gone.exists()
    assert f"{run / 'ranks' / '00001'} is gone" in said[0] and f"could not be copied to {run}" in said[1]


def test_stale_spools_of_killed_launchers_are_cleared(tmp_path):
    stale, fresh = (left_behind(make_run(tmp_path / name)).parent for name in ("stale", "fresh"))
    age(stale)
    drain_stale_spools(stale.with_name(f"ddpdoctor-{os.getuid()}-1-{'0' * 16}"))
    assert not stale.exists()
    assert (tmp_path / "stale" / "ranks" / "00000" / "steps.jsonl").exists()
    assert fresh.exists()


def test_the_spool_of_a_rank_that_was_suspended_for_a_day_stays(tmp_path):
    spool = left_behind(make_run(tmp_path / "run"), pid=os.getpid())
    age(spool.parent)
    drain_stale_spools(spool.parent.with_name(f"ddpdoctor-{os.getuid()}-1-{'0' * 16}"))
    assert list(spool.glob("steps.jsonl.*"))


def test_process_ids_of_another_container_mean_nothing(tmp_path, monkeypatch):
    """Its spools, in storage that both share, go once their run has ended and nothing in them has changed for a while (after a
    day of silence whether it has ended or not: ``tests/rundir/test_killed_with_its_launcher.py``)."""
    monkeypatch.setattr("ddpdoctor.rundir.spool._base", lambda: str(tmp_path))  # tests clear /dev/shm, too
    run = make_run(tmp_path / "run")
    spool = left_behind(run)
    other = spool.parent.rename(spool.parent.with_name(f"ddpdoctor-{os.getuid()}-1-{run_id(str(run))}"))
    written_by(other / spool.name, os.getpid(), namespace=1)
    age(other, 3600)
    assert not is_over(str(other / spool.name)), "its run has not ended"
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**manifest, "ended_ns": 1}))
    os.utime(other / spool.name)
    assert not is_over(str(other / spool.name)), "it was written to a moment ago"
    age(other, 3600)
    assert is_over(str(other / spool.name))
    age(other)
    drain_stale_spools(spool.parent)
    assert not other.exists()


def test_waits_for_a_trace_that_is_being_saved(tmp_path):
    write_rank(tmp_path, "00000", rank=0, host=HERE, pid=os.getpid(), window={"state": "saving"})
    write_rank(tmp_path, "00001", rank=1, host=HERE, pid=2**22 + 1, window={"state": "saving"})
    write_rank(tmp_path, "00002", rank=2, host=HERE, pid=os.getpid(), window={"state": "saved"})
    used_again = {"started_ns": 10**18, "window": {"state": "saving"}}
    write_rank(tmp_path, "00003", rank=3, host=HERE, pid=os.getppid(), **used_again)
    assert HostRanks(tmp_path, HERE).saving() == [os.getpid()]


def test_only_the_files_of_living_ranks_of_this_host_are_read_again(tmp_path, monkeypatch):
    for rank in range(20):
        host, pid = (HERE, 2**22 + 1) if rank % 2 else ("other", os.getpid())
        write_rank(tmp_path, f"{rank:05d}", rank=rank, host=host, pid=pid, window={"state": "saving"})
    write_rank(tmp_path, "00020", rank=20, host=HERE, pid=os.getpid(), window={"state": "saving"})
    ranks = HostRanks(tmp_path, HERE)
    assert ranks.saving() == [os.getpid()]
    seen = []
    monkeypatch.setattr("ddpdoctor.launch.leftovers.read_json", lambda path, notes: seen.append(path))
    ranks.saving()
    assert seen == [str(tmp_path / "ranks" / "00020" / "rank.json")]


def test_looking_for_ranks_ends_at_its_deadline(tmp_path, monkeypatch):
    for rank in range(50):
        write_rank(tmp_path, f"{rank:05d}", rank=rank, host=HERE, pid=os.getpid(), window={"state": "saving"})
    slow = []

    def read(path, notes):
        slow.append(path)
        time.sleep(0.2)
        return read_json(path, notes)

    monkeypatch.setattr("ddpdoctor.launch.leftovers.read_json", read)
    HostRanks(tmp_path, HERE).wait_for_traces()
    assert 0 < len(slow) < 20, "each takes a tenth of what there is"


SAVES_A_TRACE = f"""
import os, sys
sys.path.insert(0, {str(REPOSITORY)!r})
from ddpdoctor.rundir import id_of_root
from ddpdoctor.rundir.handover import raw_folder
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
