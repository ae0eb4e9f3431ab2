"""Runs a job under the real command line and has it diagnosed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import MappingProxyType

from ddpdoctor.analysis import analyze
from ddpdoctor.diagnose.diagnosis import Diagnosis

from .planting import JOBS, Plant, written

REPOSITORY = Path(__file__).parents[2]
_GLOO_ABORT = "terminate called without an active exception"
"""Gloo's own teardown aborts now and then, with or without ddpdoctor."""


@dataclass(frozen=True)
class Job:
    """A script with its size."""

    script: str
    ranks: int
    step_ms: float
    batch: int = 8

    @property
    def steps(self) -> int:
        """About six seconds of steps."""
        return int(min(240, max(50, 6000 / (self.step_ms + 10))))


@dataclass(frozen=True)
class Recorded:
    """A finished run."""

    folder: Path
    script: Path
    diagnosis: Diagnosis

    @property
    def step_ms(self) -> float:
        return self.diagnosis.steps.mean_ms or float("nan")


def environment() -> dict[str, str]:
    """Of a job on few cores, which finds ddpdoctor in this checkout."""
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def command(job: Job, script: Path, more: tuple[str, ...], random: Random) -> list[str]:
    """How its user starts the job."""
    arguments = ["--steps", str(job.steps), "--step-ms", str(job.step_ms), "--batch", str(job.batch), *more]
    port = str(random.randrange(20000, 32000))
    if job.script == "spawned":
        return [sys.executable, str(script), "--ranks", str(job.ranks), "--port", port, *arguments]
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    if job.ranks == 2:
        launcher += ["--standalone"]
    else:
        launcher += ["--master-port", port]
    return [*launcher, "--nproc-per-node", str(job.ranks), str(script), *arguments]


def write(folder: Path, job: Job, plants: list[Plant]) -> Path:
    """The script of a case, with all it imports, in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(JOBS / "accelerator.py", folder)
    script = folder / "train.py"
    script.write_text(written(job.script, plants))
    return script


def recorded_before(folder: Path) -> Recorded | None:
    """The run that an earlier call of :func:`record` left in a folder; None where it left none."""
    runs = sorted(folder.glob("run-*"))
    return Recorded(runs[-1], folder / "train.py", analyze(str(runs[-1]))) if runs else None


def record(
    folder: Path,
    job: Job,
    plants: list[Plant],
    random: Random,
    neighbours: int = 0,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Recorded:
    """Run and diagnose. Raises RuntimeError with the job's last words where it ended ill twice."""
    script = write(folder, job, plants)
    more = tuple(argument for plant in plants for argument in plant.arguments)
    burn = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(burn) for _ in range(neighbours)]
    try:
        for attempt in range(2):
            run = folder / f"run-{attempt}"
            line = command(job, script, more, random)
            whole = [
                sys.executable,
                "-m",
                "ddpdoctor",
                "run",
                "--out",
                str(run),
                "--no-analysis",
                "--",
                *line,
            ]
            done = subprocess.run(
                whole,
                env={**environment(), **variables},
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=240,
                check=False,
            )
            (folder / "command.txt").write_text(shlex.join(whole) + "\n")
            (folder / "output.txt").write_text(done.stdout + done.stderr)
            if done.returncode == 0:
                break
    finally:
        for other in others:
            other.kill()
            other.wait()
    if done.returncode and _GLOO_ABORT not in done.stderr:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    return Recorded(run, script, analyze(str(run)))
