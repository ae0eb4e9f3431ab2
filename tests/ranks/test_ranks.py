"""A forked rank is recorded and diagnosed as one that torchrun has started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor import analyze
from tests.hook.recording import Recorded, plain_environment, run_plain, run_recorded, torchrun
from tests.waiting import until

from . import forked

pytestmark = pytest.mark.torchrun
JOB = ("plain_ddp.py", "--steps", "40", "--slow-rank", "1", "--slow-ms", "30")
OF_THE_START = (
    "pid",
    "environment",
    "python",
    "command",
    "clock",
    "started",
    "host_pid",
    "argv",
    "window",
    "captures",
)


SETTINGS = ("rank", "local_rank", "world_size", "backend", "torch")


def settings(info: dict[str, Any]) -> dict[str, Any]:
    """All but numbers of lines of code, which are given as they are met."""
    listed = {
        name: [{key: value for key, value in each.items() if key != "where"} for each in info[name]]
        for name in ("ddp", "loaders")
    }
    return {
        **{name: info[name] for name in SETTINGS},
        **listed,
        "environment": sorted({*info["environment"]} - {"TORCHELASTIC_ERROR_FILE"}),
    }


def seen(recorded: Recorded, rank: int) -> dict[str, Any]:
    events = [event for step in recorded.steps(rank) for event in step.get("ev", [])]
    return {
        "steps": [step["step"] for step in recorded.steps(rank)],
        "kinds": sorted(
            {event["k"] for event in events} - {"gc"}
        ),  # torch imports more in its first step, and collects
        "info": sorted(recorded.info(rank)),
        "settings": settings(recorded.info(rank)),
        "errors": recorded.info(rank)["hook"]["errors"],
        "profiled": [step["step"] for step in recorded.steps(rank) if "profiled" in step.get("marks", [])],
    }


def verdict(recorded: Recorded) -> tuple[str | None, list[int] | None, list[tuple[str, int]]]:
    found = analyze(str(recorded.run))
    finding = found.findings[0]
    where = [(Path(place.file).name, place.line) for place in finding.where]
    return found.verdict.rule, finding.ranks, where


@pytest.mark.extended
def test_the_same_is_recorded_and_diagnosed_as_through_torchrun(tmp_path) -> None:
    by_torchrun, by_fork = tmp_path / "torchrun", tmp_path / "fork"
    by_torchrun.mkdir()
    by_fork.mkdir()
    real = run_recorded(by_torchrun, torchrun(*JOB))
    fork = run_recorded(by_fork, forked(*JOB))
    assert (real.process.returncode, real.process.stdout) == (fork.process.returncode, fork.process.stdout)
    assert fork.process.returncode == 0, fork.process.stderr
    for rank in (0, 1):
        assert seen(fork, rank) == seen(real, rank)
    assert verdict(fork) == verdict(real)


def test_a_rank_that_fails_ends_the_others(tmp_path) -> None:
    (tmp_path / "job.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    raise ValueError('of rank 1')\ntime.sleep(60)\n"
    )
    begun_s = time.monotonic()
    process = run_plain(tmp_path, forked(tmp_path / "job.py"))
    assert process.returncode == 1 and "ValueError: of rank 1" in process.stderr
    assert "<ranks>" in process.stderr and time.monotonic() - begun_s < 30


def test_a_signal_reaches_all_ranks(tmp_path) -> None:
    (tmp_path / "job.py").write_text(
        "import os, pathlib, time\npathlib.Path(os.environ['RANK'] + '.pid').write_text(str(os.getpid()))\ntime.sleep(60)\n"
    )
    process = subprocess.Popen(forked(tmp_path / "job.py"), cwd=tmp_path, env=plain_environment())
    until(lambda: len(list(tmp_path.glob("*.pid"))) == 2, within_s=30)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 1
    for file in tmp_path.glob("*.pid"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)
