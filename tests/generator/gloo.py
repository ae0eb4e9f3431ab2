"""Collectives on CPUs over Gloo: the training thread issues them, two threads per rank carry them out.

A rank arrives when it issues. The backend's own event begins when one of the two threads is free to take the
work, and lasts until the end, waiting for others included.
"""

from __future__ import annotations

from .collectives import OPERATORS, Collective, Network, shape_of
from .groups import Group
from .machine import GLOO_THREADS, HostEvent, Machine
from .model import Config
from .noise import Noise
from .plants import Effects

ANNOTATIONS = {"allreduce": "gloo:all_reduce", "barrier": "gloo:barrier"}
DEQUEUE_US = 60.0


class GlooNetwork(Network):
    """One process group over Gloo."""

    def __init__(self, group: Group, config: Config, noise: Noise, effects: Effects) -> None:
        super().__init__(group, config, noise, effects)
        self._thread_free_us = {rank: dict.fromkeys(GLOO_THREADS, float("-inf")) for rank in group.ranks}

    def _launch(self, machine: Machine, collective: Collective, launch_us: float) -> None:
        rank = machine.rank
        name, args = OPERATORS[collective.operation], shape_of(collective)
        collective.issued_us[rank] = collective.ready_us[rank] = machine.now_us
        with machine.span("cpu_op", name, args) as external:
            machine.work(launch_us)
        collective.identity[rank] = (external, machine.next_external())

    def _resolve(self, collective: Collective) -> None:
        collective.arrival_us.update(collective.issued_us)
        begin_us: dict[int, float] = {}
        thread_of: dict[int, int] = {}
        for rank, issued_us in collective.issued_us.items():
            free_us = self._thread_free_us[rank]
            thread = thread_of[rank] = min(free_us, key=free_us.__getitem__)
            begin_us[rank] = max(issued_us + DEQUEUE_US, free_us[thread] + 5.0)
        common_end_us = max(begin_us.values()) + self.wire_us(collective)
        for rank in self.group.ranks:
            machine = self.machines[rank]
            end_us = common_end_us + self.end_jitter_us(rank, collective)
            collective.end_us[rank] = self._thread_free_us[rank][thread_of[rank]] = end_us
            if machine.recording_since <= collective.issued_us[rank]:
                args = f',"Input Dims":[[{collective.elements}]]'
                name, external = ANNOTATIONS[collective.operation], collective.identity[rank][1]
                where = (thread_of[rank], begin_us[rank], end_us)
                machine.host_events.append(HostEvent("user_annotation", name, *where, external, 0, args))
