"""Prices one cause by a replay without it: the cost with its range, ranks, steps and source lines.

The 90 % interval of a cost is the interval for the time that fixing the cause would save. This saving is the difference between the mean of
the recorded steps and the mean of future steps. It differs from the cost by independent errors, whose squares are added:

- **scatter of the cycles**: the error of the mean gain, and that of the mean rest of a step (its time without the gain), which counts
  twice: as recorded, and in the future. Both are estimated from the cycles, see :func:`~ddpdoctor.measure.numerics.mean_error`;
- **run to run**: the mean step of the same job differs from one start to the next;
- **the replay**: it removes the cause and leaves all else unchanged. If gains differ between cycles, this can be checked: the rest of a
  cycle must not depend on its gain. If ``rest = a + b x gain``, the saving may be ``1 + b`` times the cost. ``b`` is shrunk towards 0, the
  more so the fewer the cycles, by comparing its error with the known error of replays. An error that is the same in all cycles is not
  detected;
- **the clocks** of several hosts, which differ, and the pricer's assumptions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.attribution import LATENESS, Attribution, component
from ddpdoctor.measure.facts import RANGE_LEVEL, BucketFacts, Cost, saving, scaled
from ddpdoctor.measure.graph import CycleGroup, Graph
from ddpdoctor.measure.metrics import Cores, MessageCost
from ddpdoctor.measure.numerics import (
    PERSISTENCE,
    Array,
    Ints,
    Mask,
    Value,
    mean_error,
    normal,
    periodic_share,
    persistence,
)
from ddpdoctor.measure.places import Where
from ddpdoctor.measure.replay import Change, replay_all
from ddpdoctor.measure.sourcelines import SourceLines
from ddpdoctor.measure.steplog import RankLog, Step, StepPattern, settled_steps, undisturbed
from ddpdoctor.measure.taxonomy import STANDALONE, Component, Components, LateCause
from ddpdoctor.rundir.stepevents import EventKind


class _Tuning(msgspec.Struct, frozen=True):
    hit_share: float = 0.02
    """A cause occurs in a cycle if it takes at least this share of the mean cycle. Steps of one job differ by as much anyway."""
    typical: float = 0.5
    """A cycle has the cause at its typical size if it takes at least this part of its mean time there. If these cycles are a range of
    steps, or every n-th step, or few, only they count as having the cause, although it takes a little time in others."""
    fewest: int = 20
    """Minimum number of cycles for which ``typical`` is used."""
    usual_gain: float = 0.4
    """Quantile of the cycles' gains that counts as the usual gain: below the median, so that disturbances in half of the steps do not
    determine the cost."""
    close: float = 0.2
    """The costs under the two assumptions on uncertain dependencies are both reported if they differ by more than this part of the larger
    one."""
    replay_share: float = 0.08
    """Relative error of replays (standard deviation), from test jobs with and without the fix, see docs/how-it-works.md."""
    run_share: float = 0.01
    """Standard deviation of a job's mean step from one start to the next, as a part of the step. Typically 1 to 2 %, which is also the
    smallest share in the rules."""


PRICE_TUNING = _Tuning()
_MIN_STRATUM = 3
"""Minimum number of cycles for which the error of the mean can be estimated, see :func:`~ddpdoctor.measure.numerics.mean_error`."""


Costs = dict[str, Cost]
"""Path of the fact → its cost."""


class RareSource(msgspec.Struct, frozen=True):
    """A recording, other than the primary graph, that is searched for pauses in few steps."""

    graph: Graph
    """Of the whole run."""
    lines: SourceLines
    kinds: dict[str, Components]
    """Cause of lateness that this graph shows → its components."""


class ReducerCosts(msgspec.Struct, frozen=True):
    """Time that the reduction of gradients takes on the thread that computes the gradients, ns."""

    synced_ns: tuple[float, ...] = ()
    """Per backward pass, by position of the rank; 0 if unknown. Empty: unknown on all ranks."""
    issue_ns: tuple[float, ...] = ()
    """Per bucket. Contains only ranks for which it is known."""


class Context(msgspec.Struct, frozen=True, dict=True):
    """The input of pricers: the results of all earlier stages, and :meth:`cost`, which replays the graph."""

    graph: Graph
    """The primary graph."""
    attribution: Attribution
    lines: SourceLines
    """Of the same recording as ``graph``."""
    mean_step_ms: float | None = None
    """Mean measured step as the report shows it: from the step logs if there are any, even if ``graph`` is from a window."""
    profiler_ns: float = 0.0
    """ns that the profiler adds to each cycle of ``graph``: time in which devices wait for hosts that the profiler slows down."""
    log_graph: Graph | None = None
    """Of the step logs, if ``graph`` is of windows."""
    logs: Sequence[RankLog] = ()
    patterns: Sequence[StepPattern] = ()
    """Of the steps of the run."""
    rare_sources: Sequence[RareSource] = ()
    device_run: RareSource | None = None
    """The whole run in device time, if ``graph`` is of windows, which are shorter."""
    loader_limit_ms: float = 0.0
    """Lower limit of the mean step: the time that the workers of the slowest rank's loader take for its batches; 0 if unknown, or if they
    lack cores, of which a shorter step leaves them more."""
    throttled_ranks: Sequence[int] = ()
    """Rank numbers whose devices' clocks were lowered more than the others'."""
    reducer: ReducerCosts = msgspec.field(default_factory=ReducerCosts)
    reductions: BucketFacts = BucketFacts()
    message: MessageCost = msgspec.field(default_factory=MessageCost)
    host_timed: bool = True
    """Whether ``graph`` is that of the step logs, in which a busy machine disturbs transfers."""
    cores: Cores | None = None
    """Cores of the host with the fewest spare cores. None if unknown: costs then do not depend on them."""
    asleep: Mapping[int, float] = msgspec.field(default_factory=dict)
    """By rank, the part of the time to prepare batches in which no core is used (such as waiting for storage), if known."""

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
        """The part of ``gain_ns`` that is also saved if the work is not removed, but done concurrently with the step on spare cores."""
        if self.cores is None:
            return gain_ns
        return min(gain_ns, self.mean_ns - self.cores.shortest_step(self.mean_ns))

    def overlappable_transfer_ns(self, gain_ns: float) -> float:
        """The part of ``gain_ns`` that is saved if transfers overlap with computation: all of it on devices; on CPUs, whose cores do both,
        as much as spare cores allow."""
        if self.cores is None or all(group.on_device for group in self.graph.groups):
            return gain_ns
        return self.overlappable_ns(gain_ns * self.cores.hidden_share)

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
        """The cost of a cause: the time that the changes save.

        ``spent`` [N, K, R or 1] ns per group is the time that the cause takes; ``components`` are those of its work. ``positions`` are the
        stragglers (None: all ranks). With ``usually`` a cycle gains at most the usual gain of a cycle. ``part`` is the cause's share if
        several causes have one common cost. ``where``, ``operation`` and ``fields`` override fields of the :class:`Cost`; ``lines_of`` are
        the components whose source lines are used (default: ``components``).
        """
        gains = _gains_ns(self.graph, self.measured_ns, changes, usually)
        gain_ns = max(0.0, float(gains.mean()))
        per_cycle = _per_cycle(spent)
        hit = self._hit(per_cycle)
        pattern = persistence(self.steps[self._order], hit[self._order])
        periodic = hit if pattern.kind == "periodic" else None
        when = self._steps_hit_or_all(hit)
        own_ms, typical_ms = self._time_spent_ms(spent, components, positions)
        if where is None and components:
            where = self.lines.work(lines_of or components, positions, when, fallback_steps=self.steps)
        return Cost(
            **{
                **self._saving(gains, gain_ns, part, self._dependency_bounds_ns(changes, usually), periodic),
                "beside_ms_per_step": self._overlappable_ms(
                    gain_ns if part is None else part.part_ns, components, positions
                ),
                "ranks": None if positions is None else [self.graph.ranks[p] for p in positions],
                "own_ms": own_ms,
                "typical_ms": typical_ms,
                "occurrence_ms": float(np.median(per_cycle[hit])) / 1e6 if hit.any() else None,
                **pattern.as_facts(),
                "stands_out_in": self._single_steps(components, hit, gain_ns),
                "where": where or [],
                "gap": self.lines.gap(components, positions, when) if components else None,
                "operation": operation or self.lines.operation(components, positions),
                **fields,
            }
        )

    def steps_hit(self, spent: Sequence[Array]) -> Ints:
        """Numbers of the steps in which a cause occurs (``spent``: see :meth:`cost`); all steps if it takes too little time in each."""
        return self._steps_hit_or_all(self._hit(_per_cycle(spent)))

    def _hit(self, per_cycle: Array) -> Mask:
        at_all: Mask = per_cycle > PRICE_TUNING.hit_share * self.mean_ns
        if len(per_cycle) < PRICE_TUNING.fewest:
            return at_all
        typical = at_all & (per_cycle > PRICE_TUNING.typical * per_cycle.mean())
        kind = persistence(self.steps[self._order], typical[self._order]).kind
        few = typical.mean() < 1.0 - PERSISTENCE.always_share
        return typical if kind in ("range", "periodic") or few else at_all

    def _saving(
        self,
        gains: Array,
        gain_ns: float,
        part: Value | None,
        either_ns: tuple[float, float] | None,
        periodic: Mask | None,
    ) -> dict[str, Any]:
        """The fields of a :class:`Cost` for its amount and range, from ``gains`` [cycles, group by group] and their mean ``gain_ns``.
        ``either_ns``: mean gains for both assumptions on uncertain dependencies, or None; ``periodic`` [cycles]: in which cycles a periodic
        cause occurs, or None if the cause is not periodic."""
        rest = self.measured_ns - gains
        own_ns = gain_ns if part is None else part.part_ns
        others_ns = () if part is None else (part.first_ns, part.part_ns, part.last_ns)
        assumed_ns = self.graph.clock_error_ns or 0.0
        hit = None if periodic is None else periodic[self._order]
        ends_ns = price_range(gains[self._order], rest[self._order], assumed_ns, hit)
        either_ms = {}
        if either_ns is not None:
            ends_ns = None if ends_ns is None else (min(*ends_ns, *either_ns), max(*ends_ns, *either_ns))
            own = own_ns / gain_ns if gain_ns else 1.0
            names = ("waiting_ms_per_step", "going_on_ms_per_step")
            either_ms = {name: own * ns / 1e6 for name, ns in zip(names, either_ns, strict=True)}
        return {
            "ms_per_step": own_ns / 1e6,
            **range_fields(gain_ns, ends_ns, *others_ns),
            "share": own_ns / self.mean_ns,
            "speedup": self.mean_ns / max(self.mean_ns - gain_ns, 1.0),
            "alone_ms_per_step": None if part is None else part.first_ns / 1e6,
            "remaining_ms_per_step": None if part is None else part.last_ns / 1e6,
            **either_ms,
        }

    def _dependency_bounds_ns(self, changes: Sequence[Change], usually: bool) -> tuple[float, float] | None:
        """(mean gain if all computation with an uncertain dependency waits for its collective, mean gain if none does); None if no
        dependency is uncertain, or if it makes little difference."""
        if not self._dependency_bound_graphs:
            return None
        waiting, going_on = (
            max(0.0, float(_gains_ns(graph, measured_ns, changes, usually).mean()))
            for graph, measured_ns in self._dependency_bound_graphs
        )
        matters = abs(waiting - going_on) > PRICE_TUNING.close * max(waiting, going_on)
        return (waiting, going_on) if matters else None

    @cached_property
    def _dependency_bound_graphs(self) -> list[tuple[Graph, Array]]:
        """(graph, its [cycles] lengths) with every uncertain dependency present, and with each absent; [] if none is uncertain, and on
        CPUs, where dependencies have no effect."""
        known = [group.dependency_probability for group in self.graph.groups if group.on_device]
        if not any(((of_group > 0) & (of_group < 1)).any() for of_group in known):
            return []
        graphs = [
            replace(self.graph, groups=[group.with_dependencies(waits) for group in self.graph.groups])
            for waits in (True, False)
        ]
        return [(graph, replay_all(graph)) for graph in graphs]

    def _overlappable_ms(
        self, own_ns: float, components: Components, positions: Sequence[int] | None
    ) -> float | None:
        """ms of a data cost that more data loader workers could save. They prepare batches concurrently with the step, as far as spare
        cores allow; waiting for storage needs no core. None if the cores are unknown, or for other costs."""
        if self.cores is None or Component.DATA not in components:
            return None
        ranks = self.graph.ranks if positions is None else [self.graph.ranks[p] for p in positions]
        asleep = min((self.asleep.get(rank, 0.0) for rank in ranks), default=0.0)
        return max(self.overlappable_ns(own_ns), asleep * own_ns) / 1e6

    def _single_steps(self, components: Components, hit: Mask, gain_ns: float) -> list[int]:
        """Steps of a short window that the report lists by number. Checkpoints and waits for data are recorded events, so even a single one
        is certain. Waits for data are listed only if there are fewer than three and if they cost enough of the window."""
        if not self.attribution.short or hit.all():
            return []
        few = (
            0 < hit.sum() < PERSISTENCE.fewest_of_pattern and gain_ns >= LATENESS.window_share * self.mean_ns
        )
        listed = Component.CHECKPOINT in components or (Component.DATA in components and bool(few))
        return sorted(self.steps[hit].tolist()) if listed else []

    def _steps_hit_or_all(self, hit: Mask) -> Ints:
        """The steps that are ``hit``; all steps if none is."""
        return self.steps[hit] if hit.any() else self.steps

    def _time_spent_ms(
        self, spent: Sequence[Array], components: Components, positions: Sequence[int] | None
    ) -> tuple[float | None, float | None]:
        """(mean ms per step of the stragglers, median of the other ranks); (mean of the median rank, None) if ``positions`` or
        ``components`` are missing."""
        if positions is None or not components:
            means = np.concatenate([of_group.sum(axis=1) for of_group in spent]).mean(axis=0)
            return float(np.median(means)) / 1e6, None
        # Including work that overlaps with synchronisations. For devices' waiting for hosts, the time that each rank would need alone.
        work = [
            g.work_with_overlap if waits_for_hosts(g, components) else g.with_overlap(g.work)
            for g in self.graph.groups
        ]
        work_ns = np.concatenate([own.sum(axis=1) for own in component(work, components)]).mean(axis=0)
        others = [position for position in range(len(self.graph.ranks)) if position not in positions]
        typical_ms = float(np.median(work_ns[others])) / 1e6 if others else None
        return float(work_ns[list(positions)].mean()) / 1e6, typical_ms

    @cached_property
    def undisturbed(self) -> list[tuple[int, list[Step]]]:
        """See :func:`ddpdoctor.measure.steplog.undisturbed`."""
        return undisturbed(self.logs)

    @cached_property
    def drawn(self) -> Array:
        """[cycles, R, C] ns of each component as recorded, and as charts show it; group after group."""
        return np.concatenate(
            [
                group.with_overlap(group.work).sum(axis=1) if group.recorded is None else group.recorded
                for group in self.graph.groups
            ]
        )

    def per_recorded_save(self, cost: Cost) -> Cost:
        """The cost of checkpoints, scaled from their frequency in the measured steps to that in all steps recorded in full after the
        warm-up. The two differ because few steps have a checkpoint, and some of these are excluded (disturbed by the profiler or an
        evaluation). ``share`` then refers to the mean step with that frequency."""
        if self.graph.source != "step-log" or not self.logs:
            return cost
        settled = settled_steps(self.logs)
        numbers = np.array(list(settled), np.int64)
        saved: Mask = np.array(
            [
                any(event.kind == EventKind.SAVE for step in steps for event in step.events)
                for steps in settled.values()
            ],
            bool,
        )
        measured = np.isin(numbers, self.steps)
        if not (saved & measured).any():
            return cost
        often = self._at_frequency(cost, float(saved.mean() / saved[measured].mean()))
        return replace(often, **persistence(numbers, saved).as_facts())

    def at_its_period(self, cost: Cost, hits: Ints) -> Cost:
        """The cost of a periodic cause, which occurs in the steps ``hits``, scaled from its frequency in the measured steps to that in the
        run. The two differ because few steps have the cause, and some of these are excluded (disturbed by the profiler or an
        evaluation)."""
        if cost.persistence != "periodic" or not cost.period_steps or self.graph.source != "step-log":
            return cost
        share = periodic_share(self.steps, hits, cost.period_steps)
        return self._at_frequency(cost, share * len(self.steps) / len(hits))

    def _at_frequency(self, cost: Cost, factor: float) -> Cost:
        """``cost`` for a cause that is ``factor`` times as frequent as in the measured steps."""
        mean_ms = self.mean_ns / 1e6
        step_ms = mean_ms + (factor - 1.0) * cost.ms_per_step
        saved_ms = factor * mean_ms * (1.0 - 1.0 / cost.speedup)
        return replace(
            scaled(cost, factor, step_ms, also=("own_ms", "typical_ms")),
            speedup=step_ms / max(step_ms - saved_ms, 1e-3),
        )


def _per_cycle(spent: Sequence[Array]) -> Array:
    """[cycles] maximum over the ranks of the time spent, ns."""
    per_cycle: Array = np.concatenate([of_group.sum(axis=1).max(axis=1) for of_group in spent])
    return per_cycle


def _gains_ns(graph: Graph, measured_ns: Array, changes: Sequence[Change], usually: bool) -> Array:
    """[cycles] ns by which each cycle of a graph, ``measured_ns`` long, is shorter with the changes; with ``usually`` at most the
    usual gain."""
    gains: Array = measured_ns - replay_all(graph, changes)
    return np.minimum(gains, np.quantile(gains, PRICE_TUNING.usual_gain)) if usually else gains


def waits_for_hosts(group: CycleGroup, components: Components) -> bool:
    """Whether these components include devices' waiting for hosts, and the group knows how much of it overlaps with waiting for other
    ranks."""
    return LateCause.HOST in group.standalone_ns and not set(components).isdisjoint(
        STANDALONE[LateCause.HOST]
    )


def price_range(
    gains: Array, rest: Array, assumed_ns: float = 0.0, periodic: Mask | None = None
) -> tuple[float, float] | None:
    """(low, high) of the mean gain, ns, between 0 and the whole step; None with too few cycles.

    ``gains`` [N] ns by cycle, in order of steps; ``rest`` [N] ns of each cycle without its gain; ``assumed_ns`` is the standard deviation
    of clocks and assumptions; ``periodic`` [N] are the cycles that a periodic cause hits, or None.
    """
    gain, left = float(gains.mean()), float(rest.mean())
    own, others = _error_of_gains(gains, periodic), mean_error(rest, RANGE_LEVEL)
    if np.isnan(own):
        return None
    spread = gains - gain
    square = float((spread**2).sum())
    slope = 0.0
    if square > 0.0:
        # ``error``: squared error of the slope. The error of one value is sqrt(N) times that of the mean of N values; that of the slope is
        # the error of one value / sqrt(square).
        error, known = others**2 * len(rest) / square, PRICE_TUNING.replay_share**2
        slope = float((spread * rest).sum()) / square * known / (known + error)
    errors = (
        own,
        np.sqrt(2.0) * others,
        PRICE_TUNING.run_share * left,
        PRICE_TUNING.replay_share * gain,
        assumed_ns,
    )
    half = normal(RANGE_LEVEL) * float(np.sqrt(np.square(errors).sum()))
    low, high = gain * (1 + min(slope, 0.0)) - half, gain * (1 + max(slope, 0.0)) + half
    return max(0.0, low), min(gain + left, high)


def _error_of_gains(gains: Array, periodic: Mask | None) -> float:
    """Standard deviation of the error of the mean of ``gains`` [N]. The number of cycles with a periodic cause is not random, so only the
    mean gain of the cycles with it, and that of the cycles without it, have errors (stratified sampling)."""
    if periodic is not None and _MIN_STRATUM <= periodic.sum() <= len(gains) - _MIN_STRATUM:
        parts = ((float(of.mean()), mean_error(gains[of], RANGE_LEVEL)) for of in (periodic, ~periodic))
        return math.hypot(*(share * error for share, error in parts))
    return mean_error(gains, RANGE_LEVEL)


def range_fields(gain_ns: float, ends_ns: tuple[float, float] | None, *others_ns: float) -> dict[str, Any]:
    """The fields of a :class:`~ddpdoctor.measure.facts.Cost` for a range around ``gain_ns``, widened to include ``others_ns``: other
    estimates of the saving (of this fix alone, of this fix after all others, its share of the joint saving). {} if there is no range."""
    if ends_ns is None:
        return {}
    known = (gain_ns, *others_ns)
    low_ns, high_ns = min(known) - (gain_ns - ends_ns[0]), max(known) + (ends_ns[1] - gain_ns)
    return {"low_ms_per_step": max(0.0, low_ns) / 1e6, "high_ms_per_step": high_ns / 1e6}


def range_of_share(whole: Cost, ms: float, assumed_share: float) -> dict[str, Any]:
    """The fields of a cost for the range of ``ms``, a part of the cost ``whole``. The range is as wide as that of ``whole`` (in ms),
    widened by an additional error: a standard deviation of ``assumed_share`` of ``ms``. {} if ``whole`` has no range."""
    sides = _sides_ms(whole)
    assumed_ms = normal(RANGE_LEVEL) * assumed_share * ms
    return {} if sides is None else _around(ms, *(float(np.hypot(side, assumed_ms)) for side in sides))


def range_of_sum(one: Cost, other: Cost, ms: float) -> dict[str, Any]:
    """The fields of a cost for the range of ``ms``, the sum of two costs; {} if one of them has no range."""
    sides = _sides_ms(one), _sides_ms(other)
    if sides[0] is None or sides[1] is None:
        return {}
    return _around(ms, *(float(np.hypot(*pair)) for pair in zip(sides[0], sides[1], strict=True)))


def _sides_ms(cost: Cost) -> tuple[float, float] | None:
    """Distances of the ends of the range below and above the cost, ms."""
    if cost.low_ms_per_step is None or cost.high_ms_per_step is None:
        return None
    return cost.ms_per_step - cost.low_ms_per_step, cost.high_ms_per_step - cost.ms_per_step


def _around(ms: float, below_ms: float, above_ms: float) -> dict[str, Any]:
    return {"low_ms_per_step": max(0.0, ms - below_ms), "high_ms_per_step": ms + above_ms}


def add_cost(cost: Cost, more: Cost, ms: float, mean_ms: float) -> Cost:
    """``cost`` increased to ``ms`` by ``more``, with the range of the sum of both."""
    unsure = {**dict.fromkeys(("low_ms_per_step", "high_ms_per_step")), **range_of_sum(cost, more, ms)}
    return replace(cost, **saving(ms, mean_ms), waiting_ms_per_step=None, going_on_ms_per_step=None, **unsure)
