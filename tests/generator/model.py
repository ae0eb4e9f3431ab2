"""Configuration of a generated job: its shape, its clocks, the flaws of its recording, and its planted causes with their effects on a
rank in a step.

Times are microseconds of the true clock unless the name says otherwise. Sizes are bytes.

Random draws depend on a key such as ``("forward", rank, step)``, not on the order of the calls. A simulation without one planted cause
must have the same jitter everywhere else, and a shared stream of random numbers would shift all later draws.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np


class Noise:
    """Keyed random draws. The same seed and key always give the same values."""

    def __init__(self, seed: int, jitter: float) -> None:
        self.seed = seed
        self.jitter = jitter

    def draws(self, *key: object) -> np.random.Generator:
        """A separate generator for ``key``. Its first values do not depend on how many are drawn."""
        digest = hashlib.blake2b(repr((self.seed, *key)).encode(), digest_size=16).digest()
        return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64)))

    def factors(self, count: int, *key: object, scale: float = 1.0) -> list[float]:
        """``count`` lognormal factors with mean 1 and the configured jitter (times ``scale``) as sigma."""
        sigma = self.jitter * scale
        if sigma == 0.0:
            return [1.0] * count
        return np.exp(sigma * self.draws(*key).standard_normal(count) - sigma * sigma / 2).tolist()

    def factor(self, *key: object, scale: float = 1.0) -> float:
        """One lognormal factor with mean 1."""
        return self.factors(1, *key, scale=scale)[0]

    def uniform(self, *key: object) -> float:
        """One value in [0, 1)."""
        return float(self.draws(*key).random())


RANK_PLANTS = {
    "slow_data": "the data loader of these ranks takes ms longer",
    "slow_h2d": "the host-to-device copy of these ranks takes ms longer",
    "slow_forward": "the forward kernels of these ranks take ms longer in sum",
    "slow_backward_kernels": "the backward kernels of these ranks take ms longer in sum",
    "throttled": "all kernels of these ranks take factor times as long",
    "uneven_work": "these ranks get batches factor times as large: kernels, copies and Input Dims",
    "host_gap_forward": "the host sleeps for ms at `position` of the forward",
    "host_gap_backward": "the host is busy for ms at `position` of the backward",
    "gc_pause": "the host stands still for ms at a random place of the forward",
    "host_work_end_of_step": "the host works for ms at the end of the step",
    "kernels_before_forward": "kernels of ms in sum between loading the batch and the forward, as of a teacher",
    "kernels_before_backward": "kernels of ms in sum between forward and backward, as of an auxiliary loss",
    "kernels_after_optimizer": "kernels of ms in sum between the optimizer's step and the next batch, as of a metric",
    "checkpoint": "these ranks copy their parameters to the host and write for ms at the end of the step",
}
JOB_PLANTS = {
    "device_sync_item": "`count` calls of .item() in the forward, on every rank",
    "explicit_barrier": "torch.cuda.synchronize() and dist.barrier() at `count` places of the step",
    "slow_link": "every collective (with these ranks in it, if any are named) takes factor times as long on the wire",
    "many_tiny_buckets": "the gradients go out in `count` buckets",
    "no_overlap": "all buckets are launched after the backward",
    "communication_bound": "the gradients are factor times as large",
    "redundant_sync": "each micro-batch is synchronised (no `no_sync`)",
    "launch_bound": "factor times as many kernels, each 1/factor as long",
}
ACCELERATOR_PLANTS = ("slow_h2d", "device_sync_item")
STRUCTURAL = ("many_tiny_buckets", "no_overlap", "communication_bound", "redundant_sync", "launch_bound")


@dataclass(frozen=True)
class When:
    """The recorded steps in which a cause acts: first to last (inclusive), every k-th, with a probability."""

    first: int = 0
    last: int | None = None
    every: int = 1
    probability: float = 1.0

    def active(self, step: int, noise: Noise, *key: object) -> bool:
        """Whether the cause acts in ``step``. Warm-up steps are negative; a cause that always acts also acts in them."""
        if self == When():
            return True
        if step < self.first or (self.last is not None and step > self.last):
            return False
        if (step - self.first) % self.every:
            return False
        return self.probability >= 1.0 or noise.uniform("when", step, *key) < self.probability


@dataclass(frozen=True)
class Plant:
    """A planted cause; RANK_PLANTS and JOB_PLANTS list the kinds. ``ranks``: the ranks that have it; empty: all.

    ``drain``: a host gap starts with an .item(), so that the accelerator is idle during all of it. Without it, queued work hides part
    of the gap; the ground truth's step time without the plant shows the remaining cost.
    """

    kind: str
    ranks: tuple[int, ...] = ()
    ms: float = 0.0
    factor: float = 1.0
    count: int = 1
    position: float = 0.5
    drain: bool = True
    when: When = field(default_factory=When)

    def __post_init__(self) -> None:
        if self.kind not in RANK_PLANTS and self.kind not in JOB_PLANTS:
            raise ValueError(f"unknown plant {self.kind!r}; known: {', '.join((*RANK_PLANTS, *JOB_PLANTS))}")
        if self.kind in STRUCTURAL and self.when != When():
            raise ValueError(
                f"plant {self.kind!r} changes the job's shape and cannot be limited to some steps"
            )


@dataclass(frozen=True)
class HostClock:
    """The clock of one host: local = base + offset + true · (1 + drift)."""

    offset_ns: int = 0
    drift_ppm: float = 0.0


@dataclass(frozen=True)
class Config:
    """A job to generate. The defaults are a healthy, accelerator-bound job with steps of about 14 ms."""

    backend: str = "nccl"
    """"nccl": accelerators; "gloo": everything on the host's CPU (see :func:`cpu_job`)."""
    world_size: int = 4
    hosts: tuple[int, ...] = ()
    """Ranks per host, in rank order; empty: all on one host."""
    steps: int = 8
    warmup_steps: int = 2
    """Simulated before the recording starts."""
    seed: int = 0
    jitter: float = 0.02
    """Sigma of the lognormal jitter on kernels; host times get three times as much."""

    forward_kernels: int = 40
    forward_us: float = 4000.0
    """Sum of the durations of the forward kernels; the same applies to the fields below."""
    backward_kernels: int = 80
    backward_us: float = 8000.0
    optimizer_kernels: int = 6
    optimizer_us: float = 400.0
    launch_us: float = 8.0
    """Host time per launched kernel."""
    launch_latency_us: float = 4.0
    """From the end of the launch call to the earliest start on the accelerator."""
    queue_depth: int = 1024
    """Launches that may be pending before the host blocks (CUDA's launch queue)."""

    bucket_bytes: tuple[int, ...] = (10_000_000,) * 5
    """Gradient buckets in the order of their launch."""
    bucket_position: tuple[float, ...] = ()
    """Share of the backward after which each bucket is ready; empty: evenly spaced, the last at the end."""
    overlap: bool = True
    link_latency_us: float = 20.0
    link_bandwidth_gbps: float = 50.0
    """Bus bandwidth in GB/s: a ring allreduce moves 2(n-1)/n of its bytes over each link."""
    end_jitter_us: float = 15.0
    """Scale of the differences between the ranks' ends of a collective (half-normal, truncated at four times this)."""
    collective_launch_us: float = 45.0
    resume_us: float = 0.0
    """Time from a collective's end to the computation that waits for it, for events and kernels on other streams."""

    data_us: float = 250.0
    loader_workers: bool = True
    batch_size: int = 64
    h2d_bytes: int = 4_000_000
    h2d_pinned: bool = True
    accumulation: int = 1
    """Micro-batches per step."""
    no_sync: bool = True
    """Whether only the last micro-batch synchronises, with gradient accumulation."""
    item_every: int = 1
    """loss.item() after the optimizer in every k-th step; 0: never, so that the host runs ahead."""
    reads_last_step: bool = False
    """Whether the host, after issuing forward and backward, waits for the end of the previous step, without letting the device idle."""
    tensor_parallel: int = 1
    """Number of ranks per replica. They add `tensor_collectives` allreduces to each forward and backward."""
    tensor_collectives: int = 4
    tensor_bytes: int = 2_000_000
    within_hosts_first: bool = False
    """Whether each bucket is first reduced within its host, then across all ranks."""
    metric_allreduce: bool = False
    """Whether Python calls dist.all_reduce with one number at the end of every step."""
    device_times: bool = False
    """Whether the step logs have the CUDA events of the hook."""

    clocks: tuple[HostClock, ...] = ()
    """One clock per host; missing ones show true time."""
    base_time_ns: int = 1_759_308_646_000_000_000
    start_ns: int = 4_458_676_388_068_751
    """True time 0, relative to the base."""

    kernel_metadata: bool = True
    """Collective name, group and sizes on NCCL kernels (torch 2.3 and later)."""
    operator_metadata: bool = True
    """The same metadata on record_param_comms (older recordings lack both)."""
    include_seq: bool = True
    step_annotations: bool = True
    first_collectives_lost: dict[int, int] = field(default_factory=dict)
    """By rank, number of first communication kernels that are missing in its trace; all else is recorded."""
    window_starts_late: dict[int, int] = field(default_factory=dict)
    """By rank, number k: its trace lacks everything that began before the end of its k-th communication kernel."""
    dropped_event_fraction: float = 0.0
    dropped_scope: str = "compute"
    """"compute": communication kernels and annotations are not dropped; "all": all events may be dropped."""
    unrecorded: tuple[str, ...] = ()
    """Categories and names of events that are missing in the traces."""
    unrecorded_on: tuple[int, ...] = ()
    """Ranks in whose traces they are missing; empty: all."""
    missing_ranks: tuple[int, ...] = ()
    compressed: bool = True

    plants: tuple[Plant, ...] = ()

    def __post_init__(self) -> None:
        if self.backend not in ("nccl", "gloo"):
            raise ValueError(f"unknown backend {self.backend!r}")
        if self.world_size % self.tensor_parallel:
            raise ValueError(f"{self.world_size} ranks cannot be split in groups of {self.tensor_parallel}")
        for plant in self.plants:
            if self.backend == "gloo" and plant.kind in ACCELERATOR_PLANTS:
                raise ValueError(f"plant {plant.kind!r} needs an accelerator")

    def host_sizes(self) -> tuple[int, ...]:
        """Ranks per host. Raises ValueError if they do not add up to the world size."""
        sizes = self.hosts or (self.world_size,)
        if sum(sizes) != self.world_size:
            raise ValueError(f"hosts {sizes} do not add up to a world size of {self.world_size}")
        return sizes

    def host_of(self, rank: int) -> int:
        """Index of the host on which ``rank`` runs."""
        for host, size in enumerate(self.host_sizes()):
            if rank < size:
                return host
            rank -= size
        raise ValueError("rank beyond the world size")

    def local_rank(self, rank: int) -> int:
        """Index of ``rank`` on its own host."""
        return rank - sum(self.host_sizes()[: self.host_of(rank)])

    def clock(self, rank: int) -> HostClock:
        """The clock of the host of ``rank``."""
        host = self.host_of(rank)
        return self.clocks[host] if host < len(self.clocks) else HostClock()


SMALL: dict[str, Any] = {
    "forward_kernels": 8,
    "backward_kernels": 12,
    "optimizer_kernels": 2,
    "queue_depth": 64,
}
"""Fields of a job with few events, which is written and measured in half the time."""


def cpu_job(**changes: Any) -> Config:
    """A healthy job on CPUs with Gloo and a slower network. ``changes``: fields of Config."""
    defaults: dict[str, Any] = {
        "backend": "gloo",
        "bucket_bytes": (1_000_000,) * 3,
        "link_latency_us": 150.0,
        "link_bandwidth_gbps": 2.0,
        "end_jitter_us": 40.0,
    }
    return Config(**{**defaults, **changes})


def reshape(config: Config) -> Config:
    """``config`` with the plants applied that change the job's shape instead of single steps."""
    for plant in config.plants:
        if plant.kind == "many_tiny_buckets":
            total = sum(config.bucket_bytes)
            config = replace(config, bucket_bytes=(total // plant.count,) * plant.count, bucket_position=())
        elif plant.kind == "no_overlap":
            config = replace(config, overlap=False)
        elif plant.kind == "communication_bound":
            config = replace(config, bucket_bytes=tuple(int(b * plant.factor) for b in config.bucket_bytes))
        elif plant.kind == "redundant_sync":
            config = replace(config, no_sync=False)
        elif plant.kind == "launch_bound":
            config = replace(
                config,
                forward_kernels=round(config.forward_kernels * plant.factor),
                backward_kernels=round(config.backward_kernels * plant.factor),
            )
    return config


class Effects:
    """The effects of the plants on a rank in a step."""

    def __init__(self, plants: tuple[Plant, ...], noise: Noise) -> None:
        self.plants = plants
        self.noise = noise

    def acting(self, kind: str, rank: int | None, step: int) -> Iterator[Plant]:
        """Plants of ``kind`` that act on ``rank`` (None: on the job) in ``step``."""
        for plant in self.plants:
            if plant.kind != kind or (rank is not None and plant.ranks and rank not in plant.ranks):
                continue
            if plant.when.active(step, self.noise, kind, plant.ranks):
                yield plant

    def added_us(self, kind: str, rank: int, step: int) -> float:
        """Sum of the times ``ms`` of the acting plants, in microseconds."""
        return sum(plant.ms for plant in self.acting(kind, rank, step)) * 1000.0

    def factor(self, kind: str, rank: int | None, step: int) -> float:
        """Product of the factors of the acting plants."""
        product = 1.0
        for plant in self.acting(kind, rank, step):
            product *= plant.factor
        return product

    def gaps(self, kind: str, rank: int, step: int, kernels: int) -> dict[int, list[Plant]]:
        """Acting host gaps by the index of the kernel that they precede."""
        places: dict[int, list[Plant]] = {}
        for plant in self.acting(kind, rank, step):
            index = min(kernels - 1, int(plant.position * kernels))
            places.setdefault(index, []).append(plant)
        return places
