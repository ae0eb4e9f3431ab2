"""Two hundred jobs drawn from fixed seeds: 100 as profiler traces, 100 as run directories with step logs.

The kinds of planted causes alternate, so that each occurs on devices and on CPUs. Everything else is random.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.generator import SMALL, Config, HostClock, Plant, When, cpu_job, generate
from tests.generator.model import ACCELERATOR_PLANTS, JOB_PLANTS, RANK_PLANTS, STRUCTURAL
from tests.generator.rundirectory import generate_run
from tests.measure.recorded import Job
from tests.measure.recorded import plant as extra_of
from tests.measure.recorded import record as record_by_hand

TRACES, RUNS, LOGS = 100, 66, 34
"""Numbers of cases: profiler traces, run directories of the generator, step logs of whole epochs."""
KINDS = ("healthy", *RANK_PLANTS, *JOB_PLANTS)
EXTRAS = ("data", "forward", "backward", "optimizer", "host", "gc", "save")
"""Work that may take longer on a rank in a job of whole epochs."""


def names() -> list[str]:
    """Names of all cases. A case is determined by its name."""
    traces = [f"trace-{number:03}-{_kind(number)}" for number in range(TRACES)]
    runs = [f"run-{number:03}-{_kind(number)}" for number in range(RUNS)]
    return traces + runs + [f"log-{number:03}" for number in range(LOGS)]


def make(name: str, folder: Path) -> Path:
    """Write the case. Returns the path to analyse."""
    form, number = name.split("-")[:2]
    rng = random.Random(f"net {form} {number}")
    place = folder / form
    if form == "trace":
        generate(_trace_config(int(number), rng), place)
    elif form == "run":
        config = _run_config(int(number), rng)
        generate_run(config, place)
        if rng.random() < 0.6:
            for trace in place.glob("ranks/*/trace.json.gz"):
                trace.unlink()
        elif config.world_size > 1 and rng.random() < 0.3:
            shutil.rmtree(place / "ranks" / "00000")
    else:
        job = _epoch_job(rng)
        record_by_hand(place, job, missing=(job.world - 1,) if job.world > 1 and rng.random() < 0.1 else ())
    return place


def _kind(number: int) -> str:
    return KINDS[number % len(KINDS)]


def _on_cpu(number: int, first: int) -> bool:
    """Whether the case is on CPUs. Kinds that can alternate between CPUs and devices; ``first``: the parity of rounds on CPUs."""
    kind = _kind(number)
    return kind not in ACCELERATOR_PLANTS and (number // len(KINDS)) % 2 == first


def _base_config(number: int, rng: random.Random, *, first_on_cpu: int, **changes: Any) -> Config:
    """The configuration of a job, with its planted cause and sometimes a second one."""
    kind, on_cpu = _kind(number), _on_cpu(number, first_on_cpu)
    world = rng.choice((1, 2, 2, 3, 4, 4, 4, 6, 8))
    forward_us = rng.uniform(1500.0, 6000.0)
    changes |= SMALL | {
        "world_size": world,
        "seed": number,
        "jitter": rng.uniform(0.01, 0.1),
        "forward_us": forward_us,
        "backward_us": 2 * forward_us,
        "bucket_bytes": tuple(rng.randint(500_000, 5_000_000) for _ in range(rng.randint(1, 4))),
        "link_bandwidth_gbps": rng.uniform(1.0, 4.0) if on_cpu else rng.uniform(5.0, 100.0),
        "data_us": rng.uniform(100.0, 600.0),
        "item_every": rng.choice((1, 1, 1, 0, 3)),
        "metric_allreduce": rng.random() < 0.2,
        "loader_workers": rng.random() < 0.7,
        "accumulation": 3 if kind == "redundant_sync" else rng.choice((1, 1, 1, 2)),
    }
    if world >= 4 and rng.random() < 0.3:
        changes["hosts"] = (world // 2, world - world // 2)
        changes["clocks"] = (HostClock(), HostClock(rng.randint(-2_000_000, 2_000_000), rng.uniform(-50, 50)))
    config = cpu_job(**changes) if on_cpu else Config(**changes)
    plants = [] if kind == "healthy" else [_plant(kind, config, rng)]
    if plants and rng.random() < 0.2:
        plants.append(_plant(rng.choice(("slow_data", "host_gap_backward", "slow_forward")), config, rng))
    return replace(config, plants=tuple(plants))


def _plant(kind: str, config: Config, rng: random.Random) -> Plant:
    has_ranks = kind in RANK_PLANTS
    ranks = tuple(
        sorted(rng.sample(range(config.world_size), rng.choice((1, 1, 1, min(2, config.world_size)))))
    )
    if kind in STRUCTURAL or rng.random() < 0.6:
        when = When()
    else:
        when = When(
            first=-config.warmup_steps, every=rng.choice((1, 2, 3)), probability=rng.choice((1.0, 0.5))
        )
    return Plant(
        kind,
        ranks=ranks if has_ranks else (),
        ms=rng.uniform(1.0, 12.0),
        factor=rng.uniform(1.3, 2.5) if has_ranks else rng.uniform(2.0, 6.0),
        count=rng.choice((2, 4, 8, 16)),
        position=rng.uniform(0.1, 0.9),
        drain=rng.random() < 0.8,
        when=when,
    )


def _trace_config(number: int, rng: random.Random) -> Config:
    """A job recorded as profiler traces, which may be incomplete."""
    config = _base_config(
        number, rng, first_on_cpu=1, steps=rng.randint(3, 6), include_seq=rng.random() < 0.7
    )
    world, flaw = config.world_size, rng.random()
    if flaw < 0.08:
        config = replace(config, dropped_event_fraction=0.05)
    elif flaw < 0.16 and world > 2:
        config = replace(config, missing_ranks=(rng.randrange(world),))
    elif flaw < 0.24:
        config = replace(config, first_collectives_lost={0: 1})
    elif flaw < 0.32:
        config = replace(config, window_starts_late={world - 1: 2})
    elif flaw < 0.40:
        config = replace(config, kernel_metadata=False, operator_metadata=rng.random() < 0.5)
    elif flaw < 0.45:
        config = replace(config, step_annotations=False)
    elif flaw < 0.52 and world % 2 == 0 and config.backend == "nccl":
        config = replace(config, tensor_parallel=2)
    return config


def _run_config(number: int, rng: random.Random) -> Config:
    """A job recorded as a run directory. Steps before the profiler window are only in the logs."""
    return _base_config(
        number, rng, first_on_cpu=0, steps=rng.randint(2, 3), warmup_steps=rng.choice((16, 24, 40))
    )


def _epoch_job(rng: random.Random) -> Job:
    """A job on CPUs with one or more epochs: evaluations, new workers, metrics, barriers, sharded parameters."""
    world = rng.choice((1, 2, 2, 3, 4, 4, 8))
    job = Job(
        world=world,
        steps=rng.choice((30, 60)),
        data=rng.choice((0.2, 0.5, 1.0, 8.0)),
        host=rng.uniform(0.2, 3.0),
        transfer=rng.choice((0.5, 1.0, 12.0)),
        accumulation=rng.choice((1, 1, 2)),
        no_sync=rng.random() < 0.5,
        ddp=rng.random() < 0.85,
        buffers=rng.random() < 0.3,
        barrier=rng.random() < 0.2,
        gather=rng.choice((0.0, 0.0, 0.0, 3.0)),
        metric=rng.choice(("", "", "blocking", "async")),
    )
    if rng.random() < 0.5:
        job = job.changed(
            epoch=rng.choice((7, 10)),
            evaluates_module=rng.random() < 0.3,
            evaluators=rng.choice((None, None, (0,))),
            restart=rng.choice((0.0, 60.0)),
        )
    if rng.random() < 0.3:
        pace_ms = [rng.uniform(5.0, 40.0) for _ in range(world)]
        job = job.changed(worker=pace_ms.__getitem__)
    if world >= 4 and rng.random() < 0.4:
        hosts = tuple(f"node{rank * 2 // world}" for rank in range(world))
        job = job.changed(
            hosts=hosts, offset_ns={"node1": rng.randint(-(10**7), 10**7)}, drift_ppm={"node1": 20.0}
        )
    added_ms = {rng.choice(EXTRAS): rng.uniform(4.0, 40.0)}
    chance = rng.random()
    if chance < 0.1:
        job = job.changed(extra=lambda rank, step: added_ms if rank == step % world else {})
    elif chance < 0.9:
        job = job.changed(extra=extra_of(rng.randrange(world), rng.choice((1, 1, 1, 3, 10)), **added_ms))
    return job
