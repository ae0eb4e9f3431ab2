"""One demo job under ``ddpdoctor run``, with all commands that work on a running job."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import NamedTuple

import pytest

from ddpdoctor.demo import JOB
from ddpdoctor.rundir import is_run_directory
from tests.commands import ROOT, command
from tests.conftest import Once
from tests.hook.recording import forked
from tests.ports import free_port
from tests.waiting import until

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
DOCTOR = [sys.executable, "-m", "ddpdoctor"]
TRAINED, BEFORE = 400, 40
"""Steps of the job; steps before it is asked for anything."""


class Live(NamedTuple):
    """The run directory, and exit code, stdout and stderr of each command on the running job."""

    run: Path
    said: dict[str, tuple[int, str, str]]


def live_run(once: Once) -> Live:
    """The run, made once: the demo's job, in which rank 1 reads from slow storage."""
    pytest.importorskip("torch")
    folder = once("live", _make)
    said = json.loads((folder / "said.json").read_text())
    return Live(folder / "run", {name: tuple(each) for name, each in said.items()})


def _make(folder: Path) -> None:
    command("--version")  # where nothing is compiled yet, its server starts for longer than the job lasts
    run, port = folder / "run", free_port()
    job = forked(JOB, "--fault", "slow-data-one-rank", "--steps", str(TRAINED))
    options = ["--out", str(run), "--prometheus", str(port)]
    launcher = _start("run", *options, "--", *job)
    watching = None
    try:
        until(lambda: is_run_directory(str(run)))
        watching = _start("watch", str(run))
        until(lambda: min(len(steps_of(run, rank)) for rank in range(2)) >= BEFORE, launcher)
        said = {
            name: _met(*words, str(run), *more)
            for name, words, more in (
                ("capture", ["capture"], ["--steps", "5"]),
                ("stacks", ["stacks"], []),
                ("stacks -v", ["stacks"], ["-v"]),
            )
        }
        until(lambda: "ddpdoctor_late_seconds" in metrics(port), launcher)
        said["metrics"] = 0, metrics(port, patient=False), ""
        assert launcher.poll() is None, "all of it while it ran"
        for name, process in (("run", launcher), ("watch", watching)):
            out, err = process.communicate(timeout=120)
            said[name] = process.returncode, out, err
    finally:
        for process in filter(None, (launcher, watching)):
            process.kill()
            process.communicate()
    with pytest.raises(OSError):
        metrics(port, patient=False)
    (folder / "said.json").write_text(json.dumps(said))


def _start(*words: str) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*DOCTOR, *words], env=ENVIRONMENT, text=True, **pipes)


def _met(*words: str) -> tuple[int, str, str]:
    done = command(*words, environment=ENVIRONMENT)
    return done.returncode, done.stdout, done.stderr


def steps_of(run: Path, rank: int) -> list[dict[str, object]]:
    """What a rank has recorded so far."""
    try:
        text = (run / "ranks" / f"{rank:05d}" / "steps.jsonl").read_text()
    except OSError:
        return []
    return [json.loads(line) for line in re.findall(r'^\{"step".*\n', text, re.MULTILINE)]


def metrics(port: int, patient: bool = True) -> str:
    """The page for Prometheus; "" if nothing answers yet and ``patient``."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())
    except OSError:
        if patient:
            return ""
        raise
