"""All launchers of one job agree on a name; launchers of different jobs do not."""

import os

import pytest

from ddpdoctor.launch.directory import default_run_name, job_identity, script_stem


def test_srun_launchers_share_a_job_and_differ_in_task():
    steps = [{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_PROCID": str(task)} for task in (0, 5)]
    first, second = map(job_identity, steps)
    assert first.job_id == second.job_id == "slurm-7.2"
    assert (first.task, second.task) == (0, 5)
    assert default_run_name(["python", "train.py"], first) == "slurm-7.2-train"


def test_a_requeued_slurm_job_is_another_run():
    environment = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_RESTART_COUNT": "1"}
    assert job_identity(environment).job_id == "slurm-7.0.r1"


def test_a_batch_script_is_no_step():
    assert job_identity({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}).job_id is None


def test_open_mpi_launchers_share_the_namespace():
    environment = {"PMIX_NAMESPACE": "prterun-host-1@1", "PMIX_RANK": "3"}
    assert job_identity(environment) == job_identity(dict(environment))
    assert job_identity(environment).job_id == "mpi-prterun-host-1_1"
    assert job_identity(environment).task == 3


def test_siblings_without_a_job_id_share_their_parent():
    first, second = job_identity({"PMI_RANK": "0"}), job_identity({"PMI_RANK": "1"})
    assert first.job_id == second.job_id
    assert first.job_id.endswith(f"p{os.getppid()}")


def test_a_launcher_of_its_own_has_no_job_id():
    assert job_identity({}).job_id is None


@pytest.mark.parametrize(
    ("command", "stem"),
    [
        (["torchrun", "--nproc-per-node", "2", "src/train.py", "--config", "b.py"], "train"),
        (["python", "-m", "torch.distributed.run", "-m", "pkg.train", "--x"], "pkg.train"),
        (["accelerate", "launch"], "accelerate"),
        (["/usr/bin/sometool", "train"], "sometool"),
        (["sh", "-c", "a b"], "sh"),
        (["we ird/na me.py"], "na_me"),
    ],
)
def test_script_stem(command, stem):
    assert script_stem(command) == stem
