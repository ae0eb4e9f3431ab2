"""A job on two hosts, over a link that is as fast as it goes, and over a slow one, which must be named."""

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
"""With 0.4 MB of gradients."""


def record(name: str, seed: int, folder: Path) -> Case:
    """The job of that name. Raises RuntimeError where two hosts cannot be had here."""
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
    """Mean step of the job with one rank on each host, each under its own ``ddpdoctor run``."""
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
