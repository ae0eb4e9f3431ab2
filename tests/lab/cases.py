"""The cases of one run of the lab, drawn afresh from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .faults import FAULTS, Fault, find
from .running import Job
from .traps import TRAPS, Trap

MILD = 0.09
STRONG = (0.25, 0.45)
_STEP_MS = {2: (5.0, 15.0, 40.0, 100.0), 4: (40.0, 100.0, 200.0)}
_LEAST_MS = {"byhand": 40.0, "cnn": 40.0}
"""What these jobs do in every step (an all_reduce for each parameter, a broadcast of buffers, a worker's queue) is a real cost of a
shorter step, and no healthy job to measure a fault against."""
_SCRIPTS = ("mlp", "cnn", "transformer", "accumulate", "byhand", "spawned")
_TWO = (("data-one", "log-one"), ("forward-one", "many-metrics"))


@dataclass(frozen=True)
class Case:
    """One job with its faults, or a trap."""

    name: str
    job: Job
    seed: int
    size: str
    share: float = 0.0
    """Of the step that the fault shall take."""
    fault: Fault | None = None
    second: Fault | None = None
    trap: Trap | None = None
    rank: int = 0


def draw(seed: int, only: str = "") -> list[Case]:
    """All cases whose name contains ``only``. What is drawn for one does not depend on which are chosen."""
    random = Random(seed)
    jobs = {
        script: [
            Job(script, ranks, max(random.choice(_STEP_MS[ranks]), _LEAST_MS.get(script, 0.0)))
            for ranks in (2, 4)
        ]
        for script in _SCRIPTS
    }
    cases = [_trap(trap, random) for trap in TRAPS]
    for fault in FAULTS:
        for size in ("mild", "strong") if fault.sized else ("strong",):
            cases.append(_faulty(fault, size, jobs, random))
    for one, other in _TWO:
        cases.append(_faulty(find(one), "strong", jobs, random, second=find(other)))
    return [case for case in cases if only in case.name]


def _trap(trap: Trap, random: Random) -> Case:
    ranks = trap.ranks or random.choice((2, 4))
    return Case(
        trap.name, Job(trap.script, ranks, trap.step_ms), random.randrange(10**9), "healthy", trap=trap
    )


def _faulty(
    fault: Fault, size: str, jobs: dict[str, list[Job]], random: Random, second: Fault | None = None
) -> Case:
    scripts = [s for s in fault.scripts if second is None or s in second.scripts]
    job = random.choice(jobs[random.choice(scripts)])
    if fault.name == "uneven-batch":
        job = Job(job.script, job.ranks, max(job.step_ms, 40.0), batch=32)
    elif not fault.sized:
        job = Job(job.script, 2, 15.0)
    name = "+".join(f.name for f in (fault, second) if f)
    return Case(
        f"{name}/{size}",
        job,
        random.randrange(10**9),
        size,
        MILD if size == "mild" else random.uniform(*STRONG),
        fault,
        second,
        rank=random.randrange(job.ranks) if fault.rank is None else fault.rank,
    )
