"""One cause's price: a replay without it, with who, when and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.attribution import STANDOUT, component
from ddpdoctor.measure.facts import Cost
from ddpdoctor.measure.graph import CycleGroup, Graph
from ddpdoctor.measure.metrics import Cores
from ddpdoctor.measure.numerics import Array, Ints, Mask, Value, persistence
from ddpdoctor.measure.places import Where
from ddpdoctor.measure.replay import Change, replay_all
from ddpdoctor.measure.sourcelines import SourceLines
from ddpdoctor.measure.taxonomy import STANDALONE, Component, Components, LateCause

from .sureness import Sureness, range_fields


class _Tuning(msgspec.Struct, frozen=True):
    hit_share: float = 0.02
    """A cause happens in a cycle when it takes at least this share of the mean cycle: steps of one job differ by as much."""
    usual_gain: float = 0.4
    """Quantile of the cycles that counts as what a cycle usually gains: below the median, so that a job that is disturbed
    in half of its steps is not priced by the disturbance."""
    close: float = 0.2
    """Two prices that differ by more than this part of the larger are told both."""
    pattern: int = 3
    """Occurrences from which on rules take something for a pattern."""


_TUNING = _Tuning()


class Pricing(msgspec.Struct, frozen=True, dict=True):
    """Turns replays of one graph into costs."""

    graph: Graph
    lines: SourceLines
    short: bool = False
    """A window on devices is all that is known of the job."""
    cores: Cores | None = None
    """What the host with the fewest to spare has of them; None where unknown."""
    asleep: Mapping[int, float] = msgspec.field(default_factory=dict)
    """By rank, the part of making batches in which nothing computes, as far as it is known."""

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
        """[cycles] their places in order of steps."""
        return np.argsort(self.steps, kind="stable")

    @cached_property
    def measured_ns(self) -> Array:
        """[cycles] ns: the cycles as they were."""
        return replay_all(self.graph)

    def beside_ns(self, gain_ns: float) -> float:
        """What of a gain is left where the work is moved beside the step, and none of it removed."""
        if self.cores is None:
            return gain_ns
        return min(gain_ns, self.mean_ns - self.cores.shortest_step(self.mean_ns))

    def gains_ns(self, changes: Sequence[Change]) -> Array:
        """[cycles] ns that each cycle is shorter with the changes."""
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
        **told: Any,
    ) -> Cost:
        """What the changes save.

        ``spent`` [N, K, R or 1] ns per group is the time that goes into the cause, whose work is of these ``components``,
        and ``positions`` the stragglers (None: all ranks are concerned). With ``usually`` a cycle gains no more than cycles
        usually do. ``part`` is the cause's share of what several causes save together. ``where``, ``operation`` and ``told``
        are fields of the :class:`Cost` that the caller knows better; ``lines_of``, those of the components whose lines are meant.
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
                **_if_decided(gain_ns, part, either_ns),
                "ranks": None if positions is None else [self.graph.ranks[p] for p in positions],
                "own_ms": own_ms,
                "typical_ms": typical_ms,
                "occurrence_ms": float(np.median(per_cycle[hit])) / 1e6 if hit.any() else None,
                **persistence(self.steps[self._order], hit[self._order]).as_facts(),
                "stands_out_in": self._single_steps(components, hit, gain_ns),
                "where": self._where(lines_of or components, positions, hit) if where is None else where,
                "gap": self.lines.gap(components, positions, self._when_hit(hit)) if components else None,
                "operation": operation or self.lines.operation(components, positions),
                **told,
            }
        )

    def steps_hit(self, spent: Sequence[Array]) -> Ints:
        """Numbers of the steps in which a cause takes time, see :meth:`cost`; of all where it is too little in each."""
        return self._when_hit(self._hit(_per_cycle(spent)))

    def _hit(self, per_cycle: Array) -> Mask:
        hit: Mask = per_cycle > _TUNING.hit_share * self.mean_ns
        return hit

    def _range_ns(self, gains: Array, either_ns: Sequence[float]) -> tuple[float, float] | None:
        """(low, high) of the mean of ``gains`` [cycles, group by group], see :class:`Sureness`; wide enough for both means
        where it is not decided what waits for what."""
        rest = self.measured_ns - gains
        ends_ns = Sureness(gains[self._order], rest[self._order], self.graph.clock_error_ns or 0.0).range_ns()
        return None if ends_ns is None else (min(*ends_ns, *either_ns), max(*ends_ns, *either_ns))

    def _saving(
        self,
        gain_ns: float,
        ends_ns: tuple[float, float] | None,
        part: Value | None,
        components: Components,
        positions: Sequence[int] | None,
    ) -> dict[str, Any]:
        """The fields of a cost that say how much it is, and how sure that is."""
        own_ns = gain_ns if part is None else part.part_ns
        others_ns = () if part is None else (part.first_ns, part.part_ns, part.last_ns)
        return {
            "ms_per_step": own_ns / 1e6,
            **range_fields(gain_ns, ends_ns, *others_ns),
            "beside_ms_per_step": self._beside_ms(own_ns, components, positions),
            "share": own_ns / self.mean_ns,
            "speedup": self.mean_ns / max(self.mean_ns - gain_ns, 1.0),
            "alone_ms_per_step": None if part is None else part.first_ns / 1e6,
            "remaining_ms_per_step": None if part is None else part.last_ns / 1e6,
        }

    def _either_way_ns(self, changes: Sequence[Change], usually: bool) -> tuple[float, float] | None:
        """Mean gain where all computation whose dependence is close waits for its collective, and where none does; None where
        nothing is close, or it makes little difference."""
        if not self._decided:
            return None
        waiting, going_on = (
            max(0.0, float(_gains_ns(graph, measured_ns, changes, usually).mean()))
            for graph, measured_ns in self._decided
        )
        matters = abs(waiting - going_on) > _TUNING.close * max(waiting, going_on)
        return (waiting, going_on) if matters else None

    @cached_property
    def _decided(self) -> list[tuple[Graph, Array]]:
        """The graph with every close dependency taken to be one, and to be none, each with its cycles as they are then; [] where
        none is close, or none matters: on CPUs."""
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

    def _beside_ms(
        self, own_ns: float, components: Components, positions: Sequence[int] | None
    ) -> float | None:
        """Of making batches, which a loader's workers do beside the step; None where the machine is not known, too. What nothing
        computes in needs no core: workers wait for storage beside a busy machine's steps as well."""
        if self.cores is None or Component.DATA not in components:
            return None
        ranks = self.graph.ranks if positions is None else [self.graph.ranks[p] for p in positions]
        asleep = min((self.asleep.get(rank, 0.0) for rank in ranks), default=0.0)
        return max(self.beside_ns(own_ns), asleep * own_ns) / 1e6

    def _single_steps(self, components: Components, hit: Mask, gain_ns: float) -> list[int]:
        """Steps of a short window that are told one by one. Checkpoints and waiting for data are recognised by what they are:
        one is one, however few there are. (A wait for data is told only where it costs enough of the window, and three of
        them are a pattern like any other.)"""
        if not self.short or hit.all():
            return []
        few = 0 < hit.sum() < _TUNING.pattern and gain_ns >= STANDOUT.window_share * self.mean_ns
        told = Component.CHECKPOINT in components or (Component.DATA in components and bool(few))
        return sorted(self.steps[hit].tolist()) if told else []

    def _where(self, components: Components, positions: Sequence[int] | None, hit: Mask) -> list[Where]:
        if not components:
            return []
        return self.lines.work(components, positions, self._when_hit(hit), or_else=self.steps)

    def _when_hit(self, hit: Mask) -> Ints:
        """The steps in which it happens, where there are any."""
        return self.steps[hit] if hit.any() else self.steps

    def _time_spent_ms(
        self, spent: Sequence[Array], components: Components, positions: Sequence[int] | None
    ) -> tuple[float | None, float | None]:
        """Mean time per step of the stragglers (or the median rank) and of the median of the others."""
        if positions is None or not components:
            means = np.concatenate([of_group.sum(axis=1) for of_group in spent]).mean(axis=0)
            return float(np.median(means)) / 1e6, None
        work = np.concatenate([_whole_work(group, components) for group in self.graph.groups]).mean(axis=0)
        others = [position for position in range(len(self.graph.ranks)) if position not in positions]
        typical_ms = float(np.median(work[others])) / 1e6 if others else None
        return float(work[list(positions)].mean()) / 1e6, typical_ms


def _per_cycle(spent: Sequence[Array]) -> Array:
    """[cycles] ns: what the rank with most of it spends."""
    per_cycle: Array = np.concatenate([of_group.sum(axis=1).max(axis=1) for of_group in spent])
    return per_cycle


def _gains_ns(graph: Graph, measured_ns: Array, changes: Sequence[Change], usually: bool) -> Array:
    """[cycles] ns that each cycle of a graph, ``measured_ns`` long, is shorter with the changes; with ``usually`` no more than
    cycles usually gain."""
    gains: Array = measured_ns - replay_all(graph, changes)
    return np.minimum(gains, np.quantile(gains, _TUNING.usual_gain)) if usually else gains


def _if_decided(
    gain_ns: float, part: Value | None, either_ns: tuple[float, float] | None
) -> dict[str, float]:
    """The fields of a cost that say how much it is either way, where that is close and matters."""
    if either_ns is None:
        return {}
    own = 1.0 if part is None or not gain_ns else part.part_ns / gain_ns
    return {"waiting_ms_per_step": own * either_ns[0] / 1e6, "going_on_ms_per_step": own * either_ns[1] / 1e6}


def set_by_hosts(group: CycleGroup, components: Components) -> bool:
    """Whether devices' waiting for hosts is among these components, part of which hides in the wait for other ranks."""
    return LateCause.HOST in group.standalone_ns and not set(components).isdisjoint(
        STANDALONE[LateCause.HOST]
    )


def _whole_work(group: CycleGroup, components: Components) -> Array:
    """[N, R] ns of these components in the cycle, beside synchronisations too; where hosts set the pace, as each rank would
    have them by itself."""
    work = group.work_with_overlap if set_by_hosts(group, components) else group.with_overlap(group.work)
    whole: Array = component([work], components)[0].sum(axis=1)
    return whole
