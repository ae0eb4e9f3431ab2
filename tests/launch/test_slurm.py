"""Jobs of a real Slurm: two nodes on one machine, the launcher inside and outside of `srun`, and all the ways in which a job ends."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddpdoctor

from . import slurm
from .launched import DDPDOCTOR_RUN, TINY, python_with, spools_below
from .slurm import Cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.torchrun,
    pytest.mark.skipif(bool(slurm.why_not()), reason=slurm.why_not() or "-"),
]
TWO = ("--nodes", "2", "--ntasks", "2")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm.cluster() as found:
        yield found


def job(folder: Path, *options: str) -> list[str]:
    return [python_with(), TINY, "--store", str(folder / "store"), *options]


def manifest(run: Path) -> dict[str, object]:
    return json.loads((run / "manifest.json").read_text())


def ranks(run: Path) -> list[str]:
    return sorted(folder.name for folder in (run / "ranks").iterdir())


def steps(run: Path, rank: int) -> int:
    log = run / "ranks" / f"{rank:05d}" / "steps.jsonl"
    return log.read_text().count('"step":') if log.exists() else 0


def test_a_launcher_in_each_task_of_srun(cluster, tmp_path):
    """They find each other by Slurm's variables, without any option."""
    done = cluster.done("srun", *TWO, *DDPDOCTOR_RUN, "--", *job(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "took 6 steps\n"
    (run,) = (tmp_path / "ddpdoctor-runs").iterdir()
    assert run.name.startswith("slurm-")
    assert run.name.endswith(".0-tiny_ddp")
    assert ranks(run) == ["00000", "00001"]
    assert [steps(run, rank) for rank in (0, 1)] == [6, 6]
    assert manifest(run)["exit_code"] == 0
    assert "SLURM_JOB_ID" in manifest(run)["environment"]
    assert done.stderr.count("recorded in") == 1
    assert not spools_below(tmp_path)


def test_a_launcher_around_srun(cluster, tmp_path):
    command = [*DDPDOCTOR_RUN, "--out", "run", "--", "srun", *TWO, *job(tmp_path)]
    done = cluster.done(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ranks(tmp_path / "run") == ["00000", "00001"]
    assert [steps(tmp_path / "run", rank) for rank in (0, 1)] == [6, 6]
    assert not spools_below(tmp_path)


def test_the_recipes_batch_script(cluster, tmp_path):
    """With the run directory named after the job, and another step of the same job beside it."""
    launcher = shlex.join(DDPDOCTOR_RUN)
    inner = (
        "RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS exec "
        f'{launcher} --out "$SLURM_SUBMIT_DIR/runs/$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}" -- {shlex.join(job(tmp_path))}'
    )
    script = f"srun --export=ALL sh -c {shlex.quote(inner)}\n"
    number = cluster.submitted(script, tmp_path, *TWO)
    cluster.wait_for(number, "COMPLETED", "FAILED")
    assert cluster.state(number) == "COMPLETED", (tmp_path / "out").read_text()
    run = tmp_path / "runs" / f"{number}.0"
    assert ranks(run) == ["00000", "00001"]
    assert manifest(run)["job_id"] == f"slurm-{number}.0"
    assert ddpdoctor.analyze(run).job.world_size == 2


def test_the_steps_of_one_job_are_runs_of_their_own(cluster, tmp_path):
    """Of a batch script, two steps one after the other; the launcher around the second."""
    launcher = shlex.join(DDPDOCTOR_RUN)
    script = (
        f"srun {launcher} -- {shlex.join(job(tmp_path))}\nrm -f {tmp_path}/store\n"
        f"{launcher} -- srun {shlex.join(job(tmp_path))}\n"
    )
    number = cluster.submitted(script, tmp_path, *TWO)
    cluster.wait_for(number, "COMPLETED", "FAILED")
    assert cluster.state(number) == "COMPLETED", (tmp_path / "out").read_text()
    inside, around = sorted((tmp_path / "ddpdoctor-runs").iterdir(), key=lambda run: "slurm" not in run.name)
    assert inside.name == f"slurm-{number}.0-tiny_ddp"
    assert [ranks(run) for run in (inside, around)] == [["00000", "00001"]] * 2
    assert manifest(around)["job_id"] is None


def test_a_heterogeneous_step_is_one_run(cluster, tmp_path):
    """Two components with a program each: Slurm numbers their tasks together, and counts them apart."""
    launcher = shlex.join(DDPDOCTOR_RUN)
    inner = f"WORLD_SIZE=2 exec {launcher} -- {shlex.join(job(tmp_path))}"
    part = f"--nodes 1 --ntasks 1 sh -c {shlex.quote(inner)}"
    number = cluster.submitted(f"srun {part} : {part}\n", tmp_path, *TWO)
    cluster.wait_for(number, "COMPLETED", "FAILED")
    assert cluster.state(number) == "COMPLETED", (tmp_path / "out").read_text()
    (run,) = (tmp_path / "ddpdoctor-runs").iterdir()
    assert ranks(run) == ["00000", "00001"], (tmp_path / "out").read_text()


def endless(cluster: Cluster, folder: Path, *options: str, around: bool = False) -> str:
    """The id of a job that trains until it is ended, once it does."""
    launcher, training = (
        shlex.join(DDPDOCTOR_RUN),
        shlex.join(job(folder, "--steps", "100000", "--step-ms", "20")),
    )
    run = f"{launcher} --out run-${{SLURM_RESTART_COUNT:-0}}"
    script = f"{run} -- srun {training}\n" if around else f"srun {run} -- {training}\n"
    number = cluster.submitted(f"rm -f {folder}/store\n{script}", folder, *TWO, *options)
    cluster.wait(lambda: min(steps(folder / "run-0", rank) for rank in (0, 1)) > 20)
    return number


@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
def test_a_cancelled_job_keeps_what_was_recorded(cluster, tmp_path, around):
    number = endless(cluster, tmp_path, around=around)
    cluster.said("scancel", number)
    cluster.wait_for(number, "CANCELLED")
    run = tmp_path / "run-0"
    cluster.wait(lambda: manifest(run)["ended_ns"] is not None)
    assert ranks(run) == ["00000", "00001"]
    cluster.wait(lambda: not spools_below(tmp_path))
    diagnosis = ddpdoctor.analyze(run)
    assert diagnosis.steps.count > 20
    assert not [finding for finding in diagnosis.findings if finding.rule.startswith("hang/")]


def test_a_requeued_job_is_recorded_again(cluster, tmp_path):
    number = endless(cluster, tmp_path, "--requeue")
    cluster.said("scontrol", "requeue", number)
    cluster.wait(lambda: min(steps(tmp_path / "run-1", rank) for rank in (0, 1)) > 20, timeout_s=300)
    cluster.said("scancel", number)
    cluster.wait_for(number, "CANCELLED")
    for restart in (0, 1):
        run = tmp_path / f"run-{restart}"
        cluster.wait(lambda run=run: manifest(run)["ended_ns"] is not None)
        assert ranks(run) == ["00000", "00001"]
        assert manifest(run)["job_id"] == f"slurm-{number}.0" + (".r1" if restart else "")


def test_a_job_that_runs_out_of_its_time_keeps_what_was_recorded(cluster, tmp_path):
    """Slurm looks every half minute whether a minute has passed."""
    number = endless(cluster, tmp_path, "--time", "1")
    cluster.wait_for(number, "TIMEOUT", timeout_s=240)
    run = tmp_path / "run-0"
    cluster.wait(lambda: manifest(run)["ended_ns"] is not None)
    assert ranks(run) == ["00000", "00001"]
    assert ddpdoctor.analyze(run).steps.count > 100
