"""Price one cause by a replay without it, with its ranks, steps and source lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.attribution import LATENESS, component
from ddpdoctor.measure.facts import Cost
from ddpdoctor.measure.graph import CycleGroup, Graph
from ddpdoctor.measure.metrics import Cores
from ddpdoctor.measure.numerics import PERSISTENCE, Array, Ints, Mask, Value, persistence
from ddpdoctor.measure.places import Where
from ddpdoctor.measure.replay import Change, replay_all
from ddpdoctor.measure.sourcelines import SourceLines
from ddpdoctor.measure.taxonomy import STANDALONE, Component, Components, LateCause

from .price_range import PriceRange, range_fields


class _Tuning(msgspec.Struct, frozen=True):
    hit_share: float = 0.02
    """A cause happens in a cycle when it takes at least this share of the mean cycle: steps of one job differ by as much."""
    typical: float = 0.5
    """Part of a cause's mean time from which on a cycle has it in its typical size. Where such cycles are a range of steps, every n-th
    step, or few, the cause happens there: what little it takes in all other cycles is not "every step"."""
    fewest: int = 20
    """Cycles from which on such cycles count as a range or as every n-th step."""
    usual_gain: float = 0.4
    """Quantile of the cycles' gains that counts as the usual gain: below the median, so that disturbances in half of the steps do not
    set the price."""
    close: float = 0.2
    """Two prices that differ by more than this part of the larger are both reported."""


_TUNING = _Tuning()


class Pricing(msgspec.Struct, frozen=True, dict=True):
    """Turns replays of one graph into costs."""

    graph: Graph
    lines: SourceLines
    short: bool = False
    """Whether a short device window is the only recording of the job."""
    cores: Cores | None = None
    """Cores of the host with the fewest spare ones; None where unknown."""
    asleep: Mapping[int, float] = msgspec.field(default_factory=dict)
    """By rank, the part of preparing batches in which nothing computes, where known."""

    @cached_property
    def mean_ns(self) -> float:
        """Mean cycle, ns."""
        return self.graph.mean_cycle_ns

    @cached_property
    def steps(self) -> Ints:
        """[cycles] step numbers, group by group."""
        return self.graph.numbers

    @cached_property
    def _order(self) -> Ints:
        """[cycles] indices that sort the cycles by step."""
        return np.argsort(self.steps, kind="stable")

    @cached_property
    def measured_ns(self) -> Array:
        """[cycles] ns: replayed lengths without changes."""
        return replay_all(self.graph)

    def overlappable_ns(self, gain_ns: float) -> float:
        """The part of a gain that remains where the work is not removed, but overlapped with the step on spare cores."""
        if self.cores is None:
            return gain_ns
        return min(gain_ns, self.mean_ns - self.cores.shortest_step(self.mean_ns))

    def gains_ns(self, changes: Sequence[Change]) -> Array:
        """[cycles] ns by which each cycle is shorter with the changes."""
        return _gains_ns(self.graph, self.measured_ns, changes, usually=False)

    def cost(
        self,
        changes: Sequence[Change],
        spent: Sequence[Array],
        components: Components = (),
        positions: Sequence[int] | None = None,
        *,
        usually: bool = False,
        part: Value | None = None,
        where: list[Where] | None = None,
        lines_of: Components = (),
        operation: str | None = None,
        **fields: Any,
    ) -> Cost:
        """The cost of a cause: what the changes save.

        ``spent`` [N, K, R or 1] ns per group is the time of the cause, whose work is of these ``components``, and ``positions``
        are the stragglers (None: all ranks). With ``usually`` a cycle gains at most the usual gain of a cycle. ``part`` is the cause's
        share of what several causes save together. ``where``, ``operation`` and ``fields`` override fields of the :class:`Cost`;
        ``lines_of`` are the components whose source lines to use, where not all.
        """
        gains = _gains_ns(self.graph, self.measured_ns, changes, usually)
        gain_ns = max(0.0, float(gains.mean()))
        either_ns = self._either_way_ns(changes, usually)
        ends_ns = self._range_ns(gains, either_ns or ())
        per_cycle = _per_cycle(spent)
        hit = self._hit(per_cycle)
        own_ms, typical_ms = self._time_spent_ms(spent, components, positions)
        return Cost(
            **{
                **self._saving(gain_ns, ends_ns, part, components, positions),
                **_either_way_fields(gain_ns, part, either_ns),
                "ranks": None if positions is None else [self.graph.ranks[p] for p in positions],
                "own_ms": own_ms,
                "typical_ms": typical_ms,
                "occurrence_ms": float(np.median(per_cycle[hit])) / 1e6 if hit.any() else None,
                **persistence(self.steps[self._order], hit[self._order]).as_facts(),
                "stands_out_in": self._single_steps(components, hit, gain_ns),
                "where": self._where(lines_of or components, positions, hit) if where is None else where,
                "gap": self.lines.gap(components, positions, self._when_hit(hit)) if components else None,
                "operation": operation or self.lines.operation(components, positions),
                **fields,
            }
        )

    def steps_hit(self, spent: Sequence[Array]) -> Ints:
        """Numbers of the steps in which a cause takes time, see :meth:`cost`; of all steps where it is too little in each."""
        return self._when_hit(self._hit(_per_cycle(spent)))

    def _hit(self, per_cycle: Array) -> Mask:
        at_all: Mask = per_cycle > _TUNING.hit_share * self.mean_ns
        if len(per_cycle) < _TUNING.fewest:
            return at_all
        typical = at_all & (per_cycle > _TUNING.typical * per_cycle.mean())
        kind = persistence(self.steps[self._order], typical[self._order]).kind
        few = typical.mean() < 1.0 - PERSISTENCE.always_share
        return typical if kind in ("range", "periodic") or few else at_all

    def _range_ns(self, gains: Array, either_ns: Sequence[float]) -> tuple[float, float] | None:
        """(low, high) of the mean of ``gains`` [cycles, group by group], see :class:`PriceRange`; wide enough for both means
        where dependencies are uncertain."""
        rest = self.measured_ns - gains
        ends_ns = PriceRange(
            gains[self._order], rest[self._order], self.graph.clock_error_ns or 0.0
        ).range_ns()
        return None if ends_ns is None else (min(*ends_ns, *either_ns), max(*ends_ns, *either_ns))

    def _saving(
        self,
        gain_ns: float,
        ends_ns: tuple[float, float] | None,
        part: Value | None,
        components: Components,
        positions: Sequence[int] | None,
    ) -> dict[str, Any]:
        """The fields of a cost for its amount and range."""
        own_ns = gain_ns if part is None else part.part_ns
        others_ns = () if part is None else (part.first_ns, part.part_ns, part.last_ns)
        return {
            "ms_per_step": own_ns / 1e6,
            **range_fields(gain_ns, ends_ns, *others_ns),
            "beside_ms_per_step": self._overlappable_ms(own_ns, components, positions),
            "share": own_ns / self.mean_ns,
            "speedup": self.mean_ns / max(self.mean_ns - gain_ns, 1.0),
            "alone_ms_per_step": None if part is None else part.first_ns / 1e6,
            "remaining_ms_per_step": None if part is None else part.last_ns / 1e6,
        }

    def _either_way_ns(self, changes: Sequence[Change], usually: bool) -> tuple[float, float] | None:
        """(mean gain if all computation with an uncertain dependency waits for its collective, mean gain if none does); None where no
        dependency is uncertain, or it makes little difference."""
        if not self._either_way_graphs:
            return None
        waiting, going_on = (
            max(0.0, float(_gains_ns(graph, measured_ns, changes, usually).mean()))
            for graph, measured_ns in self._either_way_graphs
        )
        matters = abs(waiting - going_on) > _TUNING.close * max(waiting, going_on)
        return (waiting, going_on) if matters else None

    @cached_property
    def _either_way_graphs(self) -> list[tuple[Graph, Array]]:
        """(graph, its [cycles] lengths) with every uncertain dependency present, and with each absent; [] where none is uncertain, or
        on CPUs, where they do not matter."""
        sure = [
            group.dependency_probability
            for group in self.graph.groups
            if group.on_device and group.dependency_probability is not None
        ]
        if not any(((of_group > 0) & (of_group < 1)).any() for of_group in sure):
            return []
        graphs = [
            replace(self.graph, groups=[group.with_dependencies(waits) for group in self.graph.groups])
            for waits in (True, False)
        ]
        return [(graph, replay_all(graph)) for graph in graphs]

    def _overlappable_ms(
        self, own_ns: float, components: Components, positions: Sequence[int] | None
    ) -> float | None:
        """ms of a data cost that more dataloader workers can save: preparing batches overlaps with the step as far as spare cores
        allow. Time in which nothing computes, such as waiting for storage, needs no core. None where the cores are unknown."""
        if self.cores is None or Component.DATA not in components:
            return None
        ranks = self.graph.ranks if positions is None else [self.graph.ranks[p] for p in positions]
        asleep = min((self.asleep.get(rank, 0.0) for rank in ranks), default=0.0)
        return max(self.overlappable_ns(own_ns), asleep * own_ns) / 1e6

    def _single_steps(self, components: Components, hit: Mask, gain_ns: float) -> list[int]:
        """Steps of a short window that are reported one by one. Checkpoints and waiting for data are recorded as such, so a single one
        is certain. A wait for data is listed only where it costs enough of the window, and fewer than three times."""
        if not self.short or hit.all():
            return []
        few = (
            0 < hit.sum() < PERSISTENCE.fewest_of_pattern and gain_ns >= LATENESS.window_share * self.mean_ns
        )
        listed = Component.CHECKPOINT in components or (Component.DATA in components and bool(few))
        return sorted(self.steps[hit].tolist()) if listed else []

    def _where(self, components: Components, positions: Sequence[int] | None, hit: Mask) -> list[Where]:
        if not components:
            return []
        return self.lines.work(components, positions, self._when_hit(hit), or_else=self.steps)

    def _when_hit(self, hit: Mask) -> Ints:
        """The steps in which it happens; all where there are none."""
        return self.steps[hit] if hit.any() else self.steps

    def _time_spent_ms(
        self, spent: Sequence[Array], components: Components, positions: Sequence[int] | None
    ) -> tuple[float | None, float | None]:
        """(mean ms per step of the stragglers, or of the median rank where ``positions`` is None; median of the others)."""
        if positions is None or not components:
            means = np.concatenate([of_group.sum(axis=1) for of_group in spent]).mean(axis=0)
            return float(np.median(means)) / 1e6, None
        work = np.concatenate([_whole_work(group, components) for group in self.graph.groups]).mean(axis=0)
        others = [position for position in range(len(self.graph.ranks)) if position not in positions]
        typical_ms = float(np.median(work[others])) / 1e6 if others else None
        return float(work[list(positions)].mean()) / 1e6, typical_ms


def _per_cycle(spent: Sequence[Array]) -> Array:
    """[cycles] ns of the rank that spends most in each cycle."""
    per_cycle: Array = np.concatenate([of_group.sum(axis=1).max(axis=1) for of_group in spent])
    return per_cycle


def _gains_ns(graph: Graph, measured_ns: Array, changes: Sequence[Change], usually: bool) -> Array:
    """[cycles] ns by which each cycle of a graph, ``measured_ns`` long, is shorter with the changes; with ``usually`` at most the
    usual gain."""
    gains: Array = measured_ns - replay_all(graph, changes)
    return np.minimum(gains, np.quantile(gains, _TUNING.usual_gain)) if usually else gains


def _either_way_fields(
    gain_ns: float, part: Value | None, either_ns: tuple[float, float] | None
) -> dict[str, float]:
    """The fields of a cost for both assumptions on uncertain dependencies, where these matter."""
    if either_ns is None:
        return {}
    own = 1.0 if part is None or not gain_ns else part.part_ns / gain_ns
    return {"waiting_ms_per_step": own * either_ns[0] / 1e6, "going_on_ms_per_step": own * either_ns[1] / 1e6}


def set_by_hosts(group: CycleGroup, components: Components) -> bool:
    """Whether these components include devices' waiting for hosts, part of which is hidden in the wait for other ranks."""
    return LateCause.HOST in group.standalone_ns and not set(components).isdisjoint(
        STANDALONE[LateCause.HOST]
    )


def _whole_work(group: CycleGroup, components: Components) -> Array:
    """[N, R] ns of these components in the cycle, including work that overlaps with synchronisations; where devices wait for hosts, as
    each rank would have them without the others."""
    work = group.work_with_overlap if set_by_hosts(group, components) else group.with_overlap(group.work)
    whole: Array = component([work], components)[0].sum(axis=1)
    return whole
