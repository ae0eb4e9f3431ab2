"""Named cases for any world size in which tools for multi-rank traces are known to be wrong.

A  one rank late by 2 ms in every step
B  two hosts whose clocks differ by 500 µs, no late rank
C  one rank late by 400 µs, plus that offset
D  one rank late by 2 ms; rank 0's trace begins one collective late
E  D with buckets of unequal size
F  busy waits in the backward of one rank; all phases take equally long on all ranks
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .model import SMALL, Config, HostClock, Plant, cpu_job

WORLD_SIZES = (2, 3, 4, 8)
CLOCK_OFFSET_NS = 500_000
UNEQUAL_BUCKETS = (1_000_000, 26_000_000, 4_000_000, 16_000_000, 3_000_000)
BUSY_WAITS_MS = (200.0, 20.0, 5.0)
LETTERS = "ABCDEF"


@dataclass(frozen=True)
class Case:
    """A configuration and the expected result of its analysis."""

    name: str
    config: Config
    culprit: int | None
    """The rank that must be named; None: no rank may be named."""
    late_ms: float
    """How late the culprit is in each step."""


def case(
    letter: str,
    world_size: int = 4,
    seed: int = 0,
    *,
    late_ms: float | None = None,
    cause: str | None = None,
    drift_ppm: float = 0.0,
    dropped_event_fraction: float = 0.0,
    missing: str | None = None,
    include_seq: bool = True,
    steps: int = 8,
    backend: str = "nccl",
) -> Case:
    """One of the cases A to F.

    ``late_ms`` and ``cause`` (a plant's kind) replace those of the case. ``drift_ppm`` puts the second half of the ranks on a host
    whose clock drifts. ``missing``: omit the trace of a punctual rank (``"victim"``) or of the late rank (``"culprit"``).
    """
    defaults = {"A": 2.0, "B": 0.0, "C": 0.4, "D": 2.0, "E": 2.0, "F": 20.0}
    if letter not in defaults:
        raise ValueError(f"unknown case {letter!r}; known: {LETTERS}")
    late_ms = defaults[letter] if late_ms is None else late_ms
    culprit = min(1 if letter == "F" else 2, world_size - 1) if late_ms else None
    config = (cpu_job if backend == "gloo" else Config)(
        world_size=world_size,
        **SMALL,
        steps=steps,
        seed=seed,
        include_seq=include_seq,
        dropped_event_fraction=dropped_event_fraction,
    )
    if culprit is not None:
        kind = cause or ("host_gap_backward" if letter == "F" else "slow_data")
        config = replace(config, plants=(Plant(kind, ranks=(culprit,), ms=late_ms),))
    if letter in "BC" or drift_ppm:
        first_host = (world_size + 1) // 2
        offset_ns = CLOCK_OFFSET_NS if letter in "BC" else 0
        config = replace(
            config,
            hosts=(first_host, world_size - first_host),
            clocks=(HostClock(), HostClock(offset_ns, drift_ppm)),
        )
    if letter in "DE":
        config = replace(config, first_collectives_lost={0: 1})
    if letter == "E":
        config = replace(config, bucket_bytes=UNEQUAL_BUCKETS)
    if missing is not None:
        config = replace(config, missing_ranks=(_missing_rank(missing, culprit, world_size),))
    name = f"{letter}-{world_size}-ranks-seed-{seed}"
    return Case(name, config, culprit, late_ms)


def all_cases(seeds: tuple[int, ...] = (0,)) -> Iterator[Case]:
    """Each case with each world size, without and with each flaw of the recording; about 140 per seed."""
    for letter in LETTERS:
        waits_ms = BUSY_WAITS_MS if letter == "F" else (None,)
        for world_size in WORLD_SIZES:
            for seed in seeds:
                for late_ms in waits_ms:
                    for name, flaw in _flaws(letter, world_size):
                        made = case(letter, world_size, seed, late_ms=late_ms, **flaw)
                        late = f"-{late_ms:g}ms" if late_ms else ""
                        yield replace(made, name=f"{made.name}{late}-{name}")


def _flaws(letter: str, world_size: int) -> Iterator[tuple[str, dict]]:
    yield "plain", {}
    yield "no-seq", {"include_seq": False}
    yield "drift", {"drift_ppm": 100.0}
    yield "dropped", {"dropped_event_fraction": 0.05}
    if world_size > 2:
        yield "missing", {"missing": "victim"}


def _missing_rank(who: str, culprit: int | None, world_size: int) -> int:
    """The culprit, or the highest rank that is neither the culprit nor rank 0."""
    if who == "culprit":
        if culprit is None:
            raise ValueError("this case has no culprit")
        return culprit
    return max(rank for rank in range(world_size) if rank != culprit)
