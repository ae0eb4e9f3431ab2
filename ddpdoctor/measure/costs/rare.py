"""Costs of rare stalls, from the step logs of the whole run.

**Rare pauses of jobs with devices.** A profiled window of a few steps shows what happens in every step. It usually misses a checkpoint
every hundred steps, a garbage collection, or an occasional late batch. The hook records these in each step, on the host. In a device
job the host's times show when work was issued, not when it ran, so three conditions apply that a CPU job does not need:

- the rank did far more of the work than it usually does;
- the rank was later at its next synchronisation: ``min(extra, lateness)`` counts. (The others wait for their devices
  in the next step, which looks like their own work.);
- steps took longer. A host that runs ahead of its device can pause without any loss, and catch up in the following
  steps. The lost share is the median over the occurrences of (excess of the step and its followers over the
  median step) / extra, between 0 and 1.

**Stalls in excluded steps.** A step in which the job evaluates is excluded, because its length does not represent training.
Two stalls occur in such steps:

- Loaders that restart their workers: all ranks wait for the first batches of each epoch. If each epoch ends with an evaluation,
  this stall is in excluded steps only. Its cost comes from the logs and is added to that of the measured steps.
- Evaluations on some ranks, for which the others wait. If rank 0 evaluates the whole validation set alone, all other ranks idle
  meanwhile, and dividing the set among all ranks would save most of that time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property

import msgspec
import numpy as np

from ddpdoctor.measure.attribution import LATENESS, least_outlier
from ddpdoctor.measure.facts import Cost, saving
from ddpdoctor.measure.graph import Graph, Sync, typical_arrival
from ddpdoctor.measure.numerics import Array, Ints, Mask, outliers_of_few_ranks, persistence, scatter_of
from ddpdoctor.measure.places import CodeLine, Where
from ddpdoctor.measure.sourcelines import SourceLines, ranked
from ddpdoctor.measure.steplog import RankLog, Step, evaluated
from ddpdoctor.measure.taxonomy import INDEX, RECORDED, SHARED_COMPONENTS, Components, LateCause, SharedCause
from ddpdoctor.rundir.stepevents import EventKind

from .price import Context, Costs, RareSource, price_range, range_fields
from .shared import common_work


class _Tuning(msgspec.Struct, frozen=True):
    fewest_cycles: int = 20
    """Minimum number of cycles in which pauses are searched for."""
    followers: int = 2
    """Steps after a pause that may be longer because of it: devices run behind their hosts."""
    catches_up: float = 2.0
    """Maximum number of steps that a host needs to catch up, as a multiple of the steps that it lost: it issues a step's work in at most
    half of the device's time; otherwise it is the bottleneck."""
    mostly: float = 0.5
    """Minimum part of all cycles with a synchronisation for which a separate typical lateness is computed."""


_TUNING = _Tuning()


def rare_pauses(context: Context) -> Costs:
    """``late.*`` and ``shared.*`` of pauses in few steps, from the recordings of the whole run."""
    costs: Costs = {}
    if context.mean_step_ms:
        for source in context.rare_sources:
            costs |= rare_costs(source)
    return costs


def rare_costs(source: RareSource) -> Costs:
    """The costs from one recording; {} for runs of fewer than 20 measured steps. Pauses of few ranks are ``late``, if they cost time;
    recorded pauses of all ranks are ``shared``."""
    if source.graph.cycles < _TUNING.fewest_cycles:
        return {}
    costs: Costs = {}
    for cause, components in source.kinds.items():
        pauses = _Pauses(source.graph, source.lines, components)
        late = pauses.cost_on_few_ranks()
        if late is not None and late.ms_per_step > 0:
            costs[f"late.{cause}"] = late
        common = pauses.cost_on_all_ranks() if cause in RECORDED else None
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
    def _excess(self) -> list[Array]:
        """[N, K, R] per group: excess over the rank's median work in the same segment. The median is scaled down to the rank's median work
        in a cycle of any group: if a barrier follows each checkpoint, cycles with a checkpoint are a separate group, in which saving is
        normal."""
        in_any = np.median(self.own, axis=0)
        excess = []
        for work in self._work:
            usual = np.median(work, axis=0)
            usual *= np.minimum(1.0, in_any / np.maximum(usual.sum(axis=0), 1.0))
            excess.append(np.clip(work - usual, 0, None))
        return excess

    @cached_property
    def excess(self) -> Array:
        """[N, R]: excess over the rank's usual work."""
        return self._ordered([excess.sum(axis=1) for excess in self._excess])

    @cached_property
    def delayed(self) -> Array:
        """[N, R]: the part of the excess by which the rank was later than usual at its next synchronisation."""
        late = _later_than_usual(self.graph)
        return self._ordered(
            [np.minimum(a, b).clip(0, None).sum(axis=1) for a, b in zip(self._excess, late, strict=True)]
        )

    @cached_property
    def pauses(self) -> Mask:
        """[N, R] mask of delays far beyond the rank's scatter."""
        return self._outliers(self.delayed)

    @cached_property
    def concentrated(self) -> Mask:
        """[N, R] mask of pauses that are concentrated on few ranks."""
        concentrated = outliers_of_few_ranks(self.pauses, self.delayed, self.steps)
        concentrated &= concentrated.sum(axis=0) >= LATENESS.fewest_outliers
        return concentrated

    def cost_on_few_ranks(self) -> Cost | None:
        """Cost of the pauses of few ranks; None if there are none."""
        if not self.concentrated.any():
            return None
        positions = np.flatnonzero(self.concentrated.any(axis=0)).tolist()
        return self._cost(np.where(self.concentrated, self.delayed, 0.0).max(axis=1), positions)

    def cost_on_all_ranks(self) -> Cost | None:
        """Cost of pauses of all ranks together, or of different ranks; None if there are too few."""
        outliers = np.where(self._outliers(self.excess), self.excess, 0.0)
        middle = (outliers.shape[1] - 1) // 2
        everywhere = np.sort(outliers, axis=1)[:, middle]
        scattered = np.where(self.pauses, self.delayed, 0.0).max(axis=1) * (not self.concentrated.any())
        amount = np.maximum(everywhere, scattered)
        return self._cost(amount, None) if (amount > 0).sum() >= LATENESS.fewest_outliers else None

    def _ordered(self, parts: Sequence[Array]) -> Array:
        """Values per group, concatenated, in order of steps."""
        joined: Array = np.concatenate(parts)[self.order]
        return joined

    def _outliers(self, amount: Array) -> Mask:
        """[N, R] mask of amounts far beyond the rank's scatter, and beyond a minimum share of the step."""
        scatter = scatter_of(self.excess - np.median(self.excess, axis=0))
        outliers: Mask = amount > least_outlier(scatter, float(np.median(self.duration)))
        return outliers

    def _cost(self, amount: Array, positions: list[int] | None) -> Cost:
        """Cost of pauses that take ``amount`` [N] ns in each cycle, 0 in cycles without a pause."""
        lost = amount * lengthening_share(self.duration, amount)
        gain_ns = float(lost.mean())
        hit = amount > 0
        # Medians over the cycles, not means: another rank's pause adds waiting for the device to the work of a rank.
        own, usual = self.own.mean(), np.median(self.own, axis=0)
        others = np.empty(0)
        if positions is not None:
            own = (usual + np.where(self.concentrated, self.delayed, 0.0).mean(axis=0))[positions].mean()
            others = np.delete(usual, positions)
        return Cost(
            **saving(gain_ns / 1e6, self.graph.mean_cycle_ns / 1e6),
            **range_fields(gain_ns, price_range(lost, self.duration - lost)),
            ranks=None if positions is None else [self.graph.ranks[p] for p in positions],
            own_ms=float(own) / 1e6,
            typical_ms=float(np.median(others)) / 1e6 if len(others) else None,
            occurrence_ms=float(np.median(amount[hit])) / 1e6,
            **persistence(self.steps, hit).as_facts(),
            where=self.lines.work(self.components, positions, self.steps[hit]),
        )


def lengthening_share(duration: Array, amount: Array) -> float:
    """Share (0 to 1) of the pauses ``amount`` ([N] ns, 0 in steps without) by which the steps ``duration`` ([N] ns) became longer."""
    usual = float(np.median(duration[amount <= 0])) if (amount <= 0).any() else float(np.median(duration))
    stops = np.flatnonzero(amount > 0)
    shares = []
    for stop, following in zip(stops, [*stops[1:], len(duration)], strict=True):
        behind = int(np.ceil(_TUNING.catches_up * float(amount[stop]) / max(usual, 1.0)))
        until = min(stop + 1 + _TUNING.followers + behind, following, len(duration))
        shares.append(float((duration[stop:until] - usual).sum()) / float(amount[stop]))
    return float(np.clip(np.median(shares), 0.0, 1.0)) if shares else 0.0


def _later_than_usual(graph: Graph) -> list[Array]:
    """[N, K, R] ns per group by which a rank arrives later than its median lateness at the same synchronisation, or at any if only a few
    cycles have that synchronisation."""
    late = [np.nan_to_num(group.arrival - typical_arrival(group.arrival)) for group in graph.groups]
    anywhere = np.median(np.concatenate([each.reshape(-1, each.shape[2]) for each in late]), axis=0)
    places: dict[tuple[Sync, int], list[Array]] = defaultdict(list)
    # Each synchronisation with the number of equal ones before it in the cycle.
    keys = [
        [(sync, group.syncs[:k].count(sync)) for k, sync in enumerate(group.syncs)] for group in graph.groups
    ]
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


_COMPONENTS = SHARED_COMPONENTS[SharedCause.DATA_EPOCH_START]


def epoch_starts(context: Context) -> Costs:
    """``shared.data_epoch_start`` of the measured steps and of steps with an evaluation; {} if there is none.

    The latter are spread over all steps; ``share`` then refers to the mean step with them.
    """
    cause = f"shared.{SharedCause.DATA_EPOCH_START}"
    measured = common_work(context, _COMPONENTS)
    stalls_ns = _evaluation_stalls(context) if context.mean_step_ms else {}
    if not stalls_ns:
        return {} if measured is None else {cause: measured}
    numbers, lost_ns = np.array(list(stalls_ns)), np.array(list(stalls_ns.values()))
    stalled = lost_ns > 0
    extra_ms = float(lost_ns.mean()) / 1e6
    whole_ms = extra_ms + (measured.ms_per_step if measured else 0.0)
    when = persistence(numbers, stalled).as_facts()
    if measured is not None:
        when["steps_hit"] += measured.steps_hit
    cost = Cost(
        **saving(whole_ms, (context.mean_step_ms or 0.0) + extra_ms),
        own_ms=whole_ms,
        occurrence_ms=float(np.median(lost_ns[stalled])) / 1e6,
        **when,
        where=(measured.where if measured else []) or context.lines.work(_COMPONENTS, None, numbers[stalled]),
    )
    return {cause: cost}


def _evaluation_stalls(context: Context) -> dict[int, float]:
    """Step number → longest worker start of all ranks, ns, in steps in which a rank evaluates; 0 in other steps. For all steps recorded in
    full, without the warm-up and steps that the profiler disturbed. {} if there is no such stall."""
    logs = context.logs
    evaluating = evaluated(logs)
    if not evaluating:
        return {}
    restarting = [log.main_loaders & log.loaders_with_workers for log in logs]
    stalls_ns = {
        number: max(map(_stall_ns, steps, restarting)) if number in evaluating else 0.0
        for number, steps in context.undisturbed
        if all(step.in_full for step in steps)
    }
    return stalls_ns if any(stalls_ns.values()) else {}


def _stall_ns(step: Step, loaders: Collection[int]) -> float:
    """Time for starting the workers of these loaders, and for their first batch, in this step."""
    waits, fresh = 0.0, False
    for event in step.events:
        if event.loader not in loaders:
            continue
        if event.kind == EventKind.ITERATION:
            waits, fresh = waits + event.duration_ns, True
        elif event.kind == EventKind.DATA and fresh:
            waits, fresh = waits + event.duration_ns, False
    return waits


def evaluations_on_some_ranks(context: Context) -> Costs:
    """``late.evaluation``: the cost of evaluation on the same ranks, at most half of all; {} if there is none.

    If the E ranks that evaluate divided the work among all W ranks, this would save (W - E) / W of the time by which steps with an
    evaluation exceed the median of the others, averaged over all steps. ``share`` refers to the mean step (of those
    without evaluation) with that time.
    """
    logs = context.logs
    if len(logs) < 2 or not context.mean_step_ms or not evaluated(logs):
        return {}
    # Of the other steps only the times were recorded, so whether they have an evaluation is unknown.
    recorded = [(number, steps) for number, steps in context.undisturbed if all(s.in_full for s in steps)]
    evaluating = [tuple(p for p, log in enumerate(logs) if number in log.evaluated) for number, _ in recorded]
    each_ns = np.array([[step.length_ns for step in steps] for _, steps in recorded], float).reshape(
        -1, len(logs)
    )
    lengths_ns = np.median(each_ns, axis=1)
    for n, ranks in enumerate(evaluating):
        if ranks:
            lengths_ns[n] = np.median(each_ns[n, list(ranks)])
    alone = Counter(ranks for ranks in evaluating if ranks and 2 * len(ranks) <= len(logs))
    usual = np.array([not ranks for ranks in evaluating], bool)
    if not alone or not usual.any():
        return {}
    positions = alone.most_common(1)[0][0]
    hit = np.array([ranks == positions for ranks in evaluating])
    longer_ns = np.where(hit, np.clip(lengths_ns - np.median(lengths_ns[usual]), 0, None), 0.0)
    if not longer_ns.any():
        return {}
    extra_ms = float(longer_ns.mean()) / 1e6
    step_ms = context.mean_step_ms + extra_ms
    cost = Cost(
        **saving(extra_ms * (len(logs) - len(positions)) / len(logs), step_ms),
        ranks=[logs[position].rank for position in positions],
        own_ms=extra_ms,
        occurrence_ms=float(np.median(longer_ns[hit])) / 1e6,
        **persistence(np.array([number for number, _ in recorded]), hit).as_facts(),
        where=_lines_of_evaluations(
            (logs[p], recorded[n][1][p]) for p in positions for n in np.flatnonzero(hit)
        ),
    )
    return {f"late.{LateCause.EVALUATION}": cost}


def _lines_of_evaluations(steps: Iterable[tuple[RankLog, Step]]) -> list[Where]:
    """Lines that fetch the batches of the evaluations in these steps, or call the module, most frequent first."""
    lines: Counter[CodeLine] = Counter()
    for log, step in steps:
        for event in step.events:
            where = log.where.get(event.where)
            of_data = event.kind == EventKind.DATA and event.loader not in log.main_loaders
            if where is not None and (of_data or event.kind == EventKind.EVALUATION):
                lines[where.stack[0]] += 1
    return ranked(lines)
