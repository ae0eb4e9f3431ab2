"""``ddpdoctor demo``: run, record and diagnose a two-rank job with a planted fault."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import click

from ddpdoctor.cli.session import say
from ddpdoctor.demo import FAULTS, JOB, Fault, find_fault
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.launch.options import RunOptions

_HANG_AFTER_S = 10.0
"""Hang threshold, much longer than the demo's steps."""
_TRIAL_STEPS, _TRIAL_ROUNDS = 80, 3
"""Steps of each trial, which then takes some seconds, and rounds."""
_UNLIMITED_STEPS = 10_000
"""Steps of a job that trials end early."""


@click.command("demo")
@click.option(
    "--fault",
    default="slow-data-one-rank",
    show_default=True,
    metavar="NAME",
    help="Fault to plant; see --list.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Run directory to write. [default: ddpdoctor-runs/<UTC time>-job]",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    metavar="N",
    help="Number of optimizer steps.",
)
@click.option(
    "--try", "tries", is_flag=True, help="Afterwards measure what the fixes gain, with `ddpdoctor try`."
)
@click.option("--list", "list_faults", is_flag=True, help="List the faults and exit.")
def command(fault: str, out: Path | None, steps: int, tries: bool, list_faults: bool) -> None:
    """Train a small model on two CPU ranks with a planted fault, under `ddpdoctor run`, and diagnose it.

    \b
    Examples:
      ddpdoctor demo
      ddpdoctor demo --fault barrier --out demo-barrier
      ddpdoctor demo --try
    """
    if list_faults:
        for known in FAULTS:
            click.echo(f"{known.name:22} {known.description}")
        return
    chosen = find_fault(fault)
    if importlib.util.find_spec("torch") is None:
        raise DdpDoctorError(
            "the demo trains a model and needs PyTorch in this environment: pip install torch, "
            "or in a checkout of ddpdoctor: pip install '.[torch]'."
        )
    from ddpdoctor.cli.run_and_present import ReportOptions, run_and_present

    if tries:
        _run_and_try(chosen, out, steps)
    click.echo(f"Planted fault {chosen.name}: {chosen.description}", err=True)
    job = _job_command(chosen.name, steps)
    options = RunOptions(out=out)
    if chosen.hangs:
        options = RunOptions(out=out, hang_after_s=_HANG_AFTER_S, on_hang="kill")
        click.echo(f"The job will hang; {_HANG_AFTER_S:.0f} s later it is diagnosed and ended.", err=True)
    run_and_present(job, options, ReportOptions(), {"OMP_NUM_THREADS": "1", **os.environ})


def _job_command(fault: str, steps: int) -> list[str]:
    """The demo's command. -P prevents imports from the working directory, which may belong to another user."""
    launcher = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*launcher, str(JOB), "--fault", fault, "--steps", str(steps)]


def _run_and_try(fault: Fault, out: Path | None, steps: int) -> NoReturn:
    """Run the demo, then measure the changes that its findings suggest, with the same commands as a user."""
    if fault.hangs:
        raise DdpDoctorError("this fault hangs, and no setting fixes a hang: there is nothing to try.")
    from ddpdoctor.cli.session import diagnosis_at
    from ddpdoctor.experiment import own_command, proposals
    from ddpdoctor.rundir import DIAGNOSIS_FILE

    run = out or Path("ddpdoctor-runs") / time.strftime("%Y%m%dT%H%M%SZ-demo", time.gmtime())
    own, environment = own_command(), {"OMP_NUM_THREADS": "1", **os.environ}
    demo = [*own, "demo", "--fault", fault.name, "--out", str(run), "--steps", str(steps)]
    code = _wait_for_exit_code(subprocess.Popen(demo, env=environment))
    if code:
        raise SystemExit(code)
    diagnosis = diagnosis_at(str(run / DIAGNOSIS_FILE))
    if not proposals(diagnosis, bounds=True):
        say("These findings suggest no change that can be tried without editing the script.", err=True)
        raise SystemExit(0)
    # If no setting fixes the fault, measure the upper bound of a fix.
    selection = ["--all"] if proposals(diagnosis) else ["--all", "--bounds"]
    trials = ["try", str(run), *selection, "--rounds", str(_TRIAL_ROUNDS), "--steps", str(_TRIAL_STEPS)]
    say(f"Now measuring what the fixes gain: ddpdoctor {shlex.join(trials)} -- torchrun ...", err=True)
    os.execve(own[0], [*own, *trials, "--", *_job_command(fault.name, _UNLIMITED_STEPS)], environment)


def _wait_for_exit_code(process: subprocess.Popen[bytes]) -> int:
    """Wait for ``process`` and return its exit code. Ctrl-C also reaches the process, which then ends by itself."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return process.wait()
