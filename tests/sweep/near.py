"""Jobs drawn so that decisions are close: little is planted, windows are short, and computation goes on some time after what it
waited for."""

from __future__ import annotations

import random
from pathlib import Path

from tests.generator import Config, Plant, When, cpu_job, generate
from tests.generator.rundirectory import generate_run

COUNT = 60
KINDS = (
    "slow_data",
    "slow_forward",
    "slow_backward_kernels",
    "throttled",
    "host_gap_backward",
    "host_work_end_of_step",
)
STEP_MS = 6.0
"""About, of all of them; what is planted is 1 to 15 % of it."""


def names() -> list[str]:
    """Names of all cases; each holds all that the case follows from."""
    return [f"near-{number:03}-{KINDS[number % len(KINDS)]}" for number in range(COUNT)]


def make(name: str, folder: Path) -> Path:
    """Write the case; returns what is to be analysed."""
    number, kind = int(name.split("-")[1]), name.split("-")[2]
    rng = random.Random(f"sweep {name}")
    share, world = rng.uniform(0.01, 0.15), rng.choice((2, 2, 3, 4, 8))
    plant = Plant(
        kind,
        ranks=(rng.randrange(world),),
        ms=share * STEP_MS,
        factor=1.0 + share,
        when=When(every=rng.choice((1, 1, 1, 2, 3)), probability=rng.choice((1.0, 1.0, 0.7))),
    )
    form = (number // len(KINDS)) % 3
    shape = {
        "world_size": world,
        "seed": number,
        "jitter": rng.uniform(0.01, 0.08),
        "forward_us": 1500.0,
        "backward_us": 3000.0,
        "forward_kernels": 8,
        "backward_kernels": 16,
        "bucket_bytes": tuple(rng.randint(500_000, 3_000_000) for _ in range(rng.randint(1, 4))),
        "resume_us": rng.uniform(0.0, 300.0),
        "plants": (plant,),
    }
    if form == 0:
        width = rng.choice((1, world))
        generate(Config(**shape, tensor_parallel=width, steps=rng.randint(3, 10)), folder / "near")
    elif form == 1:
        generate(cpu_job(**shape, steps=rng.randint(3, 10)), folder / "near")
    else:
        generate_run(cpu_job(**shape, steps=2, warmup_steps=rng.choice((12, 24, 48))), folder / "near")
    return folder / "near"
