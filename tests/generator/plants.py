"""What the planted causes do to one rank in one step, and to the job's shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .model import Config, Plant
from .noise import Noise


def reshape(config: Config) -> Config:
    """The job with those plants applied that change its shape rather than single steps."""
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
    """Answers what the plants add for a rank and a step."""

    def __init__(self, plants: tuple[Plant, ...], noise: Noise) -> None:
        self.plants = plants
        self.noise = noise

    def acting(self, kind: str, rank: int | None, step: int) -> Iterator[Plant]:
        """Plants of ``kind`` that act on ``rank`` (``None``: on the job) in ``step``."""
        for plant in self.plants:
            if plant.kind != kind or (rank is not None and plant.ranks and rank not in plant.ranks):
                continue
            if plant.when.active(step, self.noise, kind, plant.ranks):
                yield plant

    def added_us(self, kind: str, rank: int, step: int) -> float:
        """Sum of the milliseconds of the acting plants, in microseconds."""
        return sum(plant.ms for plant in self.acting(kind, rank, step)) * 1000.0

    def factor(self, kind: str, rank: int | None, step: int) -> float:
        """Product of the factors of the acting plants."""
        product = 1.0
        for plant in self.acting(kind, rank, step):
            product *= plant.factor
        return product

    def gaps(self, kind: str, rank: int, step: int, kernels: int) -> dict[int, list[Plant]]:
        """Kernel index before which each acting host gap lies -> the plants."""
        places: dict[int, list[Plant]] = {}
        for plant in self.acting(kind, rank, step):
            index = min(kernels - 1, int(plant.position * kernels))
            places.setdefault(index, []).append(plant)
        return places
