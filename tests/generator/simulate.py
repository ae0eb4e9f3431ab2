"""Runs the ranks' programs concurrently until all have ended."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .collectives import Collective, GlooNetwork, Network, process_groups
from .machine import Machine, Processor
from .model import Config, Effects, Noise, reshape
from .program import RankProgram


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation, in microseconds of the true clock."""

    config: Config
    """The simulated configuration, with the plants applied that change the job's shape."""
    programs: list[RankProgram]
    collectives: list[Collective]
    """The collectives of all groups, sorted by first arrival."""

    def step_us(self) -> list[float]:
        """Duration of each recorded step, from its start to the next step's start, mean over ranks."""
        starts = [program.step_start_us for program in self.programs]
        ranks = len(starts)
        return [
            sum(rank[step + 1] - rank[step] for rank in starts) / ranks for step in range(self.config.steps)
        ]


def simulate(config: Config, record: bool = True) -> Simulation:
    """Run the job. Without ``record``, only step times and collectives are kept, which is about twice as fast."""
    noise = Noise(config.seed, config.jitter)
    effects = Effects(config.plants, noise)
    shaped = reshape(config)
    on_cpu = shaped.backend == "gloo"
    kind = GlooNetwork if on_cpu else Network
    networks = [kind(group, shaped, noise, effects) for group in process_groups(shaped)]
    programs = []
    for rank in range(shaped.world_size):
        start_us = 1000.0 + 50.0 * noise.uniform("start", rank)
        machine = (Processor if on_cpu else Machine)(rank, shaped, start_us)
        own = {network.group.kind: network for network in networks if rank in network.group.ranks}
        own.setdefault("data", own["world"])
        for network in own.values():
            network.machines[rank] = machine
        programs.append(RankProgram(shaped, machine, own, noise, effects, record))
    _run(programs)
    collectives = [collective for network in networks for collective in network.collectives]
    return Simulation(shaped, programs, sorted(collectives, key=lambda c: min(c.arrival_us.values())))


def _run(programs: list[RankProgram]) -> None:
    """Advance each rank until it needs a collective that other ranks have not reached; repeat until all have ended."""
    running = {program.machine.rank: program.run() for program in programs}
    awaited: dict[int, Collective] = {}
    while running:
        advanced = False
        for rank, waits in list(running.items()):
            while rank not in awaited or awaited[rank].done:
                advanced = True
                following = next(waits, None)
                if following is None:
                    del running[rank]
                    break
                awaited[rank] = following
        if not advanced:
            raise RuntimeError(f"ranks {sorted(running)} wait for each other")


def without(config: Config, index: int) -> Config:
    """The same job without the plant at ``index``."""
    return replace(config, plants=config.plants[:index] + config.plants[index + 1 :])
