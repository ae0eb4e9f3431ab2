"""Real jobs that somebody ends: the first line says how, where each rank was last seen, and only then what they cost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpdoctor.analysis import analyze
from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.report.compare import compare
from ddpdoctor.rundir.liveness import started as is_alive
from tests.hook.recording import JOBS, forked
from tests.launch.launched import descendants, kill, pids_of, running, steps_taken
from tests.python import NEEDS_STACKS
from tests.waiting import until

STOPPING = str(JOBS / "stopping_ddp.py")
DDPDOCTOR = [sys.executable, "-m", "ddpdoctor"]


@contextlib.contextmanager
def training(tmp: Path, *job: str) -> Iterator[subprocess.Popen[str]]:
    """A job of two ranks in a process group of its own, which has taken some steps."""
    with running(tmp, forked(STOPPING, "--steps", "100000", *job), "--no-profile") as process:
        until(lambda: steps_taken(tmp / "run") > 100, process)
        yield process


def ended(run: Path) -> Diagnosis:
    """The diagnosis, of which all outputs begin with how the job ended."""
    diagnosis = analyze(str(run))
    headline = diagnosis.verdict.headline
    assert {each.rank for each in diagnosis.standing} == {0, 1}
    assert all(each.where is not None for each in diagnosis.standing), diagnosis.standing
    assert "last seen: " in headline.partition("In the steps before that")[0] and ".py:" in headline
    assert "in step " in headline
    for output, text in said(run).items():
        assert headline.partition(",")[0] in text, output
    comparison = compare(diagnosis, diagnosis)
    assert headline in {side.headline for side in (comparison.before, comparison.after)}
    return diagnosis


def said(run: Path) -> dict[str, str]:
    """By output, the first words that are about the job."""
    files = {output: run.parent / f"out.{output}" for output in ("markdown", "html", "json")}
    options = [word for output, file in files.items() for word in (f"--{output}", str(file))]
    done = subprocess.run(
        [*DDPDOCTOR, "analyze", str(run), *options], capture_output=True, text=True, check=True, timeout=120
    )
    texts = {output: file.read_text() for output, file in files.items()}
    texts["json"] = json.loads(texts["json"])["verdict"]["headline"]
    for output, text in (("terminal", done.stdout), ("markdown", texts["markdown"])):
        texts[output] = " ".join(text.split()).lstrip("# ")[:120]
    return texts


@pytest.mark.torchrun
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.extended)],
    ids=["term", "ctrl-c"],
)
@NEEDS_STACKS
def test_a_signal_to_all_of_the_job(tmp_path, number: signal.Signals) -> None:
    """As a terminal, a scheduler or a service manager sends it. torchrun itself leaves with exit code 1."""
    with training(tmp_path) as process:
        os.killpg(process.pid, number)
        process.communicate(timeout=60)
        assert process.returncode != 0
        assert not any(map(is_alive, pids_of(tmp_path / "run")))
    diagnosis = ended(tmp_path / "run")
    assert diagnosis.verdict.headline.startswith(f"The job was ended by {number.name}")
    assert (
        f"(exit code {diagnosis.job.exit_code})" in diagnosis.verdict.headline
        or diagnosis.job.exit_code is None
    )
    assert not [finding.rule for finding in diagnosis.findings if finding.rule.startswith("hang/")]


@pytest.mark.torchrun
@pytest.mark.slow
def test_a_digest_of_it_says_the_same(tmp_path) -> None:
    with training(tmp_path) as process:
        os.kill(process.pid, signal.SIGTERM)
        process.communicate(timeout=60)
    first = ended(tmp_path / "run").verdict.headline
    digest = ["digest", str(tmp_path / "run"), "--out", str(tmp_path / "digest")]
    subprocess.run([*DDPDOCTOR, *digest], check=True, capture_output=True, timeout=120)
    assert analyze(str(tmp_path / "digest")).verdict.headline == first


@pytest.mark.torchrun
@pytest.mark.slow
def test_a_time_limit_and_then_no_mercy(tmp_path) -> None:
    """As Slurm does at the end of its time: SIGTERM to all, and after a grace SIGKILL to all, ours too. The ranks ignore the first."""
    with training(tmp_path, "--how", "deaf", "--rank", "-1", "--at", "10") as process:
        everybody = [process.pid, *descendants(process.pid)]
        for pid in everybody:
            os.kill(pid, signal.SIGTERM)
        time.sleep(3)
        kill(everybody)
        time.sleep(1)
    diagnosis = ended(tmp_path / "run")
    assert diagnosis.verdict.headline.startswith(
        "The job was ended by SIGTERM (its own end was not recorded)"
    )


@pytest.mark.torchrun
@pytest.mark.slow
def test_killed_as_a_whole(tmp_path) -> None:
    with training(tmp_path) as process:
        kill([process.pid, *descendants(process.pid)])
        time.sleep(1)
    diagnosis = ended(tmp_path / "run")
    assert diagnosis.verdict.headline.startswith("The job was killed together with its launcher, in step ")
