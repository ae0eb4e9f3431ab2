"""The process groups of a job: all ranks, with tensor parallelism the two dimensions of a device mesh, and the hosts of a job
that reduces within them first."""

from __future__ import annotations

from dataclasses import dataclass

from .model import Config

ABBREVIATED_FROM = 30
"""torch abbreviates lists of more than 30 ranks in the arguments of events."""


@dataclass(frozen=True)
class Group:
    """A process group. Ranks with one name and different members form groups of their own."""

    kind: str
    """"world", "data", "tensor" or "host"."""
    name: str
    description: str
    ranks: tuple[int, ...]
    stream: int

    @property
    def text(self) -> str:
        """The ranks as torch writes them in arguments."""
        texts = [str(rank) for rank in self.ranks]
        if len(texts) > ABBREVIATED_FROM:
            texts = [*texts[: ABBREVIATED_FROM - 1], "...", texts[-1]]
        return f"[{', '.join(texts)}]"

    @property
    def stride(self) -> int:
        """Distance between neighbouring ranks."""
        return self.ranks[1] - self.ranks[0] if len(self.ranks) > 1 else 1


def process_groups(config: Config) -> list[Group]:
    """All groups. Tensor-parallel groups hold neighbouring ranks, data-parallel ones every n-th rank."""
    size, width = config.world_size, config.tensor_parallel
    groups = [Group("world", "0", "default_pg", tuple(range(size)), 20)]
    if width > 1:
        for first in range(width):
            groups.append(Group("data", str(1 + first), "mesh_dp", tuple(range(first, size, width)), 24))
        for index, first in enumerate(range(0, size, width)):
            ranks = tuple(range(first, first + width))
            groups.append(Group("tensor", str(1 + width + index), "mesh_tp", ranks, 28))
    first = 0
    for index, count in enumerate(config.hosts if config.within_hosts_first else ()):
        ranks = tuple(range(first, first + count))
        groups.append(Group("host", str(len(groups)), f"host_{index}", ranks, 32))
        first += count
    return groups
