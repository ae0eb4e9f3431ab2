"""Randomly drawn jobs with or without a planted cause, and whether the measurement finds it.

``python -m tests.measure.heldout FIRST COUNT`` prints the confusion for the seeds FIRST to FIRST + COUNT - 1.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from tests.generator import Config, HostClock, Plant, cpu_job, generate
from tests.generator.simulate import simulate
from tests.measure.traced import accused, measured

CAUSE = {
    "slow_data": "data",
    "slow_h2d": "copy",
    "slow_forward": "compute",
    "slow_backward_kernels": "compute",
    "throttled": "compute",
    "uneven_work": "uneven",
    "host_gap_forward": "host",
    "host_gap_backward": "host",
    "gc_pause": "host",
    "host_work_end_of_step": "host",
    "checkpoint": "checkpoint",
}
ON_CPUS = {"host_gap_forward": "compute", "gc_pause": "compute"}
"""A pause inside the forward looks like the forward where no device stands idle beside it."""
NOT_ON_CPUS = ("slow_h2d", "checkpoint")
LEAST_SHARE = 0.01
"""A cause that costs less than this share of the step, as where the host runs ahead of its device, need not be
found."""


@dataclass(frozen=True)
class Verdict:
    """What came out of one job."""

    seed: int
    kind: str
    """The plant; "none" without one."""
    outcome: str
    """"right", "right, and more", "wrong", "missed", "quiet" (rightly), "false alarm"."""
    said: dict[str, list[int]]
    wanted: dict[str, list[int]]
    true_share: float
    cost_error: float
    """Predicted minus true cost as a share of the step."""


def draw(seed: int) -> Config:
    """A job and its cause, from the seed alone."""
    rng = random.Random(f"held out {seed}")
    world = rng.randint(2, 16)
    on_cpu = rng.random() < 0.25
    forward_us = rng.uniform(1500.0, 8000.0)
    buckets = rng.randint(1, 8)
    gbps = rng.choice([1.0, 2.0, 4.0]) if on_cpu else rng.uniform(10.0, 200.0)
    ratio = rng.uniform(0.05, 0.8)
    sizes = [rng.uniform(0.3, 1.0) for _ in range(buckets)]
    total_bytes = ratio * 2 * forward_us * gbps * 1000.0 / (2 * (world - 1) / world)
    kernels = rng.randint(20, 80)
    changes = {
        "world_size": world,
        "seed": seed,
        "steps": rng.randint(3, 8),
        "jitter": rng.uniform(0.01, 0.1),
        "forward_kernels": kernels,
        "backward_kernels": 2 * kernels,
        "forward_us": forward_us,
        "backward_us": 2 * forward_us,
        "bucket_bytes": tuple(max(4, int(total_bytes * size / sum(sizes))) for size in sizes),
        "link_bandwidth_gbps": gbps,
        "data_us": rng.uniform(100.0, 600.0),
        # A host that never waits for its device runs ahead until the queue is full, here within the warm-up.
        "item_every": rng.choice([1, 1, 1, 0]),
        "queue_depth": 4 * kernels,
        "warmup_steps": 4,
        "metric_allreduce": rng.random() < 0.2,
        "include_seq": rng.random() < 0.8,
        "accumulation": rng.choice([1, 1, 1, 2]),
    }
    if world >= 4 and rng.random() < 0.3:
        changes["hosts"] = (world // 2, world - world // 2)
        changes["clocks"] = (HostClock(), HostClock(rng.randint(-2_000_000, 2_000_000), rng.uniform(-50, 50)))
    job = cpu_job(**changes) if on_cpu else Config(**changes)
    if rng.random() < 0.3:
        return job
    small = total_bytes < 20e6
    # A state of a few megabytes is not told from other copies to the host.
    kind = rng.choice(
        [
            kind
            for kind in CAUSE
            if not (on_cpu and kind in NOT_ON_CPUS) and not (small and kind == "checkpoint")
        ]
    )
    return replace(job, plants=(_plant(kind, job, rng),))


def _plant(kind: str, job: Config, rng: random.Random) -> Plant:
    """A cause that takes 5 to 40 % of the step on one rank."""
    step_us = simulate(replace(job, steps=2), record=False).step_us()[-1]
    added_us = rng.uniform(0.05, 0.4) * step_us
    computing_us = job.accumulation * (job.forward_us + job.backward_us)
    return Plant(
        kind,
        ranks=(rng.randrange(job.world_size),),
        ms=added_us / 1000.0,
        factor=1.0 + added_us / computing_us,
        position=rng.uniform(0.1, 0.9),
    )


def judge(seed: int) -> Verdict:
    """Generate, measure, compare."""
    config = draw(seed)
    with tempfile.TemporaryDirectory() as folder:
        truth = generate(config, Path(folder) / "traces")
        measurement = measured(Path(folder) / "traces")
    said = accused(measurement)
    total = measurement.facts.late.total
    found_ms = total.ms_per_step if total else 0.0
    mean_ms = truth.mean_step_us / 1e3
    if not config.plants:
        outcome = "false alarm" if said else "quiet"
        return Verdict(seed, "none", outcome, said, {}, 0.0, found_ms / mean_ms)
    plant, (told,) = config.plants[0], truth.plants
    cause = ON_CPUS.get(plant.kind, CAUSE[plant.kind]) if config.backend == "gloo" else CAUSE[plant.kind]
    wanted = {cause: list(plant.ranks)}
    late = measurement.facts.late
    first = max(said, key=lambda name: getattr(late, name).ms_per_step) if said else None
    if plant.kind == "throttled":
        # All kernels are slower, those of the optimizer too.
        said.pop("optimizer" if said.get("optimizer") == list(plant.ranks) else "", None)
    if said == wanted:
        outcome = "right"
    elif first is None:
        outcome = "missed" if told.share >= LEAST_SHARE else "quiet"
    else:
        outcome = "right, and more" if {first: said[first]} == wanted else "wrong"
    error = found_ms / mean_ms - told.share
    return Verdict(seed, plant.kind, outcome, said, wanted, told.share, error)


def main(first: int, count: int) -> Counter[str]:
    """Judge the seeds, print what went wrong, and count."""
    confusion: Counter[str] = Counter()
    errors = []
    for seed in range(first, first + count):
        verdict = judge(seed)
        confusion[verdict.outcome] += 1
        errors.append(abs(verdict.cost_error))
        if verdict.outcome not in ("right", "quiet"):
            print(verdict, flush=True)
    errors.sort()
    print(dict(confusion))
    print(
        f"error of the price: median {errors[len(errors) // 2]:.2%}, p90 {errors[len(errors) * 9 // 10]:.2%} of the step"
    )
    return confusion


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
