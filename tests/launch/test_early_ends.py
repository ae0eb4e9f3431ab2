"""Jobs that are ended before their first step: nobody is left, and the first line says who ended them, and how far the ranks had come."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ddpdoctor.rundir.liveness import started as is_alive
from tests.hook.recording import JOBS, TORCHRUN, forked
from tests.waiting import until

from .launched import kill, running

pytestmark = pytest.mark.torchrun
SLOW = pytest.mark.slow
EARLY = str(JOBS / "early_ddp.py")
AWAIT_S = 120
OF_TORCH = re.compile(r"\[?[WEF]\d{4} ")
"""How glog and Python's logging in torch begin a line: with the level and the date."""


@contextlib.contextmanager
def staying(tmp: Path, job: list[str]) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A job under ``ddpdoctor run`` whose ranks have come so far, and their process ids."""
    pids: list[int] = []
    with running(tmp, job, analysis=True) as process:
        try:
            files = (tmp / "0.pid", tmp / "1.pid")
            until(lambda: all(file.exists() and file.read_text() for file in files), process, AWAIT_S)
            pids += [int(file.read_text()) for file in files]
            time.sleep(2)  # the hang monitor polls once a second, and rank 0 is on its way to where it waits
            yield process, pids
        finally:
            kill(pids)


def said(process: subprocess.Popen[str]) -> list[str]:
    """What ddpdoctor wrote at the end, in words that a line may have been broken between."""
    lines = process.communicate(timeout=AWAIT_S)[1].splitlines()
    assert process.returncode not in (0, None)
    own = [line for line in lines if not OF_TORCH.match(line) and "torch" not in line]
    return [" ".join(line.split()) for line in own if line.strip()]


def torchrun_of(process: subprocess.Popen[str]) -> int:
    (found,) = [
        child.pid for child in psutil.Process(process.pid).children() if child.cmdline()[1:3] == TORCHRUN[1:3]
    ]
    return found


NONE_JOINED = "the job was ended by SIGKILL before its first step: no rank was recorded, as none had joined its process group."


@pytest.mark.extended
@pytest.mark.parametrize(
    ("where", "says"),
    [
        pytest.param("start", f"{NONE_JOINED} ddpdoctor:", marks=SLOW),
        ("imported", f"{NONE_JOINED} Ranks 0, 1 had not called init_process_group. ddpdoctor:"),
        pytest.param(
            "joining",
            f"{NONE_JOINED} Rank 1 had not called init_process_group. Rank 0 waited in init_process_group. ddpdoctor:",
            marks=SLOW,
        ),
        (
            "joined",
            "The job was ended by SIGKILL before its first step ended; last seen: ranks 0 and 1 at early_ddp.py:",
        ),
    ],
)
def test_torchrun_is_killed(tmp_path: Path, where: str, says: str) -> None:
    with staying(tmp_path, [*TORCHRUN, "2", EARLY, where]) as (process, pids):
        os.kill(torchrun_of(process), signal.SIGKILL)
        text = " ".join(said(process))
        assert process.returncode == -signal.SIGKILL
        assert not any(map(is_alive, pids))
    assert says in text
    _, ended = text.split(": The command left ranks behind, which were ended: process ")
    assert all(str(pid) in ended for pid in pids)
    for name in ("unjoined-?", "0000?"):
        assert not list(Path("/dev/shm").glob(f"ddpdoctor-{os.getuid()}-*/{name}-{pids[0]}"))


@pytest.mark.parametrize(
    ("where", "seen"),
    [
        pytest.param("imported", "ranks 0 and 1 had not called init_process_group", marks=SLOW),
        (
            "joining",
            "rank 0 waited in init_process_group; rank 1 had not called init_process_group",
        ),
        pytest.param("joined", "ranks 0 and 1 at early_ddp.py:", marks=SLOW),
    ],
)
@pytest.mark.extended
def test_a_signal_before_the_first_step(tmp_path: Path, where: str, seen: str) -> None:
    with staying(tmp_path, forked(EARLY, where)) as (process, pids):
        os.kill(process.pid, signal.SIGTERM)
        lines = said(process)
        text = " ".join(lines)
        assert not any(map(is_alive, pids))
    begin = text.lower().index("the job was ended by sigterm")
    assert "before its first step" in text[begin:] and seen in text[begin:]
    (first, *_) = [line for line in lines if line.startswith(("ddpdoctor:", "The job"))]
    assert "ended by SIGTERM" in first and "init_process_group returned" not in text


def test_a_command_without_ranks_that_somebody_ends(tmp_path: Path) -> None:
    job = [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"]
    with running(tmp_path, job) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGTERM)
        (line,) = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == -signal.SIGTERM
    assert line.startswith(
        "ddpdoctor: the job was ended by SIGTERM before its first step: no rank was recorded"
    )
