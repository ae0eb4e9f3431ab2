"""What is left of a trial's processes, however they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ddpdoctor.experiment import running
from ddpdoctor.experiment.running import Watch, run_to_end
from ddpdoctor.hook.environment import RUN
from ddpdoctor.rundir.spool import make_spool_root
from ddpdoctor.telemetry.host import Cgroup
from tests.waiting import until

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]
LEAVES_ONE = "import os, subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"


def ended(tmp_path: Path, command: list[str], limit_s: float = 60.0) -> tuple[int | None, str]:
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    environment = {**os.environ, RUN: str(run)}
    return run_to_end(command, environment, tmp_path, tmp_path / "output", run, limit_s)


def left(tmp_path: Path) -> list[int]:
    """Processes that carry the name of the run."""
    return [process.pid for process in running._recorded_into(tmp_path / "run")]


def test_a_rank_in_a_session_of_its_own_is_ended_with_its_launcher(tmp_path):
    spool = Path(make_spool_root(str(tmp_path / "run")))
    assert ended(tmp_path, [sys.executable, "-c", LEAVES_ONE, *SLEEPER]) == (0, "")
    assert left(tmp_path) == []
    assert not spool.exists()


@pytest.mark.extended
def test_what_takes_too_long_is_ended_and_what_it_printed_is_there(tmp_path):
    code, why = ended(tmp_path, ["sh", "-c", "echo begun; sleep 600"], limit_s=5.0)
    assert (code, why) == (None, "it had not ended after 5 s")
    assert (tmp_path / "output").read_text() == "begun\n"
    assert left(tmp_path) == []


@pytest.mark.parametrize("name", ["memory", "/dev/shm"])
def test_a_trial_that_leaves_no_memory_is_ended_and_says_so(tmp_path, monkeypatch, name):
    rooms = iter([[(name, running._Room(900, 1000))]])
    monkeypatch.setattr(running, "_rooms", lambda: next(rooms, [(name, running._Room(10, 1000))]))
    code, why = ended(tmp_path, SLEEPER)
    assert code is None
    assert why == f"it left only 0 MB of {name}, and was ended"
    assert left(tmp_path) == []


def test_a_machine_that_had_little_left_before_is_no_trial_s_fault(monkeypatch):
    monkeypatch.setattr(running, "_rooms", lambda: [("memory", running._Room(20, 1000))])
    assert Watch().reason_to_end() == ""


def test_this_machine_s_memory_is_known():
    rooms = dict(running._rooms())
    assert 0 < rooms["memory"].left <= rooms["memory"].whole <= psutil.virtual_memory().total


@pytest.mark.parametrize("version", [2, 1])
def test_a_limit_of_memory_counts_at_whatever_level_it_stands(tmp_path, monkeypatch, version):
    """As Slurm sets it: on the job's control group, in which that of the step has none."""
    names = {2: ("memory.max", "memory.current"), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes")}
    limit, used = names[version]
    (tmp_path / "job" / "step").mkdir(parents=True)
    for level, most in ((tmp_path / "job" / "step", str(1 << 62)), (tmp_path / "job", str(8 << 20))):
        (level / "cgroup.controllers").write_text("memory")
        (level / limit).write_text(most)
        (level / used).write_text(str(7 << 20))
        (level / "memory.stat").write_text("inactive_file 0")
    group, kind, options = {2: ("0::", "cgroup2", "rw"), 1: ("3:memory:", "cgroup", "rw,memory")}[version]
    (tmp_path / "cgroup").write_text(f"{group}/job/step\n")
    (tmp_path / "mountinfo").write_text(f"30 20 0:26 / {tmp_path} rw - {kind} {kind} {options}\n")
    monkeypatch.setattr(running, "_cgroup", lambda: Cgroup(tmp_path))
    assert dict(running._rooms())["memory"] == (1 << 20, 8 << 20)


def test_where_we_are_killed_the_trial_ends_as_well(tmp_path):
    (tmp_path / "run").mkdir()
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.experiment.test_processes import SLEEPER, ended
from pathlib import Path
ended(Path({str(tmp_path)!r}), SLEEPER)
"""
    ours = subprocess.Popen([sys.executable, "-c", code])
    until(lambda: left(tmp_path))
    ours.send_signal(signal.SIGKILL)
    ours.wait()
    until(lambda: left(tmp_path) == [], within_s=60)
