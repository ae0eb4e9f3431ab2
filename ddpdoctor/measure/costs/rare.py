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

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy as np

from ddpdoctor.measure.attribution import LATENESS
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
    """Cycles from which on a few can be rare."""
    followers: int = 2
    """Steps behind the one that was stopped in which it may still show: devices run behind their hosts."""
    catches_up: float = 2.0
    """Steps that a host may need to catch up, in multiples of the steps that it lost: it issues a step's work in at most
    half of the time that the device takes, or it is the bottleneck."""
    mostly: float = 0.5
    """Of all cycles: where fewer have a synchronisation, what is usual there is what they have in common."""


_TUNING = _Tuning()


def rare_pauses(context: Context) -> Costs:
    """``late.*`` and ``shared.*`` of what happens in few steps, as the recordings of the whole run show it."""
    costs: Costs = {}
    if context.mean_step_ms:
        for source in context.rare_sources:
            costs |= rare_costs(source)
    return costs


def rare_costs(source: RareSource) -> Costs:
    """The same of one recording; {} for runs of fewer than twenty measured steps. A pause that only some ranks make is
    ``late``, and nothing where it cost no time; one that is recorded as such and meets all is ``shared``."""
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
        """Places of the cycles, group by group, in order of steps."""
        return np.argsort(self.graph.numbers, kind="stable")

    @cached_property
    def steps(self) -> Ints:
        """[N]"""
        return self.graph.numbers[self.order]

    @cached_property
    def duration(self) -> Array:
        """[N]"""
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
        """[N, K, R] per group: beyond what the rank usually spends in the same segment, and in a whole cycle of any group. Where a
        barrier follows each checkpoint, the cycles with one are a group of their own, in which all of them save."""
        in_any = np.median(self.own, axis=0)
        beyond = []
        for work in self._work:
            usual = np.median(work, axis=0)
            usual *= np.minimum(1.0, in_any / np.maximum(usual.sum(axis=0), 1.0))
            beyond.append(np.clip(work - usual, 0, None))
        return beyond

    @cached_property
    def beyond(self) -> Array:
        """[N, R]: what is beyond the rank's usual work."""
        return self._ordered([beyond.sum(axis=1) for beyond in self._beyond])

    @cached_property
    def delayed(self) -> Array:
        """[N, R]: the part of it by which the rank was later at its next synchronisation than it usually is there."""
        late = _later_than_usual(self.graph)
        return self._ordered(
            [np.minimum(a, b).clip(0, None).sum(axis=1) for a, b in zip(self._beyond, late, strict=True)]
        )

    @cached_property
    def pauses(self) -> Mask:
        """[N, R] where a rank was delayed by far more than it scatters."""
        return self._outliers(self.delayed)

    @cached_property
    def carried(self) -> Mask:
        """[N, R] the pauses of few ranks, by which the others are not struck as often."""
        carried = carried_by_few(self.pauses, self.delayed, self.steps)
        carried &= carried.sum(axis=0) >= LATENESS.fewest_spikes
        return carried

    def of_stragglers(self) -> Cost | None:
        """What pauses of few ranks cost; None where there are none."""
        if not self.carried.any():
            return None
        positions = np.flatnonzero(self.carried.any(axis=0)).tolist()
        return self._cost(np.where(self.carried, self.delayed, 0.0).max(axis=1), positions)

    def of_all(self) -> Cost | None:
        """What pauses cost that meet all ranks together, or now this one, now that one; None where there are too few."""
        together = np.where(self._outliers(self.beyond), self.beyond, 0.0)
        middle = (together.shape[1] - 1) // 2
        everywhere = np.sort(together, axis=1)[:, middle]
        scattered = np.where(self.pauses, self.delayed, 0.0).max(axis=1) * (not self.carried.any())
        amount = np.maximum(everywhere, scattered)
        return self._cost(amount, None) if (amount > 0).sum() >= LATENESS.fewest_spikes else None

    def _ordered(self, parts: Sequence[Array]) -> Array:
        """Values per group, joined and put in order."""
        joined: Array = np.concatenate(parts)[self.order]
        return joined

    def _outliers(self, amount: Array) -> Mask:
        """[N, R] where it is far beyond the rank's own scatter, and no small part of the step."""
        scatter = scatter_of(self.beyond - np.median(self.beyond, axis=0))
        outliers: Mask = amount > np.maximum(
            LATENESS.spike_sigmas * scatter, LATENESS.spike_share * float(np.median(self.duration))
        )
        return outliers

    def _cost(self, amount: Array, positions: list[int] | None) -> Cost:
        """``amount`` [N] ns that was lost in each cycle, 0 where nothing happened."""
        lost = amount * lengthening_share(self.duration, amount)
        gain_ns = float(lost.mean())
        hit = amount > 0
        everyone = range(len(self.graph.ranks))
        concerned = list(everyone) if positions is None else positions
        others = [] if positions is None else [rank for rank in everyone if rank not in positions]
        return Cost(
            **saving(gain_ns / 1e6, self.graph.mean_cycle_ns / 1e6),
            **range_fields(gain_ns, PriceRange(lost, self.duration - lost).range_ns()),
            ranks=None if positions is None else [self.graph.ranks[p] for p in positions],
            own_ms=float(self.own[:, concerned].mean()) / 1e6,
            typical_ms=float(np.median(self.own[:, others].mean(axis=0))) / 1e6 if others else None,
            occurrence_ms=float(np.median(amount[hit])) / 1e6,
            **persistence(self.steps, hit).as_facts(),
            where=self.lines.work(self.components, positions, self.steps[hit]),
        )


def lengthening_share(duration: Array, amount: Array) -> float:
    """Share of the stops ([N] ns, 0 where there is none) by which the steps ([N] ns) became longer."""
    usual = float(np.median(duration[amount <= 0])) if (amount <= 0).any() else float(np.median(duration))
    stops = np.flatnonzero(amount > 0)
    shares = []
    for stop, following in zip(stops, [*stops[1:], len(duration)], strict=True):
        behind = int(np.ceil(_TUNING.catches_up * float(amount[stop]) / max(usual, 1.0)))
        until = min(stop + 1 + _TUNING.followers + behind, following, len(duration))
        shares.append(float((duration[stop:until] - usual).sum()) / float(amount[stop]))
    return float(np.clip(np.median(shares), 0.0, 1.0)) if shares else 0.0


def _later_than_usual(graph: Graph) -> list[Array]:
    """[N, K, R] ns per group by which a rank arrives later than it usually does: at the same synchronisation in all cycles that have
    it or, where only a few have it, at any."""
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
    """Each with how many of the same come before it in the cycle."""
    seen = Counter[Sync]()
    numbered = []
    for sync in syncs:
        numbered.append((sync, seen[sync]))
        seen[sync] += 1
    return numbered
