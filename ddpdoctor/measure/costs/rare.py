"""Rare pauses of jobs with devices, from the step logs of the whole run.

A profiled window of a few steps shows what happens in every step. It usually misses a checkpoint every hundred steps, a
garbage collection, or an occasional late batch. The hook records these in each step, on the host. On a device job the
host's times show when work was issued, not when it ran, so three conditions apply that a CPU job does not need:

- the rank did far more work than *it* usually does;
- it was later at its next synchronisation for it: ``min(extra, lateness)`` counts. (The others wait for their devices
  in the next step, which looks like work of theirs.);
- steps took longer. A host that runs ahead of its device can pause without any loss, and catch up in the following
  steps. The share that was lost is the median over the occurrences of (excess of the step and its followers over the
  median step) / extra, between 0 and 1.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy as np

from ddpdoctor.measure.attribution import LATENESS, least_outlier
from ddpdoctor.measure.facts import Cost, saving
from ddpdoctor.measure.graph import Graph, Sync
from ddpdoctor.measure.metrics import typical_arrival
from ddpdoctor.measure.numerics import Array, Ints, Mask, carried_by_few, persistence, scatter_of
from ddpdoctor.measure.sourcelines import SourceLines
from ddpdoctor.measure.taxonomy import INDEX, RECORDED, Components

from .context import Context, Costs, RareSource
from .price_range import PriceRange, range_fields


class _Tuning(msgspec.Struct, frozen=True):
    fewest_cycles: int = 20
    """Fewest cycles for a pause to count as rare."""
    followers: int = 2
    """Steps after a paused one in which the loss may still show: devices run behind their hosts."""
    catches_up: float = 2.0
    """Most steps that a host needs to catch up, in multiples of the steps that it lost: it issues a step's work in at most half of
    the device's time, or else it is the bottleneck itself."""
    mostly: float = 0.5
    """Part of all cycles that must have a synchronisation for a typical lateness of its own."""


_TUNING = _Tuning()


def rare_pauses(context: Context) -> Costs:
    """``late.*`` and ``shared.*`` of pauses in few steps, from the recordings of the whole run."""
    costs: Costs = {}
    if context.mean_step_ms:
        for source in context.rare_sources:
            costs |= rare_costs(source)
    return costs


def rare_costs(source: RareSource) -> Costs:
    """The same of one recording; {} for runs of fewer than 20 measured steps. A pause of few ranks is ``late``, if it cost time; a
    recorded one of all ranks is ``shared``."""
    if source.graph.cycles < _TUNING.fewest_cycles:
        return {}
    costs: Costs = {}
    for cause, components in source.kinds.items():
        pauses = _Pauses(source.graph, source.lines, components)
        late = pauses.of_stragglers()
        if late is not None and late.ms_per_step > 0:
            costs[f"late.{cause}"] = late
        common = pauses.of_all() if cause in RECORDED else None
        if common is not None:
            costs[f"shared.{cause}"] = common
    return costs


class _Pauses(msgspec.Struct, frozen=True, dict=True):
    """One kind of work in the cycles of one recording, in order of steps; N cycles, R ranks, ns."""

    graph: Graph
    lines: SourceLines
    components: Components

    @cached_property
    def order(self) -> Ints:
        """[N] indices that sort the cycles (group by group) by step."""
        return np.argsort(self.graph.numbers, kind="stable")

    @cached_property
    def steps(self) -> Ints:
        """[N] step numbers."""
        return self.graph.numbers[self.order]

    @cached_property
    def duration(self) -> Array:
        """[N] lengths of the cycles."""
        return self.graph.lengths_ns[self.order]

    @cached_property
    def _work(self) -> list[Array]:
        """[N, K, R] per group."""
        columns = [INDEX[component] for component in self.components]
        return [group.work[..., columns].sum(axis=-1) for group in self.graph.groups]

    @cached_property
    def own(self) -> Array:
        """[N, R]: all of this work."""
        return self._ordered([work.sum(axis=1) for work in self._work])

    @cached_property
    def _beyond(self) -> list[Array]:
        """[N, K, R] per group: excess over the rank's usual work in the same segment, scaled down to its usual work in a cycle of any
        group. Where a barrier follows each checkpoint, cycles with a checkpoint are a group of their own, in which saving is usual."""
        in_any = np.median(self.own, axis=0)
        beyond = []
        for work in self._work:
            usual = np.median(work, axis=0)
            usual *= np.minimum(1.0, in_any / np.maximum(usual.sum(axis=0), 1.0))
            beyond.append(np.clip(work - usual, 0, None))
        return beyond

    @cached_property
    def beyond(self) -> Array:
        """[N, R]: excess over the rank's usual work."""
        return self._ordered([beyond.sum(axis=1) for beyond in self._beyond])

    @cached_property
    def delayed(self) -> Array:
        """[N, R]: the part of the excess by which the rank was later than usual at its next synchronisation."""
        late = _later_than_usual(self.graph)
        return self._ordered(
            [np.minimum(a, b).clip(0, None).sum(axis=1) for a, b in zip(self._beyond, late, strict=True)]
        )

    @cached_property
    def pauses(self) -> Mask:
        """[N, R] mask of delays far beyond the rank's scatter."""
        return self._outliers(self.delayed)

    @cached_property
    def concentrated(self) -> Mask:
        """[N, R] mask of pauses that are concentrated in few ranks."""
        concentrated = carried_by_few(self.pauses, self.delayed, self.steps)
        concentrated &= concentrated.sum(axis=0) >= LATENESS.fewest_spikes
        return concentrated

    def of_stragglers(self) -> Cost | None:
        """Cost of the pauses of few ranks; None where there are none."""
        if not self.concentrated.any():
            return None
        positions = np.flatnonzero(self.concentrated.any(axis=0)).tolist()
        return self._cost(np.where(self.concentrated, self.delayed, 0.0).max(axis=1), positions)

    def of_all(self) -> Cost | None:
        """Cost of pauses of all ranks together, or of a different rank each time; None where there are too few."""
        outliers = np.where(self._outliers(self.beyond), self.beyond, 0.0)
        middle = (outliers.shape[1] - 1) // 2
        everywhere = np.sort(outliers, axis=1)[:, middle]
        scattered = np.where(self.pauses, self.delayed, 0.0).max(axis=1) * (not self.concentrated.any())
        amount = np.maximum(everywhere, scattered)
        return self._cost(amount, None) if (amount > 0).sum() >= LATENESS.fewest_spikes else None

    def _ordered(self, parts: Sequence[Array]) -> Array:
        """Values per group, joined and put in order."""
        joined: Array = np.concatenate(parts)[self.order]
        return joined

    def _outliers(self, amount: Array) -> Mask:
        """[N, R] mask of amounts far beyond the rank's scatter, and beyond a minimum share of the step."""
        scatter = scatter_of(self.beyond - np.median(self.beyond, axis=0))
        outliers: Mask = amount > least_outlier(scatter, float(np.median(self.duration)))
        return outliers

    def _cost(self, amount: Array, positions: list[int] | None) -> Cost:
        """Cost of pauses that take ``amount`` [N] ns in each cycle, 0 where there is none."""
        lost = amount * lengthening_share(self.duration, amount)
        gain_ns = float(lost.mean())
        hit = amount > 0
        others = [] if positions is None else np.delete(np.arange(len(self.graph.ranks)), positions).tolist()
        return Cost(
            **saving(gain_ns / 1e6, self.graph.mean_cycle_ns / 1e6),
            **range_fields(gain_ns, PriceRange(lost, self.duration - lost).range_ns()),
            ranks=None if positions is None else [self.graph.ranks[p] for p in positions],
            own_ms=self._own_ms(positions),
            typical_ms=float(np.median(self._usual[others])) / 1e6 if others else None,
            occurrence_ms=float(np.median(amount[hit])) / 1e6,
            **persistence(self.steps, hit).as_facts(),
            where=self.lines.work(self.components, positions, self.steps[hit]),
        )

    @cached_property
    def _usual(self) -> Array:
        """[R] this work in the rank's usual cycle. Not the mean: ranks that wait for their devices behind another one's pause do more."""
        usual: Array = np.median(self.own, axis=0)
        return usual

    def _own_ms(self, positions: list[int] | None) -> float:
        """Per step on the ranks at these ``positions``, with their pauses; on all ranks for None."""
        if positions is None:
            return float(self.own.mean()) / 1e6
        paused = np.where(self.concentrated, self.delayed, 0.0).mean(axis=0)
        return float((self._usual + paused)[positions].mean()) / 1e6


def lengthening_share(duration: Array, amount: Array) -> float:
    """Share (0 to 1) of the pauses ``amount`` ([N] ns, 0 where there is none) by which the steps ``duration`` ([N] ns) became longer."""
    usual = float(np.median(duration[amount <= 0])) if (amount <= 0).any() else float(np.median(duration))
    stops = np.flatnonzero(amount > 0)
    shares = []
    for stop, following in zip(stops, [*stops[1:], len(duration)], strict=True):
        behind = int(np.ceil(_TUNING.catches_up * float(amount[stop]) / max(usual, 1.0)))
        until = min(stop + 1 + _TUNING.followers + behind, following, len(duration))
        shares.append(float((duration[stop:until] - usual).sum()) / float(amount[stop]))
    return float(np.clip(np.median(shares), 0.0, 1.0)) if shares else 0.0


def _later_than_usual(graph: Graph) -> list[Array]:
    """[N, K, R] ns per group by which a rank arrives later than usual: than its median at the same synchronisation or, where only a few
    cycles have that synchronisation, at any."""
    late = [np.nan_to_num(group.arrival - typical_arrival(group.arrival)) for group in graph.groups]
    anywhere = np.median(np.concatenate([each.reshape(-1, each.shape[2]) for each in late]), axis=0)
    places: dict[tuple[Sync, int], list[Array]] = defaultdict(list)
    keys = [_numbered(group.syncs) for group in graph.groups]
    for of_group, each in zip(keys, late, strict=True):
        for k, key in enumerate(of_group):
            places[key].append(each[:, k])
    usual = {}
    for key, values in places.items():
        joined = np.concatenate(values)
        seldom = len(joined) < _TUNING.mostly * graph.cycles
        usual[key] = anywhere if seldom else np.median(joined, axis=0)
    return [
        each - np.stack([usual[key] for key in of_group]) for of_group, each in zip(keys, late, strict=True)
    ]


def _numbered(syncs: Sequence[Sync]) -> list[tuple[Sync, int]]:
    """Each synchronisation with the number of equal ones before it in the cycle."""
    seen = Counter[Sync]()
    numbered = []
    for sync in syncs:
        numbered.append((sync, seen[sync]))
        seen[sync] += 1
    return numbered
