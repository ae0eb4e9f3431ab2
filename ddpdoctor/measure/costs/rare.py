"""What stops a rank of a job with devices now and then, from the step logs of the whole run.

A profiled window of a few steps speaks for what happens in every step. A checkpoint every hundred steps, a
garbage collection, a batch that comes late now and then fall outside it as a rule, yet the hook has seen them: in
each step, on the host. On a device job the host's times tell when work was issued, not when it ran, so three
things are asked for that a job on CPUs does not need:

- the rank did more than *it* usually does, by far;
- it was the later for it at its next meeting with the others: ``min(extra, lateness)`` counts. The others wait
  for their devices in the next step, which looks like work of theirs;
- steps really took longer. A host that runs ahead of its device can be stopped without any loss, and catches up
  in the steps that follow. Over the occurrences, the median of (what the step and its followers took beyond the
  median step) / extra, between 0 and 1, is the share that was lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.attribution import LATENESS
from ddpdoctor.measure.facts import Cost, LateFacts, SharedFacts
from ddpdoctor.measure.graph import CycleGroup, Graph
from ddpdoctor.measure.numerics import Array, carried_by_few, nan_median, persistence, scatter_of
from ddpdoctor.measure.sourcelines import SourceLines
from ddpdoctor.measure.taxonomy import INDEX, RARE_ON_HOST, RECORDED, Components

_FEWEST_CYCLES = 20
_FOLLOWERS = 2
_CATCHES_UP = 2.0
"""Steps that a host may need to catch up, in multiples of the steps that it lost: it issues a step's work in at most
half of the time that the device takes, or it is the bottleneck."""


@dataclass(frozen=True)
class _Cycles:
    """All cycles in order of steps; N cycles, R ranks, ns."""

    steps: NDArray[np.int64]
    duration: Array
    order: NDArray[np.int64]
    """Places of the cycles, group by group, in order of steps."""

    def ordered(self, parts: list[Array]) -> Array:
        """Values per group, joined and put in order."""
        result: Array = np.concatenate(parts)[self.order]
        return result


def rare_costs(
    graph: Graph, lines: SourceLines, kinds: Mapping[str, Components] = RARE_ON_HOST
) -> tuple[dict[str, Cost], dict[str, Cost]]:
    """(on some ranks, common to all) by kind: costs of what happens in some steps only.

    ``graph`` is that of the step logs, in device time for ``RARE_ON_DEVICE``. Empty for runs of fewer than twenty measured steps.
    """
    if graph.cycles < _FEWEST_CYCLES:
        return {}, {}
    steps = np.concatenate([group.steps for group in graph.groups])
    order = np.argsort(steps, kind="stable")
    durations = np.concatenate([group.duration for group in graph.groups])
    cycles = _Cycles(steps[order], durations[order], order)
    late, common = {}, {}
    for kind, names in kinds.items():
        work = [group.work[..., [INDEX[name] for name in names]].sum(axis=-1) for group in graph.groups]
        over = cycles.ordered([_beyond_usual(part) for part in work])
        delayed = cycles.ordered(
            [_delayed(group, part) for group, part in zip(graph.groups, work, strict=True)]
        )
        own = cycles.ordered([part.sum(axis=1) for part in work])
        spike = _outliers(delayed, over, cycles)
        accused = carried_by_few(spike, delayed, cycles.steps)
        accused &= accused.sum(axis=0) >= LATENESS.fewest_spikes
        if accused.any():
            positions = [int(r) for r in np.flatnonzero(accused.any(axis=0))]
            late[kind] = _price(
                graph, cycles, np.where(accused, delayed, 0.0).max(axis=1), own, positions, names, lines
            )
        if kind in RECORDED:
            together = np.where(_outliers(over, over, cycles), over, 0.0)
            world = together.shape[1]
            everywhere = np.sort(together, axis=1)[:, (world - 1) // 2]
            scattered = np.where(accused.any(), 0.0, np.where(spike, delayed, 0.0).max(axis=1))
            amount = np.maximum(everywhere, scattered)
            if (amount > 0).sum() >= LATENESS.fewest_spikes:
                common[kind] = _price(graph, cycles, amount, own, None, names, lines)
    return late, common


def merged(
    late: LateFacts, shared: SharedFacts, rare: tuple[Mapping[str, Cost], Mapping[str, Cost]], mean_ms: float
) -> tuple[LateFacts, SharedFacts]:
    """Facts of the window with those of the whole run. Of the same kind of work the larger cost stands, never
    both; all lateness grows by what was added."""
    for kind, cost in rare[0].items():
        known = getattr(late, kind)
        known_ms = 0.0 if known is None else known.ms_per_step
        if known_ms < cost.ms_per_step:
            total = late.total or msgspec.structs.replace(cost, ranks=None, ms_per_step=0.0)
            whole_ms = total.ms_per_step + cost.ms_per_step - known_ms
            changed = {kind: cost, "total": _of_length(total, whole_ms, mean_ms)}
            late = msgspec.structs.replace(late, **changed)
    for kind, cost in rare[1].items():
        known = getattr(shared, kind)
        if known is None or known.ms_per_step < cost.ms_per_step:
            shared = msgspec.structs.replace(shared, **{kind: cost})
    return late, shared


def _of_length(cost: Cost, ms: float, mean_ms: float) -> Cost:
    return msgspec.structs.replace(
        cost, ms_per_step=ms, share=ms / mean_ms, speedup=mean_ms / max(mean_ms - ms, 1e-3)
    )


def _beyond_usual(work: Array) -> Array:
    """[N, R] of [N, K, R]: beyond what the rank usually spends in the same segment."""
    over: Array = np.clip(work - np.median(work, axis=0), 0, None).sum(axis=1)
    return over


def _delayed(group: CycleGroup, work: Array) -> Array:
    """[N, R]: the part of it by which the rank was later at its next meeting than it usually is."""
    middle = nan_median(group.arrival, axis=2, keepdims=True)
    if group.arrival.shape[2] == 2:
        middle = np.nanmin(group.arrival, axis=2, keepdims=True)
    late = group.arrival - middle
    late = np.nan_to_num(late - nan_median(late, axis=0))
    over = np.clip(work - np.median(work, axis=0), 0, None)
    delayed: Array = np.clip(np.minimum(over, late), 0, None).sum(axis=1)
    return delayed


def _outliers(amount: Array, over: Array, cycles: _Cycles) -> NDArray[np.bool_]:
    """[N, R] where it is far beyond the rank's own scatter, and no small part of the step."""
    scatter = scatter_of(over - np.median(over, axis=0))
    least = np.maximum(
        LATENESS.spike_sigmas * scatter, LATENESS.spike_share * float(np.median(cycles.duration))
    )
    found: NDArray[np.bool_] = amount > least
    return found


def lost_share(duration: Array, amount: Array) -> float:
    """Share of the stops ([N] ns, 0 where there is none) by which the steps ([N] ns) became longer."""
    usual = float(np.median(duration[amount <= 0])) if (amount <= 0).any() else float(np.median(duration))
    places = np.flatnonzero(amount > 0)
    shares = []
    for place, following in zip(places, [*places[1:], len(duration)], strict=True):
        behind = int(np.ceil(_CATCHES_UP * float(amount[place]) / max(usual, 1.0)))
        until = min(place + 1 + _FOLLOWERS + behind, following, len(duration))
        shares.append(float((duration[place:until] - usual).sum()) / float(amount[place]))
    return float(np.clip(np.median(shares), 0.0, 1.0)) if shares else 0.0


def _price(
    graph: Graph,
    cycles: _Cycles,
    amount: Array,
    own: Array,
    positions: list[int] | None,
    names: Components,
    lines: SourceLines,
) -> Cost:
    mean_ns = graph.mean_cycle_ns
    gain_ns = float(amount.mean()) * lost_share(cycles.duration, amount)
    hit = amount > 0
    when = persistence(cycles.steps, hit)
    ranks = list(range(len(graph.ranks)))
    culprits = ranks if positions is None else positions
    others = [] if positions is None else [r for r in ranks if r not in positions]
    return Cost(
        ms_per_step=gain_ns / 1e6,
        share=gain_ns / mean_ns,
        speedup=mean_ns / max(mean_ns - gain_ns, 1.0),
        ranks=None if positions is None else [graph.ranks[p] for p in positions],
        own_ms=float(own[:, culprits].mean()) / 1e6,
        typical_ms=float(np.median(own[:, others].mean(axis=0))) / 1e6 if others else None,
        occurrence_ms=float(np.median(amount[hit])) / 1e6,
        **when.as_facts(),
        where=lines.work(names, positions, cycles.steps[hit]),
    )
