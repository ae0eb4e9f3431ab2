"""Ranks that arrive late on average, whatever of it is anybody's fault, and what the job would save were they on time.

A cause is priced by what a replay without it saves. Lateness that hides beside the others' computation, or that a transfer makes
up for, saves next to nothing, and lateness that chance may have dealt out is nobody's. Both stand in the table of the ranks all the
same, and whoever reads it wants to know which it is.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ddpdoctor.measure.facts import ArrivalFacts, Cost
from ddpdoctor.measure.graph import CycleGroup, Graph
from ddpdoctor.measure.metrics import behind, lateness
from ddpdoctor.measure.numerics import Array, Ints
from ddpdoctor.measure.replay import replay_all, without_work

from .context import Costs


class _Tuning(msgspec.Struct, frozen=True):
    step_share: float = 0.1
    """Share of the mean step by which a rank is late on average, for a reader to ask why: a job counts as straggling from 1.1
    times the ideal step time on (Lin et al., OSDI '25)."""
    beyond_others: float = 2.0
    """Times the median lateness of the other ranks: on a busy machine now one arrives last, now another."""
    priced: float = 0.5
    """Part of a rank's lateness that its causes must cost for it to have its price there."""
    hit_share: float = 0.02
    """Share of the mean step from which on a rank is late in a cycle: steps of one job differ by as much."""


_TUNING = _Tuning()


def arrival_facts(graph: Graph, costs: Costs) -> ArrivalFacts:
    """Who arrives late on average, by how much. ``graph`` is that of the table of the ranks, ``costs`` what is priced already."""
    if not graph.groups or len(graph.ranks) < 2:
        return ArrivalFacts()
    late_ns = lateness(graph)[0]
    late = _late(late_ns, graph.mean_cycle_ns)
    priced_ms = {graph.ranks[place]: _priced_ms(graph.ranks[place], costs) for place in late}
    unpriced = [p for p in late if priced_ms[graph.ranks[p]] < _TUNING.priced * float(late_ns[p]) / 1e6]
    per_cycle = np.concatenate(
        [np.nan_to_num(behind(group)).max(axis=1, initial=0.0) for group in graph.groups]
    )
    return ArrivalFacts(
        late_ranks=[graph.ranks[place] for place in late],
        late_ms={str(graph.ranks[place]): float(late_ns[place]) / 1e6 for place in late},
        late_steps={
            str(graph.ranks[place]): int(
                (per_cycle[:, place] > _TUNING.hit_share * graph.mean_cycle_ns).sum()
            )
            for place in late
        },
        on_time_saves_ms=_saved_ms(graph, np.array(unpriced)) if unpriced else None,
    )


def _late(late_ns: Array, step_ns: float) -> list[int]:
    """Positions of the ranks, the latest first."""
    order = np.argsort(-late_ns, kind="stable").tolist()
    ascending = np.sort(late_ns)
    found = []
    for place in order:
        # Without its own: what stands behind it in the order moves up by one place.
        middle = (len(late_ns) - 2) // 2
        others = ascending[middle + int(ascending[middle] >= late_ns[place])]
        if late_ns[place] >= max(_TUNING.step_share * step_ns, _TUNING.beyond_others * float(others)):
            found.append(place)
    return found


def _priced_ms(rank: int, costs: Costs) -> float:
    """What the causes of this rank's lateness cost together."""
    late = [cost for path, cost in costs.items() if path.startswith("late.") and isinstance(cost, Cost)]
    return sum(cost.ms_per_step for cost in late if rank in (cost.ranks or ()))


def _saved_ms(graph: Graph, places: Ints) -> float:
    """What a step would be shorter if these ranks arrived with the median rank, as far as they work for longer before it."""
    gains = replay_all(graph) - replay_all(
        graph, [without_work([_lateness(group, places) for group in graph.groups])]
    )
    return max(0.0, float(gains.mean())) / 1e6


def _lateness(group: CycleGroup, places: Ints) -> Array:
    """[N, K, R] ns: by how much later each of these ranks arrives (see :func:`behind`), but for what it brings along from a
    synchronisation that did not bring all ranks together."""
    own = np.nan_to_num(behind(group)[:, :, places])
    late = np.zeros(group.arrival.shape)
    for k in range(len(group.syncs)):
        brought = own[:, k - 1] if k and not _brings_together(group, k - 1) else 0.0
        late[:, k, places] = np.clip(own[:, k] - brought, 0, None)
    return late


def _brings_together(group: CycleGroup, k: int) -> bool:
    sync = group.syncs[k]
    return len(sync.members) == group.arrival.shape[2] and sync.root is None and not group.on_device
