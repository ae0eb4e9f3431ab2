"""A job on two hosts, with a fast link, and with a slow one that must be reported."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

from ddpdoctor.analysis import analyze
from tests.exam.planted import Case, Fault
from tests.launch.two_hosts import two_hosts, why_not

from .draw import program
from .kinds import PACED, Asked
from .record import JOB_S, RUN, environment, recorded

NAMES = ("trap-fast-link", "slow-link")
RULES = (
    "allreduce/communication-bound",
    "allreduce/slow-transfer",
    "allreduce/slow-link",
    "allreduce/not-overlapped",
)
WIDE = Asked(shape={**PACED, "step_ms": 40.0, "width": 300})
"""A job with 0.4 MB of gradients."""


def record(name: str, seed: int, folder: Path) -> Case:
    """Record the job ``name``. Raises RuntimeError if two hosts cannot be simulated here."""
    if reason := why_not():
        raise RuntimeError(reason)
    if folder.exists():
        shutil.rmtree(folder)
    fast_ms = _recorded_ms(seed, folder, None)
    if name == "trap-fast-link":
        case = Case(seed, "named", fast_ms, (), trap=name)
    else:
        shutil.rmtree(folder)
        slow_ms = _recorded_ms(seed, folder, random.Random(seed).uniform(80, 200))
        case = Case(seed, "named", slow_ms, (Fault(name, RULES, None, slow_ms - fast_ms),))
    case.write(folder)
    return case


def _recorded_ms(seed: int, folder: Path, megabits: float | None) -> float:
    """Mean step time of the job with one rank per host, each under its own ``ddpdoctor run``."""
    program(seed, folder / "job", WIDE)
    with two_hosts(megabits) as hosts:
        halves = []
        for node, device in enumerate(hosts.names):
            command = hosts.on(node, recorded(folder, [*hosts.torchrun(node), "train.py"]))
            variables = environment() | {"GLOO_SOCKET_IFNAME": device}
            with (folder / "job" / f"output-{node}.txt").open("w") as output:
                halves.append(
                    subprocess.Popen(command, cwd=folder / "job", env=variables, stdout=output, stderr=output)
                )
        try:
            for half in halves:
                half.wait(JOB_S)
        finally:
            for half in halves:
                half.kill()
    mean_ms = analyze(str(folder / RUN)).steps.mean_ms
    if mean_ms is None:
        raise RuntimeError(f"no steps were recorded on two hosts, see {folder}/job")
    return mean_ms
