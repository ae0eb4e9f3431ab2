"""A rank that ends in the moment in which it begins to record has an exit code all the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddpdoctor.launch.rankwatch import HostWatchedRanks
from ddpdoctor.launch.unjoined import UnjoinedRanks
from ddpdoctor.rundir.spool import make_spool_root
from tests.hook.recording import REPOSITORY

from .launched import make_run

JOINS = f"""
import os, shutil, sys
sys.path.insert(0, {str(REPOSITORY)!r})
from ddpdoctor.hook import stalls
from ddpdoctor.rundir.spool import Spool
stalls.begin_unjoined()
print("stands", flush=True)
sys.stdin.readline()
if sys.argv[2] != "nowhere":
    spool = Spool(sys.argv[1], 1, sys.argv[3])
    if sys.argv[2] == "swept":
        shutil.rmtree(spool.directory)
stalls.end_unjoined()
print("records", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str, str], tuple[str, subprocess.Popen[str]]]]:
    run = str(make_run(tmp_path / "run"))
    root = make_spool_root(run)
    started: list[subprocess.Popen[str]] = []

    def begin(how: str, rank: str = "1") -> tuple[str, subprocess.Popen[str]]:
        ours = {"DDPDOCTOR_SPOOL": root, "DDPDOCTOR_HANG_AFTER_S": "3"}
        ranks = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank} if rank else {}
        process = subprocess.Popen(
            [sys.executable, "-c", JOINS, root, how, run],
            env={**os.environ, **ranks, **ours},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "stands\n"
        return root, process

    yield begin
    for process in started:
        process.kill()
        process.wait()
    subprocess.run(["rm", "-rf", root], check=True)


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "records\n"


def has_exit_codes() -> bool:
    """Whether the kernel tells how a process ended that its parent has waited for: from Linux 6.15 on."""
    return tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (6, 15)


@pytest.mark.skipif(not has_exit_codes(), reason="this kernel forgets exit codes")
@pytest.mark.parametrize(
    "how",
    [
        pytest.param("here", marks=pytest.mark.extended),
        "swept",
        pytest.param("nowhere", marks=pytest.mark.extended),
    ],
)
def test_one_that_was_seen_before_it_joined(start, how: str) -> None:
    """Whether or not what it recorded is still there at the next look; its launcher has waited for it."""
    root, process = start(how)
    ranks, door = HostWatchedRanks(root), UnjoinedRanks(root)
    ranks.update(door.seen)
    door.update([])
    go_on(process)
    process.kill()
    process.wait()
    ranks.update(door.seen)
    pids = [rank.pid for rank in ranks.known.values()]
    door.update(pids)
    (end,) = ranks.ends(door.ends(pids))["ends"]
    assert (end["rank"], end["pid"], end["signal"]) == (1, process.pid, signal.SIGKILL)
    assert end.get("joined") is not False
    assert door.current([]) == []


@pytest.mark.extended
def test_one_that_has_joined_is_not_at_the_door(start) -> None:
    """It is known until it records, but waits for nobody."""
    root, process = start("nowhere")
    door = UnjoinedRanks(root)
    door.update([])
    assert [rank.pid for rank in door.current([])] == [process.pid]
    go_on(process)
    door.update([])
    assert door.current([]) == [] and door.newest_start_ns() == 0
    assert door.handles and door.seen(1, process.pid) is not None
    door.update([process.pid])
    assert not door.handles and door.seen(1, process.pid) is None


@pytest.mark.extended
def test_the_next_look_comes_as_soon_as_one_records(start) -> None:
    """It has no variables of a rank, so it has no file of an unjoined rank: one of mp.spawn."""
    root, process = start("here", "")
    ranks = HostWatchedRanks(root)
    ranks.update()
    go_on(process)
    ranks.wait(3600.0, [])
    ranks.update()
    assert [rank.here_pid for rank in ranks.known.values()] == [process.pid]


@pytest.mark.extended
def test_one_that_had_not_said_who_it_is(start) -> None:
    """A look between the making of its folder and its first file."""
    root, process = start("here", "")
    go_on(process)
    ranks = HostWatchedRanks(root)
    (spool,) = Path(root).glob("*-*")
    said = spool / "writer.json"
    later = said.rename(spool / "later")
    lock = (spool / "writer").rename(spool / "lock")
    ranks.update()
    (rank,) = ranks.known.values()
    assert not rank.here_pid
    later.rename(said), lock.rename(spool / "writer")
    ranks.update()
    assert rank.here_pid == process.pid
