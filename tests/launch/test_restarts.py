"""Jobs that torchrun really restarts: each attempt, what ended it and what the restart cost, against what the job itself has noted."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddpdoctor.analysis import analyze
from tests.exam.__main__ import examined
from tests.exam.real import restarts
from tests.waiting import until

from .launched import DDPDOCTOR_RUN, clean_environment

pytestmark = pytest.mark.torchrun
EXTENDED = pytest.mark.extended


def end(how: str, step: int, rank: int = 1, code: int = 7) -> dict[str, Any]:
    return {"how": how, "step": step, "rank": rank, "code": code}


def plan(*ends: dict[str, Any], allowed: int, **more: Any) -> dict[str, Any]:
    own = {"steps": 60, "every": 15, "step_ms": 8, "timeout_s": 4, "world": 2}
    return {**own, "ends": ends, "restarts": allowed, **more}


@pytest.mark.parametrize(
    "planned",
    [
        pytest.param(plan(end("code", 45), allowed=1), id="after its checkpoint"),
        pytest.param(plan(end("code", 40), allowed=1), id="code", marks=EXTENDED),
        pytest.param(plan(end("raise", 40, 0), allowed=1), id="raise", marks=EXTENDED),
        pytest.param(plan(end("kill", 40), allowed=1), id="kill", marks=EXTENDED),
        pytest.param(plan(end("hang", 40), allowed=1), id="hang", marks=EXTENDED),
        pytest.param(plan(end("kill", 45), end("raise", 50), allowed=2), id="twice", marks=EXTENDED),
        pytest.param(plan(end("raise", 20), end("hang", 50, 0), allowed=2), id="hang later", marks=EXTENDED),
        pytest.param(plan(end("code", 20), end("early", 0), allowed=2), id="early", marks=EXTENDED),
        pytest.param(plan(end("code", 20), end("code", 50, 0), allowed=1), id="used up", marks=EXTENDED),
        pytest.param(plan(end("kill", 0), allowed=1, every=0), id="before a step", marks=EXTENDED),
        pytest.param(plan(allowed=2), id="none", marks=EXTENDED),
    ],
)  # fmt: skip
def test_a_job_that_torchrun_restarts(tmp_path: Path, planned: dict[str, Any]) -> None:
    code, gone_ns = restarts.run(planned, tmp_path)
    case = restarts.truth(0, planned, tmp_path / "job", code, gone_ns)
    assert len(case.shape["ends"]) + sum(each["how"] == "early" for each in planned["ends"]) > len(
        case.faults
    )
    assert examined(case, tmp_path / restarts.RUN).misses == ()


@contextmanager
def agents(folder: Path, planned: dict[str, Any]) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts agents of one elastic job of one or two ranks, each under a ``ddpdoctor run`` of its own."""
    job, environment = folder / "job", clean_environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    restarts.prepare(planned, job)
    with ExitStack() as ended:

        def start() -> subprocess.Popen[bytes]:
            conf = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
            store = f"--rdzv-endpoint={folder}/store"
            options = (
                "--nnodes=1:2",
                "--rdzv-id=e",
                "--rdzv-backend=c10d",
                store,
                f"--rdzv-conf=store_type=file,{conf}",
            )
            recorder = [*DDPDOCTOR_RUN, "--no-analysis", "--no-profile", "--out", str(folder / restarts.RUN)]
            command = [*recorder, "--", *restarts.torchrun(planned, job, *options)]
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            ended.callback(kill, process)
            return process

        yield start


def kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    try:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.kill()
    except psutil.Error:
        pass
    process.wait()


def steps(folder: Path) -> int:
    return max(
        (each["done"] for each in restarts.records(folder / "job") if each["what"] == "step"), default=0
    )


ELASTIC = plan(allowed=3, steps=900, every=20, step_ms=20, timeout_s=20, world=1)


@EXTENDED
def test_a_job_that_grows(tmp_path: Path) -> None:
    """Nothing failed, but the steps since the last checkpoint are lost, and the ranks start again."""
    with agents(tmp_path, ELASTIC) as start:
        first = start()
        until(lambda: steps(tmp_path) >= 30, within_s=60)
        second = start()
        assert [first.wait(90), second.wait(90)] == [0, 0]
    facts = told(tmp_path, [1, 2], "rank 0 ended by SIGTERM")
    assert facts["restarts"]["ranks"] == []


@EXTENDED
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_a_job_that_shrinks(tmp_path: Path, how: str) -> None:
    """The agent that is gone, or was asked to end, is not the job."""
    with agents(tmp_path, ELASTIC) as start:
        both = start(), start()
        until(lambda: steps(tmp_path) >= 50, within_s=60)
        assert len(restarts.records(tmp_path / "job")) > 50
        gone = both[1]
        if how == "SIGKILL":
            kill(gone)
        else:
            os.killpg(gone.pid, signal.SIGTERM)
        assert both[0].wait(90) == 0
        gone.wait(30)
    told(tmp_path, [2, 1], f"ended by {how}")


def told(tmp_path: Path, sizes: list[int], ended: str, *runs: Path) -> dict[str, Any]:
    """The facts of a run of two attempts with so many ranks, the first of which ended so, as the job has noted them; ``runs``: its run
    directories, if these are not the usual one."""
    noted = restarts.records(tmp_path / "job")
    (first, second) = restarts.attempts_of(
        tmp_path / "job", {each["pid"]: 0 for each in noted if "pid" in each}
    )
    diagnosis = analyze([str(run) for run in runs or [tmp_path / restarts.RUN]])
    facts = diagnosis.facts["run"]
    assert not any("skipped" in note for note in diagnosis.notes)
    assert [each["world_size"] for each in facts["attempts"]] == sizes
    assert ended in facts["attempts"][0]["ended"] and facts["attempts"][1]["ended"] == "finished normally"
    assert facts["restarts"]["count"] == 1
    # A signal may end a rank between the end of its step and its note.
    assert facts["restarts"]["repeated_steps"] - (first["done"] - second["first"]) in (0, 1)
    assert diagnosis.job.exit_code == 0 and not [
        each for each in diagnosis.findings if each.rule.startswith("hang/")
    ]
    return facts


@EXTENDED
def test_a_command_that_starts_the_job_again(tmp_path: Path) -> None:
    """Each torchrun counts its own restarts, from 0."""
    planned = plan(end("code", 40), allowed=0)
    job = tmp_path / "job"
    restarts.prepare(planned, job)
    again = ["sh", "-c", '"$@" || WITHOUT_ENDS=1 "$@"', "sh", *restarts.torchrun(planned, job)]
    environment = clean_environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    command = [
        *DDPDOCTOR_RUN,
        "--no-profile",
        "--no-analysis",
        "--out",
        str(tmp_path / restarts.RUN),
        "--",
        *again,
    ]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)
    told(tmp_path, [2, 2], "rank 1 ended with exit code 7")


@EXTENDED
def test_starts_of_a_requeued_job_are_attempts(tmp_path: Path) -> None:
    """Each start has a run directory of its own; the job goes on from its checkpoint."""
    planned = plan(end("code", 40), allowed=0)
    first, second = tmp_path / "first", tmp_path / restarts.RUN
    assert restarts.run(planned, tmp_path)[0] == 1
    second.rename(first)
    environment = clean_environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", WITHOUT_ENDS="1")
    command = [*DDPDOCTOR_RUN, "--no-profile", "--no-analysis", "--out", str(second), "--"]
    job = restarts.torchrun(planned, tmp_path / "job")
    at = tmp_path / "job"
    subprocess.run([*command, *job], cwd=at, env=environment, check=True, capture_output=True, timeout=120)
    facts = told(tmp_path, [2, 2], "rank 1 ended with exit code 7", first, second)
    assert facts["attempts"][1]["first_step"] == facts["attempts"][0]["checkpoint_step"]
    assert facts["restarts"]["start_s"] > 0.5
    assert facts["wall_s"] > facts["attempts"][1]["ended_s"] > facts["attempts"][1]["started_s"]


@EXTENDED
def test_a_requeued_job_does_not_touch_the_run_of_its_first_start(tmp_path: Path) -> None:
    """It is refused, with the same job id as without one, and nothing that was recorded changes."""
    planned = plan(end("code", 20), allowed=0, steps=30)
    slurm = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}
    assert restarts.run(planned, tmp_path, variables={**slurm, "SLURM_RESTART_COUNT": "0"})[0] == 1
    before = contents(tmp_path / restarts.RUN)
    assert restarts.run(planned, tmp_path, variables={**slurm, "SLURM_RESTART_COUNT": "1"})[0] == 2
    assert restarts.run(planned, tmp_path)[0] == 2
    assert contents(tmp_path / restarts.RUN) == before
    assert "already holds a finished run" in (tmp_path / "job" / "output.txt").read_text()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}
