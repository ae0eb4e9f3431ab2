"""Which job a launcher belongs to, where a scheduler starts one launcher per rank."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_TASK_VARIABLES = (
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "MV2_COMM_WORLD_RANK",
    "RANK",
)


@dataclass(frozen=True)
class JobIdentity:
    """The same for all launchers that one ``srun``, ``mpiexec`` or ``torchrun --no-python`` started, but for
    ``task``.
    """

    job_id: str | None
    """None where this launcher was not started once per rank."""
    task: int | None
    """Number of this launcher among those of the job."""


def job_identity(environment: Mapping[str, str]) -> JobIdentity:
    """Read the scheduler's variables.

    Inside ``sbatch`` but outside ``srun`` there is no step, thus no shared job.
    """
    task = next((int(environment[n]) for n in _TASK_VARIABLES if environment.get(n, "").isdecimal()), None)
    if "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        restart = environment.get("SLURM_RESTART_COUNT", "0")
        job = f"slurm-{environment.get('SLURM_JOB_ID', '0')}.{environment['SLURM_STEP_ID']}"
        return JobIdentity(job if restart == "0" else f"{job}.r{restart}", task)
    if namespace := environment.get("PMIX_NAMESPACE"):
        return JobIdentity("mpi-" + re.sub(r"[^A-Za-z0-9._-]", "_", namespace), task)
    if task is None or "SLURM_PROCID" in environment:
        return JobIdentity(None, None)
    return JobIdentity(f"{_stamp(_parent_started_s())}-p{os.getppid()}", task)


def default_run_name(command: Sequence[str], identity: JobIdentity) -> str:
    """``<UTC time>-<script>``, or ``<job id>-<script>`` so that all launchers of a job choose the same."""
    return f"{identity.job_id or _stamp(time.time())}-{script_stem(command)}"


def script_stem(command: Sequence[str]) -> str:
    """What a person would call this job: its script, its module, else its program."""
    name = next((Path(a).stem for a in command if a.endswith(".py") and not a.startswith("-")), None)
    if name is None:
        modules = [b for a, b in zip(command, command[1:]) if a == "-m" and not b.startswith("torch.")]
        name = modules[0] if modules else Path(command[0]).stem
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:60].strip(".") or "job"


def _stamp(epoch_s: float) -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(epoch_s))


def _parent_started_s() -> float:
    """The parent is what all launchers of this host share; when it began is theirs alone."""
    try:
        return float(psutil.Process(os.getppid()).create_time())
    except psutil.Error:
        return time.time()
