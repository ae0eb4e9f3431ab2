"""Launchers that other packages bring: each starts its ranks in its own way, and all of them are recorded.

``DDPDOCTOR_JOB_PYTHON`` may name an interpreter that has these packages and torch, where this one does not.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from ddpdoctor import analyze
from tests.hook.recording import JOBS, Recorded

from .launched import clean_environment, program_of, python_with, run_under, two_ranks_took

FRAMEWORKS = JOBS / "frameworks"
pytestmark = pytest.mark.extended
"""One after the other: some launchers have a fixed port, and DeepSpeed compiles for all jobs into one folder."""


@pytest.mark.torchrun
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_lightning(tmp_path, strategy: str) -> None:
    python = python_with("lightning")
    recorded = run_under(tmp_path, [python, str(FRAMEWORKS / "with_lightning.py"), strategy])
    assert "took 8 steps" in recorded.process.stdout
    two_ranks_took(recorded, 8)


@pytest.mark.torchrun
def test_lightning_s_manual_optimization(tmp_path) -> None:
    """Backward and optimizer run inside DDP's forward."""
    python = python_with("lightning")
    recorded = run_under(tmp_path, [python, str(FRAMEWORKS / "with_manual_lightning.py"), "20"])
    assert "took 20 steps" in recorded.process.stdout
    two_ranks_took(recorded, 20)
    for rank in range(2):
        backwards = recorded.events(rank, "bwd")
        assert len(backwards) == 20 and all(event["sync"] and event["ready"] for event in backwards)
        assert all(event["s"] >= 0 for step in recorded.steps(rank) for event in step["ev"])
    steps = analyze(str(recorded.run)).steps
    assert steps.measured > 8 and steps.measured + sum(steps.set_aside.values()) == steps.count == 20


@pytest.mark.torchrun
def test_fabric_run(tmp_path) -> None:
    fabric = str(program_of(python_with("lightning", program="fabric"), "fabric"))
    options = ["--accelerator", "cpu", "--strategy", "ddp", "--devices", "2"]
    recorded = run_under(tmp_path, [fabric, "run", *options, str(FRAMEWORKS / "with_fabric.py")])
    assert "took 8 steps on 2 ranks" in recorded.process.stdout, recorded.process.stderr
    two_ranks_took(recorded, 8)


@pytest.mark.torchrun
def test_accelerate_launch(tmp_path) -> None:
    python = python_with("accelerate", program="accelerate")
    options = ["launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    options += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    script = str(FRAMEWORKS / "with_accelerate.py")
    recorded = run_under(
        tmp_path,
        [str(program_of(python, "accelerate")), *options, script],
        environment=clean_environment(ACCELERATE_USE_CPU="true", HF_HOME=str(tmp_path)),
    )
    assert "2 ranks" in recorded.process.stdout, recorded.process.stderr
    two_ranks_took(recorded, 8)
    built = {loader["where"] for loader in recorded.info(0)["loaders"]}
    (line,) = [line["line"] for line in recorded.lines(0) if line.get("where") in built]
    assert "DataLoader(" in Path(script).read_text().splitlines()[line - 1]


@pytest.mark.torchrun
def test_trainer_of_hugging_face(tmp_path) -> None:
    python = python_with("transformers", "accelerate")
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(FRAMEWORKS / "with_transformers.py"), str(tmp_path / "output")]
    recorded = run_under(tmp_path, command, environment=clean_environment(HF_HOME=str(tmp_path)))
    assert "took 8 steps" in recorded.process.stdout, recorded.process.stderr
    two_ranks_took(recorded, 8)


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["0", "1"])
def test_deepspeed(tmp_path, stage: str) -> None:
    """The first time DeepSpeed compiles an operator, which takes minutes."""
    python = python_with("deepspeed")
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    recorded = run_under(tmp_path, [*command, str(FRAMEWORKS / "with_deepspeed.py"), stage], timeout_s=600)
    assert "took 8 steps" in recorded.process.stdout, recorded.process.stderr
    two_ranks_took(recorded, 8)
    kinds = {event["op"] for step in recorded.steps(0) for event in step["ev"] if event["k"] == "coll"}
    assert "all_reduce" in kinds and ("all_gather_into_tensor" in kinds) == (stage == "1")


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.alone
def test_ray_train(tmp_path) -> None:
    """Ray ends its workers with exit code 1 after a training that went well."""
    recorded = ray_train(tmp_path)
    assert "done" in recorded.process.stdout, recorded.process.stderr
    two_ranks_took(recorded, 6)


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.alone
def test_ray_train_that_fails(tmp_path) -> None:
    """It ends them alike where one has raised: the other one, which it ends in a collective, is not named for that."""
    recorded = ray_train(tmp_path, "raises")
    assert recorded.process.returncode == 1, recorded.process.stderr
    assert analyze(str(recorded.run)).verdict.rule == "hang/unexplained"


def ray_train(tmp: Path, *options: str) -> Recorded:
    python = python_with("ray", "pyarrow", "tensorboardX")
    # Ray's sockets must have short paths.
    folder = tempfile.mkdtemp(prefix="ray")
    try:
        command = [python, str(FRAMEWORKS / "with_ray.py"), folder, *options]
        environment = clean_environment(RAY_USAGE_STATS_ENABLED="0", HOME=str(tmp))
        return run_under(tmp, command, environment=environment, timeout_s=400)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
