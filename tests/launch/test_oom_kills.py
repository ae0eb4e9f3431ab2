"""Processes that the kernel killed for lack of memory are told of the rank that ended just after that, and of no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddpdoctor.launch import rankwatch
from ddpdoctor.launch.rankwatch import HostWatchedRanks
from ddpdoctor.rundir.liveness import started
from ddpdoctor.rundir.spool import make_spool_root
from ddpdoctor.telemetry.host import Cgroup

from .launched import left_behind, make_run, written_by

pytestmark = [
    pytest.mark.usefixtures("no_spool_stays"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


class Host:
    """Ranks in a control group whose counter of kills is a file here."""

    def __init__(self, tmp_path: Path) -> None:
        folder = tmp_path / "mount" / "job"
        folder.mkdir(parents=True)
        (folder / "cgroup.controllers").write_text("memory")
        (tmp_path / "cgroup").write_text("0::/job\n")
        (tmp_path / "mountinfo").write_text(f"30 20 0:26 / {tmp_path / 'mount'} rw - cgroup2 cgroup2 rw\n")
        self._events = folder / "memory.events"
        self.kills(0)
        self.group = Cgroup(tmp_path)
        self._run = make_run(tmp_path / "run")
        self.ranks = HostWatchedRanks(make_spool_root(str(self._run)))
        self._processes: list[subprocess.Popen[bytes]] = []

    def kills(self, count: int) -> None:
        self._events.write_text(f"low 0\noom {count}\noom_kill {count}\n")

    def starts(self, rank: int) -> None:
        process = subprocess.Popen(["sleep", "600"])
        self._processes.append(process)
        written_by(left_behind(self._run, rank, process.pid), process.pid, started=started(process.pid))
        self.ranks.update()

    def ends(self) -> tuple[int | None, int | None]:
        """The rank that began last is ended by SIGKILL. The kills that are told of it, and in total."""
        self._processes[-1].kill()
        os.waitid(os.P_PID, self._processes[-1].pid, os.WEXITED | os.WNOWAIT)
        self.ranks.update()
        ended = self.ranks.ends([])
        assert ended["ends"][-1]["signal"] == signal.SIGKILL
        return ended["ends"][-1]["oom_kills"], ended["oom_kills"]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.fixture
def host(tmp_path, monkeypatch):
    made = Host(tmp_path)
    monkeypatch.setattr(rankwatch, "Cgroup", lambda proc: made.group)
    yield made
    made.close()


def test_a_kill_in_an_earlier_attempt_is_not_told_of_a_later_one(host) -> None:
    host.starts(0)
    host.kills(1)
    assert host.ends() == (1, 1)
    host.starts(0)
    assert host.ranks.ends([])["oom_kills"] is None
    assert host.ends() == (0, 0)


def test_a_kill_of_another_program_of_the_group_long_before_is_not_told_of_a_rank(host, monkeypatch) -> None:
    host.starts(0)
    host.kills(1)
    host.ranks.update()
    monkeypatch.setattr("ddpdoctor.telemetry.host._EXIT_S", 0.0)
    host.ranks.update()
    assert host.ends() == (0, 0)


def test_a_rank_may_take_some_polls_to_end_after_it_was_killed(host) -> None:
    host.starts(0)
    host.kills(1)
    for _ in range(3):
        host.ranks.update()
    assert host.ends() == (1, 1)


def test_a_rank_that_has_not_joined_has_the_kills_of_its_host(host) -> None:
    host.starts(0)
    host.kills(1)
    host.ranks.update()
    unjoined = {"rank": 2, "in_order": False, "seen_ns": 10**18, "oom_kills": None}
    assert host.ranks.ends([unjoined])["oom_kills"] == unjoined["oom_kills"] == 1
