"""Runs jobs under the hook as the launcher does, and reads what they recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpdoctor.hook.environment import HookOptions, job_environment
from ddpdoctor.launch.leftovers import drain_spools
from ddpdoctor.rundir.spool import make_spool_root
from tests.ranks import forked as forked

JOBS = Path(__file__).parent.parent / "jobs"
REPOSITORY = Path(__file__).parent.parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def plain_environment(**more: str) -> dict[str, str]:
    """This process's environment, small and fit for several ranks on few cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **more}


@dataclass
class Recorded:
    """A finished job and its run directory."""

    process: subprocess.CompletedProcess[str]
    run: Path

    def folder(self, rank: int, repeat: int = 0) -> Path:
        return self.run / "ranks" / (f"{rank:05d}" + (f".{repeat}" if repeat else ""))

    def folders(self) -> list[str]:
        ranks = self.run / "ranks"
        return sorted(path.name for path in ranks.iterdir()) if ranks.is_dir() else []

    def info(self, rank: int, repeat: int = 0) -> dict[str, Any]:
        return json.loads((self.folder(rank, repeat) / "rank.json").read_text())

    def lines(self, rank: int, repeat: int = 0) -> list[dict[str, Any]]:
        text = (self.folder(rank, repeat) / "steps.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def steps(self, rank: int, repeat: int = 0) -> list[dict[str, Any]]:
        return [line for line in self.lines(rank, repeat) if "step" in line]

    def events(self, rank: int, kind: str, repeat: int = 0) -> list[dict[str, Any]]:
        return [
            event for step in self.steps(rank, repeat) for event in step.get("ev", []) if event["k"] == kind
        ]


def run_recorded(
    tmp: Path,
    command: list[str],
    options: HookOptions | None = None,
    base: dict[str, str] | None = None,
    timeout_s: float = 120,
) -> Recorded:
    """Run ``command`` under the hook; what its dead ranks left in the spool is collected as the launcher
    does.
    """
    run = tmp / "run"
    run.mkdir(exist_ok=True)
    spool = make_spool_root(str(run))
    environment = job_environment(str(run), spool, options or HookOptions(), base or plain_environment())
    process = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout_s, cwd=tmp, check=False
    )
    assert not drain_spools(Path(spool))
    return Recorded(process, run)


def run_plain(tmp: Path, command: list[str], timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """The same job without the hook."""
    return subprocess.run(
        command,
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=tmp,
        check=False,
    )


def torchrun(script: str, *arguments: str, ranks: int = 2) -> list[str]:
    """A torchrun command for a script of ``tests/jobs``."""
    return [*TORCHRUN, str(ranks), str(JOBS / script), *arguments]


def one_rank(script: str, *arguments: str) -> list[str]:
    """A script of ``tests/jobs`` as the only rank of its job, with the variables that torchrun would set."""
    variables = ["RANK=0", "LOCAL_RANK=0", "WORLD_SIZE=1", "LOCAL_WORLD_SIZE=1"]
    address = ["MASTER_ADDR=127.0.0.1", "MASTER_PORT=0"]
    return ["env", *variables, *address, sys.executable, str(JOBS / script), *arguments]
