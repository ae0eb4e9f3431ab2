"""Generates trace files and their ground truth from a configuration. All times are on the true clock.

In the breakdown, each instant of a step belongs to the first part of :data:`PRIORITY` that is active on the rank, or to ``host`` if none
is. Compute, copies and collectives are on the accelerator, the other parts on the host.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .collectives import Collective
from .kineto import write_trace
from .machine import Activity
from .model import Config, Noise
from .simulate import Simulation, simulate, without

PRIORITY = ("compute", "h2d", "barrier", "comm_transfer", "comm_wait", "checkpoint", "data_wait", "host")
PARTS = (*PRIORITY, "other")


@dataclass(frozen=True)
class CollectiveTruth:
    """A collective. Lists have one entry per member, in the order of ``ranks``."""

    group: str
    """"Process Group Name"."""
    ranks: list[int]
    sequence: int
    step: int
    micro_batch: int
    purpose: str
    operation: str
    bytes: int
    issued_us: list[float]
    arrival_us: list[float]
    end_us: list[float]
    last_rank: int
    transfer_us: float
    """Common end minus the last arrival. The common end is the earliest end, which has no jitter."""

    @property
    def wait_us(self) -> list[float]:
        """Last arrival minus own arrival."""
        return [max(self.arrival_us) - arrival for arrival in self.arrival_us]


@dataclass(frozen=True)
class StepTruth:
    """A step. ``breakdown_us[rank]`` adds up to ``end_us[rank] - start_us[rank]``."""

    index: int
    start_us: list[float]
    end_us: list[float]
    breakdown_us: list[dict[str, float]]


@dataclass(frozen=True)
class PlantTruth:
    """A planted cause, and the step time of the job without it, with the same seed and jitter."""

    index: int
    kind: str
    ranks: list[int]
    """The ranks that have it; empty: all."""
    plant: dict[str, Any]
    active_steps: list[int]
    step_us_without: list[float]
    cost_us_per_step: float
    """Step time with the cause minus step time without it, mean over all recorded steps."""
    share: float
    """That cost as a share of the mean step time."""


@dataclass(frozen=True)
class Truth:
    """The ground truth of a generated job."""

    config: Config
    files: dict[int, str]
    """Paths of the traces by rank."""
    host_of: list[int]
    offset_ns: list[int]
    """Per host."""
    drift_ppm: list[float]
    steps: list[StepTruth]
    collectives: list[CollectiveTruth]
    plants: list[PlantTruth]
    step_us: list[float]
    step_us_without_any: list[float]

    @property
    def mean_step_us(self) -> float:
        """Mean step time."""
        return sum(self.step_us) / len(self.step_us)

    def wait_caused_us(self) -> list[float]:
        """Per rank: total wait of all other ranks in the recorded collectives at which it arrived last."""
        caused = [0.0] * self.config.world_size
        for collective in self.collectives:
            caused[collective.last_rank] += sum(collective.wait_us)
        return caused


def ground_truth(simulation: Simulation, config: Config, files: dict[int, str]) -> Truth:
    """The ground truth of ``simulation``. Simulates the job again without each plant, and without all plants."""
    clocks = [config.clocks[h] if h < len(config.clocks) else None for h in range(len(config.host_sizes()))]
    step_us = simulation.step_us()
    without_each = [
        simulate(without(config, index), record=False).step_us() for index in range(len(config.plants))
    ]
    if len(config.plants) < 2:
        without_any = without_each[0] if without_each else step_us
    else:
        without_any = simulate(replace(config, plants=()), record=False).step_us()
    return Truth(
        config=config,
        files=files,
        host_of=[config.host_of(rank) for rank in range(config.world_size)],
        offset_ns=[clock.offset_ns if clock else 0 for clock in clocks],
        drift_ppm=[clock.drift_ppm if clock else 0.0 for clock in clocks],
        steps=_steps(simulation),
        collectives=[_collective(c) for c in simulation.collectives if c.step >= 0],
        plants=[_plant(config, index, step_us, without_each[index]) for index in range(len(config.plants))],
        step_us=step_us,
        step_us_without_any=without_any,
    )


def _collective(collective: Collective) -> CollectiveTruth:
    ranks = collective.group.ranks
    arrival_us = [collective.arrival_us[rank] for rank in ranks]
    end_us = [collective.end_us[rank] for rank in ranks]
    last_us = max(arrival_us)
    return CollectiveTruth(
        group=collective.group.name,
        ranks=list(ranks),
        sequence=collective.sequence,
        step=collective.step,
        micro_batch=collective.micro_batch,
        purpose=collective.purpose,
        operation=collective.operation,
        bytes=collective.elements * collective.element_bytes,
        issued_us=[collective.issued_us[rank] for rank in ranks],
        arrival_us=arrival_us,
        end_us=end_us,
        last_rank=ranks[arrival_us.index(last_us)],
        transfer_us=min(end_us) - last_us,
    )


def _steps(simulation: Simulation) -> list[StepTruth]:
    config, steps = simulation.config, []
    starts = [program.step_start_us for program in simulation.programs]
    breakdowns = [breakdown(p.machine.activities, p.step_start_us) for p in simulation.programs]
    for step in range(config.steps):
        steps.append(
            StepTruth(
                index=step,
                start_us=[start[step] for start in starts],
                end_us=[start[step + 1] for start in starts],
                breakdown_us=[rank[step] for rank in breakdowns],
            )
        )
    return steps


def breakdown(activities: list[Activity], boundaries_us: list[float]) -> list[dict[str, float]]:
    """Microseconds per part and step between consecutive boundaries, split by :data:`PRIORITY`.

    Sweeps over the starts and ends of all activities and counts the active ones per part.
    """
    level = {part: index for index, part in enumerate(PRIORITY)}
    changes = [(start, level[part], 1) for part, start, _ in activities]
    changes += [(end, level[part], -1) for part, _, end in activities]
    changes += [(boundary, -1, 0) for boundary in boundaries_us]
    changes.sort()
    counts = [0] * len(PRIORITY)
    steps: list[dict[str, float]] = [dict.fromkeys(PARTS, 0.0) for _ in boundaries_us]
    step, now_us, host = -1, 0.0, level["host"]
    for at_us, part, change in changes:
        if step >= 0:
            active = next((index for index, count in enumerate(counts) if count), host)
            steps[step][PRIORITY[active]] += at_us - now_us
        now_us = at_us
        if part < 0:
            step += 1
        else:
            counts[part] += change
    return steps[:-1]


def _plant(config: Config, index: int, step_us: list[float], without_us: list[float]) -> PlantTruth:
    plant = config.plants[index]
    mean_us = sum(step_us) / len(step_us)
    cost_us = mean_us - sum(without_us) / len(without_us)
    noise = Noise(config.seed, config.jitter)
    active = [s for s in range(config.steps) if plant.when.active(s, noise, plant.kind, plant.ranks)]
    return PlantTruth(
        index=index,
        kind=plant.kind,
        ranks=list(plant.ranks),
        plant=asdict(plant),
        active_steps=active,
        step_us_without=without_us,
        cost_us_per_step=cost_us,
        share=cost_us / mean_us,
    )


def generate(config: Config, directory: str | os.PathLike[str]) -> Truth:
    """Write a trace per rank, except missing ranks, into ``directory``, which is created. Returns the ground truth."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    simulation = simulate(config)
    files = {
        program.machine.rank: str(write_trace(program, folder))
        for program in simulation.programs
        if program.machine.rank not in config.missing_ranks
    }
    return ground_truth(simulation, config, files)
