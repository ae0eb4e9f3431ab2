"""The price of each cause: a replay without it, and who, when and where."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.attribution import STANDOUT, Attribution, component, unseen
from ddpdoctor.measure.facts import Cost, LateFacts, SharedFacts, Where
from ddpdoctor.measure.graph import CycleGroup, Graph
from ddpdoctor.measure.numerics import Array, Value, fair_shares, persistence
from ddpdoctor.measure.replay import (
    Change,
    common_part,
    idle_after,
    replay_all,
    without_transfer,
    without_waiting,
    without_work,
)
from ddpdoctor.measure.sourcelines import SourceLines
from ddpdoctor.measure.taxonomy import (
    LATE_COMPONENTS,
    LATENT,
    SHARED_COMPONENTS,
    Component,
    LateCause,
    SyncKind,
)

from .whatif import reduced_again, without_reductions

_USUAL = 0.4
"""Quantile of the transfer over the cycles that counts as what the transfer itself needs."""
_LEAST_SHARE = 0.001
"""A rank whose excess saves less than this share of the step is not late."""
_SAME_SEGMENTS = 0.5
"""Part of two causes' time that must fall into the same segments of the cycle."""
_PATTERN = 3
"""Occurrences from which on rules take something for a pattern."""
_HIT_SHARE = 0.02
"""A cause happens in a cycle when it takes at least this share of the mean cycle."""


class Pricing:
    """Prices causes on one graph."""

    def __init__(
        self, graph: Graph, found: Attribution, lines: SourceLines, synced_ns: Sequence[float] | None = None
    ) -> None:
        """``synced_ns``, by position of the rank: see :func:`.whatif.without_reductions`."""
        self.graph, self.excess, self.lines, self.synced_ns = graph, found, lines, synced_ns
        self.mean_ns = graph.mean_cycle_ns
        self.steps = (
            np.concatenate([g.steps for g in graph.groups]) if graph.groups else np.empty(0, np.int64)
        )
        self.order = np.argsort(self.steps, kind="stable")

    def late(self) -> LateFacts:
        """Excess on some ranks, by cause; where ranks are late for different causes, each with its part of what all
        of them cost together (see :func:`fair_shares`)."""
        amount = self.excess.claimed if _hide_each_other(self.excess) else self.excess.excess
        removed = {fact: component(amount, names) for fact, names in LATE_COMPONENTS.items()}
        removed = {fact: of for fact, of in removed.items() if any(part.any() for part in of)}
        rest = unseen(self.graph, self.excess)
        if rest is not None:
            known = removed.get(LateCause.UNKNOWN, [np.zeros_like(of) for of in rest])
            removed[LateCause.UNKNOWN] = [a + b for a, b in zip(known, rest, strict=True)]
        names = dict(LATE_COMPONENTS)
        if self.excess.in_turn:
            removed[LateCause.TURNS] = [of.sum(axis=-1) for of in self.excess.in_turn]
            names[LateCause.TURNS] = tuple(
                name for kind in self.excess.causes_in_turn for name in LATE_COMPONENTS[kind]
            )
        found = fair_shares(removed, self._gain_ns)
        costs = {fact: self._late(fact, removed[fact], names[fact], value) for fact, value in found.items()}
        if not any(costs.values()):
            return LateFacts()
        everything = [sum(parts) for parts in zip(*removed.values(), strict=True)]
        return LateFacts(**costs, total=self._price([without_work(everything)], everything, None, ()))

    def _gain_ns(self, removed: list[Array]) -> float:
        return float((replay_all(self.graph) - replay_all(self.graph, [without_work(removed)])).mean())

    def shared(self) -> SharedFacts:
        """What is common to all ranks, by cause."""
        costs: dict[str, Cost | None] = {
            fact: self._common(names) for fact, names in SHARED_COMPONENTS.items()
        }
        costs["barrier"] = self._meeting([SyncKind.BARRIER])
        costs["collective"] = self._meeting([SyncKind.COLLECTIVE])
        costs["device_sync"] = self._meeting([SyncKind.DEVICE_SYNC])
        # It is there in every step: what it takes beyond the usual in some is a busy machine.
        costs["broadcast"] = self._meeting([SyncKind.BROADCAST], usual=True)
        costs["communication"] = self._transfer(SyncKind.GRADIENTS)
        costs["model_communication"] = self._transfer(SyncKind.MODEL)
        costs["redundant_sync"] = self._redundant()
        costs["cpu_starved"] = self._starved()
        return SharedFacts(**costs)

    def _late(
        self, fact: LateCause, removed: list[Array], names: Sequence[Component], value: Value
    ) -> Cost | None:
        weight = sum((of.sum(axis=(0, 1)) for of in removed), np.zeros(len(self.graph.ranks)))
        positions = [int(r) for r in np.argsort(-weight) if weight[r] >= 0.25 * weight.max()]
        named = None if fact == "turns" else sorted(positions)
        cost = self._price([without_work(removed)], self._when(fact, removed, names), named, names)
        share = value.part_ns / self.mean_ns
        if share < _LEAST_SHARE:
            return None
        if fact == "turns":
            period = len(self.graph.ranks) if self.excess.rotates else None
            cost = msgspec.structs.replace(cost, period_steps=period, kinds=list(self.excess.causes_in_turn))
        return msgspec.structs.replace(
            cost,
            ms_per_step=value.part_ns / 1e6,
            share=share,
            alone_ms_per_step=value.first_ns / 1e6,
            remaining_ms_per_step=value.last_ns / 1e6,
            stands_out_in=self.excess.stands_out_in.get(fact, cost.stands_out_in if fact == "data" else []),
        )

    def _when(self, fact: LateCause, removed: list[Array], names: Sequence[Component]) -> list[Array]:
        """[N, K, R or 1] ns that tell in which cycles a rank is late."""
        if fact == "turns":
            return [np.clip(of.max(axis=2, keepdims=True), 0, None) for of in removed]
        if fact == "data" and all(group.on_device for group in self.graph.groups):
            # What a rank would wait if others did not hold it up, too, makes it late only where it does wait.
            waits = component([group.work for group in self.graph.groups], names)
            return [np.minimum(of, np.clip(wait, 0, None)) for of, wait in zip(removed, waits, strict=True)]
        return removed

    def _common(self, names: Sequence[Component]) -> Cost | None:
        by_chance = {name for kind in self.excess.by_chance for name in LATE_COMPONENTS[kind]}
        removed, alone = [], []
        for group, claimed in zip(self.graph.groups, self.excess.claimed, strict=True):
            work, own, over = component([*_work_and_alone(group, names), claimed], names)
            everybody = by_chance.issuperset(names)
            removed.append(np.clip(work, 0, None) if everybody else common_part(work - over, own - over))
            alone.append(np.clip(own, 0, None) if everybody else common_part(own - over, own - over))
        if not sum(float(of.sum()) for of in removed):
            return None
        return self._price([without_work(removed, alone)], removed, None, names)

    def _meeting(self, kinds: Sequence[SyncKind], *, usual: bool = False) -> Cost | None:
        idle = idle_after(self.graph, kinds)
        spent = [_spent(group, kinds) + of for group, of in zip(self.graph.groups, idle, strict=True)]
        if not any(of.any() for of in spent):
            return None
        changes = without_waiting(self.graph, kinds)
        where, names = self.lines.syncs(kinds), self._names(kinds) or self.lines.operation(kinds, None)
        return self._price(changes, spent, None, (), where=where, operation=names, usual=usual)

    def _transfer(self, kind: SyncKind) -> Cost | None:
        """Exposed transfer that comes back in every step. What goes beyond it in some steps is a disturbance
        (a busy CPU or link), and no reason to change the job."""
        taken = [usual_transfer(group, kind) for group in self.graph.groups]
        if not any(of.any() for of in taken):
            return None
        where = self.lines.syncs([kind])
        spent = [of[:, :, None] for of in taken]
        return self._price([without_transfer(taken)], spent, None, (), where=where)

    def _redundant(self) -> Cost | None:
        """Reductions after which the same gradients are reduced again before the optimizer steps."""
        chosen = [np.array([reduced_again(g, k) for k in range(len(g.syncs))]) for g in self.graph.groups]
        if not any(of.any() for of in chosen):
            return None
        taken = [
            g.transfer[:, :, None] * c[None, :, None] for g, c in zip(self.graph.groups, chosen, strict=True)
        ]
        changes = without_reductions(self.graph, self.synced_ns)
        return self._price(changes, taken, None, (), where=self.lines.syncs([SyncKind.GRADIENTS]))

    def _starved(self) -> Cost | None:
        """Run delay: of each rank no more than the (lower) median rank has in the same step, spread over its work; in steps
        in which not all ranks read it, what it usually is."""
        delays = [dict(zip(of.steps.tolist(), of.run_delay.tolist(), strict=True)) for of in self.graph.steps]
        removed = []
        for group in self.graph.groups:
            delay = np.array([[of.get(int(step), np.nan) for of in delays] for step in group.steps])
            known = ~np.isnan(delay).any(axis=1)
            common = np.zeros((len(delay), 1, delay.shape[1]))
            if known.any():
                common[known] = common_part(delay[known, None, :], delay[known, None, :])
                common[~known] = common[known].mean(axis=0)
            work = np.clip(group.work.sum(axis=3), 0, None)
            removed.append(work * np.minimum(1.0, common / np.maximum(work.sum(axis=1, keepdims=True), 1.0)))
        if not any(of.any() for of in removed):
            return None
        return self._price([without_work(removed)], removed, None, ())

    def _names(self, kinds: Sequence[SyncKind]) -> str | None:
        names = {s.name for group in self.graph.groups for s in group.syncs if s.kind in kinds}
        return ", ".join(sorted(names)) or None

    def _price(
        self,
        changes: Sequence[Change],
        spent: list[Array],
        positions: list[int] | None,
        names: Sequence[Component],
        *,
        where: list[Where] | None = None,
        operation: str | None = None,
        usual: bool = False,
    ) -> Cost:
        """Replay with the changes; ``spent`` [N, K, R or 1] ns per group is the time that goes into the
        cause. With ``usual``, a cycle gains no more than cycles usually do."""
        gains = replay_all(self.graph) - replay_all(self.graph, changes)
        if usual:
            gains = np.minimum(gains, np.quantile(gains, _USUAL))
        gain_ns = max(0.0, float(gains.mean()))
        per_cycle = np.concatenate([of.sum(axis=1).max(axis=1) for of in spent])
        hit = per_cycle > _HIT_SHARE * self.mean_ns
        when = persistence(self.steps[self.order], hit[self.order])
        own, typical = self._own(spent, positions, names)
        return Cost(
            ms_per_step=gain_ns / 1e6,
            share=gain_ns / self.mean_ns,
            speedup=self.mean_ns / max(self.mean_ns - gain_ns, 1.0),
            ranks=None if positions is None else [self.graph.ranks[p] for p in positions],
            own_ms=own,
            typical_ms=typical,
            occurrence_ms=float(np.median(per_cycle[hit])) / 1e6 if hit.any() else None,
            **when.as_facts(),
            stands_out_in=sorted(self.steps[hit].tolist()) if self._singly(names, hit, gain_ns) else [],
            where=where if where is not None else self._where(names, positions, hit),
            operation=operation or self.lines.operation(names, positions),
        )

    def _singly(self, names: Sequence[Component], hit: NDArray[np.bool_], gain_ns: float) -> bool:
        """Whether single cycles of a short window are told. Checkpoints and waiting for data are recognised by what they are:
        one is one, however few there are. (A wait for data is told only where it costs enough of the window, and three of
        them are a pattern like any other.)"""
        if not self.excess.short or hit.all():
            return False
        few = 0 < hit.sum() < _PATTERN and gain_ns >= STANDOUT.window_share * self.mean_ns
        return "checkpoint" in names or ("data" in names and bool(few))

    def _where(
        self, names: Sequence[Component], positions: list[int] | None, hit: NDArray[np.bool_]
    ) -> list[Where]:
        return (
            self.lines.work(names, positions, self.steps[hit] if hit.any() else self.steps) if names else []
        )

    def _own(
        self, spent: list[Array], positions: list[int] | None, names: Sequence[Component]
    ) -> tuple[float | None, float | None]:
        """Mean time per step of the culprits (or the median rank) and of the median of the others, ms."""
        if positions is None or not names:
            means = np.concatenate([of.sum(axis=1) for of in spent]).mean(axis=0)
            return float(np.median(means)) / 1e6, None
        work = np.concatenate([_whole(g, names) for g in self.graph.groups]).mean(axis=0)
        others = [r for r in range(len(self.graph.ranks)) if r not in positions]
        typical = float(np.median(work[others])) / 1e6 if others else None
        return float(work[positions].mean()) / 1e6, typical


def _hide_each_other(found: Attribution) -> bool:
    """Whether two ranks are late for two causes between the same meetings: each is then early by the other's cause, and what
    it makes up for must not hide its own. (With a meeting in between, that meeting is what costs the time.)"""
    where = {}
    for kind, ranks in found.stragglers.items():
        claimed = component(found.claimed, LATE_COMPONENTS[kind])
        per_segment = np.concatenate([of[:, :, ranks[0]].sum(axis=0) for of in claimed])
        if per_segment.any():
            where[kind] = ranks[0], per_segment / per_segment.sum()
    return any(
        one != other and float(np.minimum(here, there).sum()) > _SAME_SEGMENTS
        for (one, here), (other, there) in combinations(where.values(), 2)
    )


def _set_by_hosts(group: CycleGroup, names: Sequence[Component]) -> bool:
    """Whether these components are devices' waiting for hosts, part of which hides in the wait for other ranks."""
    return "host" in group.latent and set(names) <= set(LATENT["host"])


def _work_and_alone(group: CycleGroup, names: Sequence[Component]) -> tuple[Array, Array]:
    """[N, K, R, C] ns: the work, and as each rank would have it by itself. Where hosts set the pace, what devices wait for them
    beside a synchronisation counts as well."""
    if _set_by_hosts(group, names):
        return group.continued(group.work), group.work_since
    return group.work, group.work_alone


def _whole(group: CycleGroup, names: Sequence[Component]) -> Array:
    """[N, R] ns of these components in the cycle, beside synchronisations too; where hosts set the pace, as each rank would
    have them by itself."""
    if _set_by_hosts(group, names):
        by_itself: Array = component([group.work_since], names)[0].sum(axis=1)
        return by_itself
    whole: Array = component([group.work], names)[0].sum(axis=1)
    return whole if group.hidden is None else whole + component([group.hidden], names)[0].sum(axis=1)


def usual_transfer(group: CycleGroup, kind: str = SyncKind.GRADIENTS) -> Array:
    """[N, K] ns: exposed transfer of this kind of collectives, cut at what it usually takes over the cycles."""
    exposed = group.transfer if group.exposed is None else group.exposed
    taken = exposed * np.array([s.kind == kind for s in group.syncs])[None, :]
    usual: Array = np.minimum(taken, np.quantile(taken, _USUAL, axis=0)[None, :])
    return usual


def _spent(group: CycleGroup, kinds: Sequence[SyncKind]) -> Array:
    """[N, K, R] ns inside synchronisations of these kinds, waiting included."""
    inside = np.nan_to_num(group.end - group.arrival)
    if group.beside is not None:
        inside = np.clip(inside - group.beside, 0, None)
    chosen = np.array([s.kind in kinds for s in group.syncs])
    result: Array = inside * chosen[None, :, None]
    return result
