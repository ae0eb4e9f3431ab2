"""What a simulated job is like, and what is wrong with it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Planned:
    """One fault: ``us`` is its size in a step that has it, every ``every``-th one; ``ranks`` None: all alike."""

    kind: str
    ranks: tuple[int, ...] | None
    us: float
    every: int = 1
    first: int = 0

    def hits(self, rank: int, step: int) -> bool:
        return (self.ranks is None or rank in self.ranks) and step % self.every == self.first


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What of the job the traces hold."""

    operators: bool
    stacks: bool
    runtime: bool
    shapes: bool
    nccl_metadata: bool
    sequence_numbers: bool
    step_annotations: bool
    lost_share: float
    first_step: tuple[int, ...]
    last_step: tuple[int, ...]
    cut: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Setup:
    """One job. Times are microseconds of true time; ``layers_us`` are the forward's large kernels, first layer first."""

    seed: int
    host_of: tuple[int, ...]
    layers_us: tuple[float, ...]
    layer_bytes: tuple[int, ...]
    bucket_of: tuple[int, ...]
    bytes_per_us: float
    latency_us: float
    hierarchical: bool
    launch_us: float
    data_us: float
    kernel_noise: float
    end_spread: float
    host_noise: float
    reads_loss: bool
    steps: int
    offset_us: tuple[float, ...]
    drift_ppm: tuple[float, ...]
    recorded: Recorded
    faults: tuple[Planned, ...] = ()
    short: bool = False
    """Whether the window has two to four steps."""

    @property
    def world(self) -> int:
        return len(self.host_of)

    def on_host(self, host: int) -> tuple[int, ...]:
        return tuple(rank for rank, its in enumerate(self.host_of) if its == host)
