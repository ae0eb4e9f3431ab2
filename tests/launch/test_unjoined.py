"""Ranks that have not joined their process group: seen, asked without any help of theirs, and let go."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ddpdoctor.launch.unjoined import UnjoinedRank, UnjoinedRanks
from ddpdoctor.rundir.host_files import unjoined_files
from ddpdoctor.rundir.liveness import started as is_alive
from ddpdoctor.rundir.spool import make_spool_root
from tests.hook.recording import REPOSITORY, forked
from tests.python import NEEDS_STACKS
from tests.waiting import until

from .launched import make_run

pytestmark = pytest.mark.torchrun

AT_THE_DOOR = f"""
import os, subprocess, sys, time
sys.path.insert(0, {str(REPOSITORY)!r})
from ddpdoctor.hook import stalls
if os.environ.get("STANDS"):
    stalls.begin_unjoined()
def building():
    print("ready", flush=True)
    while True:
        pass
def waiting():
    stalls.note_join_started()
    print("ready", flush=True)
    time.sleep(60)
def starting():
    subprocess.run([sys.executable, sys.argv[0], "building", "below"], check=False)
def raising():
    while not os.path.exists(sys.argv[0] + ".go"):
        time.sleep(0.02)
    stalls.write_unjoined_end()
    raise ValueError("no such host")
if sys.argv[2:] == []:
    print(os.getpid(), flush=True)
globals()[sys.argv[1]]()
"""


@pytest.fixture
def host(tmp_path):
    """The root of the spools of a run, and what starts a rank below it."""
    root = make_spool_root(str(make_run(tmp_path / "run")))
    script = tmp_path / "train.py"
    script.write_text(AT_THE_DOOR)
    started = []

    def start(rank: int, does: str, **more: str) -> int:
        """Its process id."""
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "STANDS": "1"}
        ours = {"DDPDOCTOR_SPOOL": root, "DDPDOCTOR_HANG_AFTER_S": "3"}
        process = subprocess.Popen(
            forked(script, does, ranks=0),
            env={**os.environ, **variables, **ours, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        if does != "raising":
            assert process.stdout.readline() == "ready\n"
        return pid

    yield root, start
    for process in started:
        process.kill()
        process.wait()
    for name in os.listdir(root):
        os.unlink(os.path.join(root, name))
    os.rmdir(root)


def looked(root: str) -> dict[int, UnjoinedRank]:
    door = UnjoinedRanks(root)
    door.update([])
    return {rank.rank: rank for rank in door.known.values()}


def answer(rank: UnjoinedRank) -> str:
    rank.ask()
    return until(lambda: rank.update() or rank.where(), within_s=20)


@NEEDS_STACKS
def test_one_that_loops_says_where_and_one_that_waits_that_it_does(host) -> None:
    root, start = host
    start(0, "waiting"), start(1, "building")
    ranks = looked(root)
    assert [(rank.waits, rank.alive, rank.joined) for rank in ranks.values()] == [
        (True, True, False),
        (False, True, False),
    ]
    assert answer(ranks[1]).endswith("(building)") and answer(ranks[0]).endswith("(waiting)")
    assert ranks[0].alive and ranks[1].alive


@pytest.mark.extended
def test_a_program_that_a_rank_has_started_is_none(host) -> None:
    root, start = host
    pid = start(1, "starting")
    assert [rank.pid for rank in looked(root).values()] == [pid]
    assert len(unjoined_files(root)) == 2
    for _, other, _ in unjoined_files(root):
        if other != pid:
            os.kill(other, signal.SIGKILL)


def test_nobody_is_sent_a_signal_that_it_does_not_wait_for(host) -> None:
    """The file is a stranger's: the signal would end that process."""
    root, start = host
    pid = start(1, "building", STANDS="")
    (Path(root) / f"unjoined-1-{pid}").write_text('{"signal": 55, "handle": 1}\n')
    looked(root)[1].ask()
    time.sleep(0.3)
    assert is_alive(pid)


def test_how_one_ended_is_known(host, tmp_path) -> None:
    root, start = host
    pid = start(1, "raising")
    door = UnjoinedRanks(root)
    door.update([])
    (tmp_path / "train.py.go").touch()
    until(lambda: not is_alive(pid))
    door.update([])
    (end,) = door.ends(joined=[0])
    assert (end["rank"], end["pid"], end["in_order"], end["step"]) == (1, pid, False, None)
