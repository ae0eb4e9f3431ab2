"""Programs with planted work at random times of the run: in every step, in every n-th, since a step, until one, growing, once, twice.

The price is not measured with a twin: the job itself records each time that it does the work, with its seconds.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from tests.exam.planted import Case, Fault, When

from . import twin
from .draw import HEALTHY_SHARE, Program, program
from .kinds import KINDS, Asked, Shape
from .record import JOB_S, busy_s, load_between, run

STEPS = 399
"""Steps of the recorded run; a multiple of three for programs of three epochs."""
PATTERNS = ("always", "every n-th", "since", "until", "growing", "once", "twice")
WORK = {"data": "data", "forward": "compute", "checkpoint": "checkpoint"}
"""Kind of work by the first word of the kind of fault; all others are host work."""
KINDS_OF_WORK = tuple(
    kind
    for kind in KINDS
    if kind.split("-")[0] in ("data", "host", "wait", "gap", "forward") and KINDS[kind].weight
)


def record(seed: int, folder: Path) -> Case:
    """Draw and run the program of ``seed``. Writes its run directory and ground truth to ``folder``."""
    if folder.exists():
        shutil.rmtree(folder)
    job, draw = folder / "job", random.Random(f"exam when {seed}")
    how = "" if draw.random() < HEALTHY_SHARE else draw.choice(PATTERNS)
    kinds = (*KINDS_OF_WORK, "checkpoint") if how == "every n-th" else KINDS_OF_WORK
    # Paced, so that a busy machine hardly changes the step time.
    shape: Shape = {"model": "accelerator", "workers": 0, "parts": 1, "step_ms": draw.uniform(8, 16)}
    drawn = program(seed, job, Asked(draw.choice(kinds) if how else "", shape, noted=True))
    plan = json.loads((job / "plan.json").read_text())
    plan["rounds"] = (0, 0)
    for extra in plan["extras"].values():
        extra.update(share=0.5, every=1)  # as long as the rest of a step: the unit of the schedule below
    (job / "plan.json").write_text(json.dumps(plan))
    twin.run(job, drawn.world, JOB_S)
    plan = json.loads((job / "plan.json").read_text())
    plan["steps"] = STEPS
    every = None
    for extra in plan["extras"].values():
        every, parts = schedule(draw, how, extra["wanted_ms"] / 1e3)
        extra["by_step"] = [extra["amount"] * part for part in parts]
    (job / "plan.json").write_text(json.dumps(plan))
    before = busy_s()
    run(drawn, folder)
    case = truth(drawn, how, every, plan, job)
    case.shape["load"] = load_between(before, busy_s())
    case.write(folder)
    return case


def schedule(draw: random.Random, how: str, unit_s: float) -> tuple[int | None, list[float]]:
    """(Period of the steps with work or None, amount of work in each step in multiples of ``unit_s``)."""
    every = draw.randint(4, 30) if how == "every n-th" else None
    at = draw.randrange(STEPS // 4, 3 * STEPS // 4)
    pauses = draw.sample(range(STEPS // 10, STEPS - 5, 20), 2 if how == "twice" else 1)
    amount = draw.uniform(0.4, 1.5)
    amounts = {
        "always": lambda step: amount,
        "every n-th": lambda step: 5 * amount if step % (every or 1) == at % (every or 1) else 0,
        "since": lambda step: amount if step >= at else 0,
        "until": lambda step: amount if step < at else 0,
        "growing": lambda step: 2 * amount * step / STEPS,
        "once": lambda step: 2 * amount / unit_s if step in pauses else 0,
        "twice": lambda step: 2 * amount / unit_s if step in pauses else 0,
    }
    return every, [amounts[how](step) for step in range(STEPS)]


def truth(drawn: Program, how: str, every: int | None, plan: dict[str, Any], job: Path) -> Case:
    """The ground truth from the job's records. A step ends with the optimizer, so work after it belongs to the next step."""
    faults = []
    for each in drawn.faults:
        ranks = range(drawn.world) if each.ranks is None else each.ranks
        noted = np.array([np.fromfile(job / f"planted-{rank}") for rank in ranks])
        if plan["extras"][each.key]["site"] == "after":
            noted = np.pad(noted, ((0, 0), (1, 0)))[:, :-1]
        steps = [int(step) for step in np.flatnonzero(noted.any(axis=0))]
        seconds = (float(noted.sum() / len(ranks)), float(noted.max(axis=0).sum()))
        work = (
            "host"
            if each.rules == KINDS[each.kind].rules_without_loader
            else WORK.get(each.kind.split("-")[0], "host")
        )
        ends = tuple(steps) if how in ("once", "twice") else (steps[0], steps[-1])
        when = When(how, work, ends, STEPS, seconds, every)
        culprits = None if each.ranks is None else tuple(each.ranks)
        lines = tuple(drawn.lines[each.key])
        faults.append(
            Fault(each.kind, each.rules, culprits, 1e3 * seconds[0] / STEPS, lines=lines, when=when)
        )
    base_ms = json.loads((job / "twin.json").read_text())["base_ms"]
    return Case(drawn.seed, "when", base_ms, tuple(faults), shape=drawn.shape)
