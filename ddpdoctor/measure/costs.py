"""The price of each cause: a replay without it, and who, when and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .blame import BLAMED, Excess, component, unseen
from .facts import Cost, LateFacts, SharedFacts, Where
from .graph import BARRIER, BROADCAST, COLLECTIVE, GRADIENTS, Array, CycleGroup, Graph
from .persistence import persistence
from .replay import Change, replay_all, without_meeting, without_transfer, without_work

_USUAL = 0.4
"""Quantile of the transfer over the cycles that counts as what the transfer itself needs."""
_LEAST_SHARE = 0.001
"""A rank whose excess saves less than this share of the step is not late."""
_HIT_SHARE = 0.02
"""A cause happens in a cycle when it takes at least this share of the mean cycle."""

SHARED = {
    "data": ("data",),
    "data_epoch_start": ("epoch_start",),
    "copy": ("copy",),
    "compute": ("forward", "backward"),
    "optimizer": ("optimizer",),
    "host": ("host",),
    "device_sync": ("device_sync",),
    "checkpoint": ("checkpoint",),
    "collection": ("collection",),
    "launch": ("launch",),
}


class Lines(Protocol):
    """Knows the user's source lines behind the measurements."""

    def work(
        self, components: Sequence[str], positions: Sequence[int] | None, steps: NDArray[np.int64]
    ) -> list[Where]:
        """Lines where these ranks (None: all) spend this kind of work in these steps, most time first."""

    def syncs(self, kinds: Sequence[str]) -> list[Where]:
        """Lines that call synchronisations of these kinds, most frequent first."""

    def operation(self, components: Sequence[str], positions: Sequence[int] | None) -> str | None:
        """Name of what is executed there, where it has one."""


class Pricing:
    """Prices causes on one graph."""

    def __init__(self, graph: Graph, found: Excess, lines: Lines) -> None:
        self.graph, self.excess, self.lines = graph, found, lines
        self.mean_ns = graph.mean_cycle_ns
        self.steps = (
            np.concatenate([g.steps for g in graph.groups]) if graph.groups else np.empty(0, np.int64)
        )
        self.order = np.argsort(self.steps, kind="stable")

    def late(self) -> LateFacts:
        """Excess on some ranks, by cause."""
        costs = {fact: self._late(names) for fact, names in BLAMED.items()}
        everything = [of.sum(axis=-1) for of in self.excess.amount]
        rest = unseen(self.graph, self.excess)
        if rest is not None:
            if costs["unknown"] is None:
                positions = [int(np.sum([of.sum(axis=(0, 1)) for of in rest], axis=0).argmax())]
                costs["unknown"] = self._price([without_work(rest)], rest, positions, ())
            everything = [a + b for a, b in zip(everything, rest, strict=True)]
        total = self._price([without_work(everything)], everything, None, ()) if any(costs.values()) else None
        return LateFacts(**costs, total=total)

    def shared(self) -> SharedFacts:
        """What is common to all ranks, by cause."""
        costs: dict[str, Cost | None] = {fact: self._common(names) for fact, names in SHARED.items()}
        costs["barrier"] = self._meeting([BARRIER])
        costs["collective"] = self._meeting([COLLECTIVE])
        costs["broadcast"] = self._meeting([BROADCAST])
        costs["communication"] = self._transfer()
        costs["redundant_sync"] = self._redundant()
        return SharedFacts(**costs)

    def _late(self, names: Sequence[str]) -> Cost | None:
        removed = component(self.excess.amount, *names)
        weight = sum((of.sum(axis=(0, 1)) for of in removed), np.zeros(len(self.graph.ranks)))
        if not weight.any():
            return None
        positions = [int(r) for r in np.argsort(-weight) if weight[r] >= 0.25 * weight.max()]
        cost = self._price([without_work(removed)], removed, sorted(positions), names)
        return cost if cost.share >= _LEAST_SHARE else None

    def _common(self, names: Sequence[str]) -> Cost | None:
        removed = [
            _common_part(component([group.work], *names)[0] - component([over], *names)[0])
            for group, over in zip(self.graph.groups, self.excess.claimed, strict=True)
        ]
        if not sum(float(of.sum()) for of in removed):
            return None
        return self._price([without_work(removed)], removed, None, names)

    def _meeting(self, kinds: Sequence[str]) -> Cost | None:
        spent = [_spent(group, kinds) for group in self.graph.groups]
        if not any(of.any() for of in spent):
            return None
        change = without_meeting(lambda group, k: group.syncs[k].kind in kinds)
        return self._price(
            [change], spent, None, (), where=self.lines.syncs(kinds), operation=self._names(kinds)
        )

    def _transfer(self) -> Cost | None:
        """Exposed transfer that comes back in every step. What goes beyond it in some steps is a disturbance
        (a busy CPU or link), and no reason to change the job."""
        taken = [usual_transfer(group) for group in self.graph.groups]
        if not any(of.any() for of in taken):
            return None
        where = self.lines.syncs([GRADIENTS])
        spent = [of[:, :, None] for of in taken]
        return self._price([without_transfer(taken)], spent, None, (), where=where)

    def _redundant(self) -> Cost | None:
        """Reductions after which the same gradients are reduced again before the optimizer steps."""

        def repeated(group: CycleGroup, k: int) -> bool:
            sync = group.syncs[k]
            return sync.kind == GRADIENTS and any(
                later.kind == GRADIENTS and later.group == sync.group and later.micro > sync.micro
                for later in group.syncs[k + 1 :]
            )

        chosen = [np.array([repeated(g, k) for k in range(len(g.syncs))]) for g in self.graph.groups]
        if not any(of.any() for of in chosen):
            return None
        taken = [
            g.transfer[:, :, None] * c[None, :, None] for g, c in zip(self.graph.groups, chosen, strict=True)
        ]
        return self._price([without_meeting(repeated)], taken, None, (), where=self.lines.syncs([GRADIENTS]))

    def _names(self, kinds: Sequence[str]) -> str | None:
        names = {s.name for group in self.graph.groups for s in group.syncs if s.kind in kinds}
        return ", ".join(sorted(names)) or None

    def _price(
        self,
        changes: Sequence[Change],
        spent: list[Array],
        positions: list[int] | None,
        names: Sequence[str],
        *,
        where: list[Where] | None = None,
        operation: str | None = None,
    ) -> Cost:
        """Replay with the changes; ``spent`` [N, K, R or 1] ns per group is the time that goes into the
        cause."""
        without_ns = float(replay_all(self.graph, changes).mean())
        gain_ns = max(0.0, self.mean_ns - without_ns)
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
            steps_hit=when.hit,
            steps_seen=when.seen,
            first_step=when.first,
            last_step=when.last,
            persistence=when.kind,
            period_steps=when.period,
            where=where if where is not None else self._where(names, positions, hit),
            operation=operation or self.lines.operation(names, positions),
        )

    def _where(
        self, names: Sequence[str], positions: list[int] | None, hit: NDArray[np.bool_]
    ) -> list[Where]:
        return (
            self.lines.work(names, positions, self.steps[hit] if hit.any() else self.steps) if names else []
        )

    def _own(
        self, spent: list[Array], positions: list[int] | None, names: Sequence[str]
    ) -> tuple[float | None, float | None]:
        """Mean time per step of the culprits (or the median rank) and of the median of the others, ms."""
        if positions is None or not names:
            means = np.concatenate([of.sum(axis=1) for of in spent]).mean(axis=0)
            return float(np.median(means)) / 1e6, None
        work = np.concatenate([_whole(g, names) for g in self.graph.groups]).mean(axis=0)
        others = [r for r in range(len(self.graph.ranks)) if r not in positions]
        typical = float(np.median(work[others])) / 1e6 if others else None
        return float(work[positions].mean()) / 1e6, typical


def _common_part(work: Array) -> Array:
    """[N, K, R] ns that the ranks have in common: of each, no more than the (lower) median rank has in the same segment."""
    own = np.clip(work, 0, None)
    middle = np.sort(own, axis=2)[:, :, (own.shape[2] - 1) // 2]
    common: Array = np.minimum(own, middle[:, :, None])
    return common


def _whole(group: CycleGroup, names: Sequence[str]) -> Array:
    """[N, R] ns of these components in the cycle, beside synchronisations too."""
    whole: Array = component([group.work], *names)[0].sum(axis=1)
    return whole if group.hidden is None else whole + component([group.hidden], *names)[0]


def usual_transfer(group: CycleGroup) -> Array:
    """[N, K] ns: exposed transfer of the gradients, cut at what it usually takes over the cycles."""
    exposed = group.transfer if group.exposed is None else group.exposed
    taken = exposed * np.array([s.kind == GRADIENTS for s in group.syncs])[None, :]
    usual: Array = np.minimum(taken, np.quantile(taken, _USUAL, axis=0)[None, :])
    return usual


def _spent(group: CycleGroup, kinds: Sequence[str]) -> Array:
    """[N, K, R] ns inside synchronisations of these kinds, waiting included."""
    inside = np.nan_to_num(group.end - group.arrival)
    if group.beside is not None:
        inside = np.clip(inside - group.beside, 0, None)
    chosen = np.array([s.kind in kinds for s in group.syncs])
    result: Array = inside * chosen[None, :, None]
    return result
