"""What may be said and done on one host of a job whose other hosts may be at work: from here only this host's ranks are seen."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddpdoctor.hook.environment import SPOOL
from ddpdoctor.launch import hang_detection, hang_monitor
from ddpdoctor.launch.hang_detection import find_doubts
from ddpdoctor.launch.rankwatch import WatchedRank
from ddpdoctor.launch.unjoined import UnjoinedRank
from ddpdoctor.rundir.host_files import UnjoinedStatus
from ddpdoctor.telemetry import procfs
from tests.waiting import until

from .test_proof import Watching, busy, elsewhere, moving
from .test_standstill import a_rank, after, waiting

POLLS_FOR_A_FILE = """
import time
print("ready", flush=True)
while True:
    time.sleep(30)
"""
WAITS_FOR_A_LOCK = """
import threading
lock = threading.Lock()
lock.acquire()
print("ready", flush=True)
lock.acquire()
"""
WAITS_FOR_A_THREAD_THAT_POLLS = """
import threading, time
poller = threading.Thread(target=time.sleep, args=(600,))
poller.start()
print("ready", flush=True)
poller.join()
"""
WAITS_FOR_A_FILE_LOCK = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("ready", flush=True)
fcntl.flock(open(sys.argv[1], "w"), fcntl.LOCK_EX)
"""


@pytest.fixture
def rank_in(tmp_path):
    """Makes a rank that stands in a line of Python, in a process of its own."""
    started = []

    def start(code: str, number: int = 1) -> WatchedRank:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        until(lambda: procfs.state_of(process.pid) == "S")
        rank = elsewhere(a_rank(number))
        rank.here_pid = process.pid
        return rank

    yield start
    for process in started:
        process.kill()
        process.communicate()


def doubts(*ranks: WatchedRank, has_other_hosts: bool = True) -> list[str]:
    return find_doubts(ranks, lambda rank: True, has_other_hosts=has_other_hosts)


@pytest.mark.parametrize(
    ("code", "alone", "is_waited_for"),
    [
        (POLLS_FOR_A_FILE, True, True),
        (WAITS_FOR_A_FILE_LOCK, True, False),
        (WAITS_FOR_A_THREAD_THAT_POLLS, True, False),
        (WAITS_FOR_A_LOCK, False, False),
    ],
    ids=["a file", "a file's lock", "a thread that polls", "a lock of its own"],
)
def test_what_a_rank_may_wait_for_that_another_host_makes(
    rank_in, code: str, alone: bool, is_waited_for: bool
) -> None:
    """``alone``: whether there is a doubt if no rank of this host waits; ``is_waited_for``: if one does."""
    rank = rank_in(code)
    doubt = ["rank 1 sleeps, and may wait for another host"]
    assert doubts(rank) == doubt * alone
    assert doubts(elsewhere(waiting(0)), rank) == doubt * is_waited_for
    assert doubts(rank, has_other_hosts=False) == []


def test_a_host_whose_ranks_poll_for_a_file_of_another_one_is_not_ended(
    tmp_path, monkeypatch, rank_in
) -> None:
    """Rank 0, on another host, downloads a data set."""
    seconds = count(1000.0)
    clock = SimpleNamespace(monotonic=lambda: next(seconds), time_ns=time.time_ns)
    monkeypatch.setattr(hang_monitor, "time", clock)
    monkeypatch.setattr(hang_detection, "time", clock)
    watching = Watching(tmp_path, [rank_in(POLLS_FOR_A_FILE, number) for number in (2, 3)])
    watching.hangs()
    for _ in range(20):
        watching.watch._poll()
    said = watching.said()
    told = "".join(each.get("warn", "") for each in said)
    assert "no rank of this host has finished a step" in told
    assert "the job seems to hang, or ranks of other hosts work." in told
    assert "the job is not ended: rank 2 sleeps, and may wait for another host." in told
    assert not any(each.get("end_job") for each in said)


@pytest.mark.parametrize("works", [busy, moving])
def test_on_one_host_a_rank_that_works_speaks_for_those_that_poll(
    rank_in, works: Callable[[], WatchedRank]
) -> None:
    polling = rank_in(POLLS_FOR_A_FILE, 0)
    assert after([polling, works()], 1000) is None


def joining(number: int) -> UnjoinedRank:
    """A rank that waits in init_process_group of a job of four ranks."""
    about = {"rank": number, "world_size": 4, "joining_ns": 1}
    return UnjoinedRank("", number, 1_000_000_000 + number, state="S", said=UnjoinedStatus(about))


def test_a_host_whose_ranks_have_all_called_init_process_group_is_not_ended(tmp_path: Path) -> None:
    """Rank 0, on another host, builds its data set before it joins them."""
    watching = Watching(tmp_path, [joining(2), joining(3)])
    watching.hangs()
    watching.watch._poll()
    watching.watch._poll()
    told = watching.warnings()
    assert "no rank of this host has joined its process group" in told
    assert "the job is not ended: all ranks of this host wait for ranks of other hosts" in told
    assert watching.watch._kill is None


def test_a_rank_that_has_not_imported_torch_is_none_of_another_host(tmp_path: Path) -> None:
    """Rank 1 of this host prepares its data before it imports torch, while rank 0 waits for it in init_process_group."""
    about = {"rank": 0, "world_size": 2, "joining_ns": 1}
    waits = UnjoinedRank("", 0, 1_000_000_000, state="S", said=UnjoinedStatus(about))
    watching = Watching(tmp_path, [waits])
    watching.hangs()
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", SPOOL: str(watching.root)}
    prepares = subprocess.Popen(["sleep", "60"], env={**os.environ, **variables})
    for _ in range(3):
        watching.watch._poll()
    prepares.kill()
    prepares.wait()
    told = watching.warnings()
    assert "a rank of this host has not imported torch yet: it is unknown whether the job hangs" in told
    assert "seems to hang" not in told and watching.watch._stall is None


def test_a_rank_without_a_process_here_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has ended before it imported torch, or a script has set LOCAL_WORLD_SIZE to what it is not."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    watching = Watching(tmp_path, [joining(0), joining(1)])
    watching.hangs()
    for _ in range(3):
        watching.watch._poll()
    assert "the job seems to hang" in watching.warnings()
