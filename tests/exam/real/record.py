"""Runs a drawn program: its twin, to measure the price of its faults, and then under ``ddpdoctor run``."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from tests.exam.planted import Case, Fault

from . import twin
from .draw import Program, program
from .kinds import KINDS, Asked
from .twin import block_ms, differences_ms, error_ms, is_sure

REPOSITORY = Path(__file__).parents[3]
RUN = "run"
NOTHING: Mapping[str, str] = MappingProxyType({})
JOB_S = 300
MIN_PRICE_SHARE = 0.04
MAX_NOISE = 0.25


def record(seed: int, folder: Path, asked: Asked | None = None, trap: str = "") -> Case:
    """Draw, time and record the program of ``seed``. Writes its run directory and ground truth to ``folder``."""
    if folder.exists():
        shutil.rmtree(folder)
    drawn = program(seed, folder / "job", asked)
    before = busy_s()
    twin.run(folder / "job", drawn.world, JOB_S)
    run(drawn, folder)
    timed = json.loads((folder / "job" / "twin.json").read_text())
    case = truth(drawn, timed, load_between(before, busy_s()))
    if asked is not None:
        case = dataclasses.replace(case, half="named", trap=trap)
    case.write(folder)
    return case


def truth(drawn: Program, timed: dict[str, Any], load: dict[str, float]) -> Case:
    """The ground truth, from the program's times with and without each fault."""
    steady = all(KINDS[each.kind].steady for each in drawn.faults)
    blocks = {name: [block_ms(block, steady) for block in of] for name, of in timed["blocks"].items()}
    step_ms = median(blocks["all"] or [timed["base_ms"]])
    several = len(drawn.faults) > 1
    faults, doubts = [], []
    for each in drawn.faults:
        without = blocks[f"without {each.key}"]
        saved = differences_ms(blocks["all"], without)
        price, error = median(saved), error_ms(saved)
        alone = None
        if several:
            (rest,) = (other.key for other in drawn.faults if other is not each)
            alone = median(differences_ms(blocks[f"without {rest}"], blocks["none"]))
        doubt = _doubt(price, error, step_ms, price if alone is None else alone)
        if doubt is None and not (KINDS[each.kind].priced and is_sure(saved, step_ms)):
            doubt = "noisy"
        if doubt:
            doubts.append(f"{doubt}: {each.kind} saved {[round(ms, 2) for ms in saved]} of {step_ms:.1f} ms")
        marks = [each.key]
        if drawn.shape["workers"] and each.kind.partition("-")[0] in ("data", "worker"):
            marks = [each.key, "loop", *(["loader"] if each.kind == "worker-start" else [])]
        lines = [line for mark in marks for line in drawn.lines.get(mark, [])] if each.with_line else []
        ranks = None if each.ranks is None else tuple(each.ranks)
        planted = Fault(each.kind, each.rules, ranks, price, tuple(lines), alone_ms=alone, error_ms=error)
        faults.append(planted)
    shape = {**drawn.shape, "base_ms": timed["base_ms"], "load": load}
    joint = median(differences_ms(blocks["all"], blocks["none"])) if several else None
    given = (tuple(faults), drawn.tolerated, shape, tuple(doubts))
    return Case(drawn.seed, "real", step_ms, *given, joint_ms=joint)


def _doubt(price: float, error: float, step_ms: float, alone: float) -> str | None:
    """Why the fault's price is not fully trusted: it is almost zero ("cheap"), may be ("unclear"), or is uncertain ("noisy").

    Another fault can hide it but not increase its cost, so a price above the cost alone indicates noise.
    """
    min_price = MIN_PRICE_SHARE * step_ms
    if price - error < min_price:
        return "cheap" if price + error < 2 * min_price else "unclear"
    return "noisy" if error > MAX_NOISE * price or price - alone > MAX_NOISE * price else None


def environment() -> dict[str, str]:
    """Environment of a job on few cores that imports ddpdoctor from this checkout."""
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def recorded(folder: Path, command: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """``command`` under ``ddpdoctor run``, recording to ``folder / RUN``."""
    recorder = [sys.executable, "-m", "ddpdoctor", "run", "--no-analysis", "-q", "--out", str(folder / RUN)]
    return [*recorder, *options, "--", *command]


def run(
    drawn: Program, folder: Path, options: Sequence[str] = (), variables: Mapping[str, str] = NOTHING
) -> None:
    """Record the program in ``folder / "job"`` under ``ddpdoctor run`` with these options and environment variables."""
    job = folder / "job"
    with (job / "output.txt").open("ab") as output:
        done = subprocess.run(
            recorded(folder, drawn.command(job), options),
            cwd=job,
            env={**environment(), **variables},
            stdout=output,
            stderr=output,
            timeout=JOB_S,
            check=False,
        )
    # Gloo sometimes aborts in the destruction of the group; the recording is complete then.
    if done.returncode not in (0, 1):
        raise RuntimeError(f"seed {drawn.seed} ended with {done.returncode}, see {job}/output.txt")


def busy_s() -> tuple[float, float, float]:
    """(CPU seconds of the machine, CPU seconds of our children, elapsed seconds of all cores)."""
    fields = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    ticks = os.sysconf("SC_CLK_TCK")
    own = os.times()
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / ticks, own.children_user + own.children_system, sum(fields) / ticks


def load_between(before: tuple[float, float, float], after: tuple[float, float, float]) -> dict[str, float]:
    """Shares of the machine that other processes used and that were idle while the program ran."""
    busy, own, whole = (b - a for a, b in zip(before, after, strict=True))
    return {"others": round((busy - own) / whole, 3), "idle": round(1 - busy / whole, 3)}
