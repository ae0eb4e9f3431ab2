"""Costs of stragglers: the time that other ranks wait for them. The joint cost is divided among the causes.

The cost of a cause is the time that a replay without it saves. Removing lateness that is hidden by the others' computation, or compensated
by a shorter transfer, saves nearly nothing; and lateness that may be random gets no cause. But the table of ranks shows both. So
:func:`arrival_facts` also reports the ranks that arrive late on average for any reason, and what would be saved if they were on time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import msgspec
import numpy as np

from ddpdoctor.measure.attribution import (
    LATENESS,
    UNSEEN,
    Attribution,
    component,
    main_stragglers,
    others_median,
    unseen_lateness,
)
from ddpdoctor.measure.facts import ArrivalFacts, Cost, scaled
from ddpdoctor.measure.graph import CycleGroup, Graph
from ddpdoctor.measure.metrics import lateness, latest_ns
from ddpdoctor.measure.numerics import Array, Ints, Value, above_others, above_zero, fair_shares
from ddpdoctor.measure.phases import phase_name
from ddpdoctor.measure.places import Where, own_process
from ddpdoctor.measure.replay import replay_all, without_work
from ddpdoctor.measure.sourcelines import joined
from ddpdoctor.measure.taxonomy import INDEX, LATE_COMPONENTS, PHASES, Components, LateCause

from .price import PRICE_TUNING, Context, Costs, add_cost
from .shared import different_work
from .why import awake_longer_ms, cause_of_computing_longer, confirmed_by_events, slower_phase


class _Tuning(msgspec.Struct, frozen=True):
    step_share: float = 0.1
    """Minimum mean lateness that is reported, as a share of the mean step: a job counts as straggling from 1.1 times the ideal step
    time on (Lin et al., OSDI '25)."""
    beyond_others: float = 2.0
    """Minimum multiple of the other ranks' median lateness: on a busy machine different ranks arrive last."""
    priced: float = 0.5
    """Known causes explain a rank's lateness if their costs add up to at least this part of it."""
    clock_errors: float = 3.0
    """Minimum lateness as a multiple of the clocks' error."""
    most: float = 0.95
    """Lateness of more than this part of the step is not plausible: the windows probably begin at different steps."""
    least_share: float = 0.001
    """Minimum cost of a cause of lateness that is reported, as a share of the step: the replay's own error is as large."""
    same_segments: float = 0.5
    """One cause may hide another if more than this part of their time is in the same segments of the cycle."""
    shows: float = 0.5
    """A step has a loss if it is longer than usual by at least this part of the loss (not by all of it, because hosts that run ahead of
    their devices catch up). A kind of work explains a lateness if it takes longer by at least this part of the lateness."""


_TUNING = _Tuning()


def arrival_facts(graph: Graph, costs: Costs) -> ArrivalFacts:
    """Ranks that arrive late on average, and by how much. ``graph``: the one that the table of ranks shows; ``costs``: the costs of all
    causes."""
    if not graph.groups or len(graph.ranks) < 2:
        return ArrivalFacts()
    late_ns = lateness(graph)[0]
    late = _late_ranks(late_ns, graph.mean_cycle_ns)
    causes = [cost for path, cost in costs.items() if path.startswith("late.")]
    priced_ms = {p: sum(c.ms_per_step for c in causes if graph.ranks[p] in (c.ranks or ())) for p in late}
    unpriced = [p for p in late if priced_ms[p] < _TUNING.priced * float(late_ns[p]) / 1e6]
    saved_ms = None
    if unpriced:
        # What would be saved if these ranks arrived with the median rank, limited to lateness due to longer work.
        on_time = without_work([_removable_lateness(group, np.array(unpriced)) for group in graph.groups])
        saved_ms = max(0.0, float((replay_all(graph) - replay_all(graph, [on_time])).mean())) / 1e6
    per_cycle = np.concatenate([latest_ns(group) for group in graph.groups])
    late_steps = (per_cycle > PRICE_TUNING.hit_share * graph.mean_cycle_ns).sum(axis=0)
    return ArrivalFacts(
        late_ranks=[graph.ranks[place] for place in late],
        late_ms={str(graph.ranks[place]): float(late_ns[place]) / 1e6 for place in late},
        late_steps={str(graph.ranks[place]): int(late_steps[place]) for place in late},
        steps_seen=graph.cycles,
        on_time_saves_ms=saved_ms,
    )


def _late_ranks(late_ns: Array, step_ns: float) -> list[int]:
    """Positions of the late ranks, the latest first. ``late_ns`` [R] is their mean lateness."""
    order = np.argsort(-late_ns, kind="stable").tolist()
    ascending = np.sort(late_ns)
    found = []
    for place in order:
        # Median without the rank itself: without it, the values after it in ascending order move up by one place.
        middle = (len(late_ns) - 2) // 2
        others = ascending[middle + int(ascending[middle] >= late_ns[place])]
        if late_ns[place] >= max(_TUNING.step_share * step_ns, _TUNING.beyond_others * float(others)):
            found.append(place)
    return found


def _removable_lateness(group: CycleGroup, places: Ints) -> Array:
    """[N, K, R] ns: lateness that these ranks gain before each synchronisation.

    If ranks can compute while they wait, the lateness in a cycle is limited to the rank's busy time beyond the others' median, because the
    others' own computation and idle time would remain if the rank were on time.
    """
    late = np.zeros(group.arrival.shape)
    late[:, :, places] = group.lateness.gained[:, :, places]
    if group.hidden is None or len(places) == group.arrival.shape[2]:
        return late
    busy = group.with_overlap(group.work).sum(axis=(1, 3))
    longer = busy - np.median(np.delete(busy, places, axis=1), axis=1, keepdims=True)
    whole = late.sum(axis=1)
    capped: Array = late * (np.clip(longer, 0.0, whole) / np.maximum(whole, 1.0))[:, None]
    return capped


class _Removal(msgspec.Struct, frozen=True):
    """Work of the ranks that is removed in the replay without one cause."""

    work: list[Array]
    """[N, K, R] ns per group."""
    components: Components
    at_different_lines: bool = False
    """Whether each rank does this kind of work at other source lines than the others, that is, does different work."""


def late_work(context: Context) -> Costs:
    """``late.*`` of each cause of lateness, and ``late.total``; {} if no rank is late."""
    removals = _removals(context)
    parts = fair_shares(
        {cause: removal.work for cause, removal in removals.items()},
        lambda work: float((context.measured_ns - replay_all(context.graph, [without_work(work)])).mean()),
    )
    in_cycles = {
        cause: _cost(context, cause, removal, parts[cause])
        for cause, removal in removals.items()
        if parts[cause].part_ns / context.mean_ns >= _TUNING.least_share
    }
    if not in_cycles:
        return {}
    costs = {
        cause: _averaged_over_steps(cost, context) if cost.stands_out_in else cost
        for cause, cost in in_cycles.items()
    }
    everything = [sum(works) for works in zip(*(removal.work for removal in removals.values()), strict=True)]
    part = sum(cost.ms_per_step for cost in costs.values()) / sum(c.ms_per_step for c in in_cycles.values())
    total = scaled(context.cost([without_work(everything)], everything), part, context.mean_ns / 1e6)
    more_ms = 0.0
    for cause, cost in costs.items():
        often = costs[cause] = _at_its_frequency(context, cause, removals[cause], cost)
        if often.ms_per_step != cost.ms_per_step:
            more_ms += often.ms_per_step - cost.ms_per_step
            mean_ms = context.mean_ns / 1e6 + more_ms
            total = add_cost(total, often, total.ms_per_step + often.ms_per_step - cost.ms_per_step, mean_ms)
    computing = costs.pop(LateCause.COMPUTE, None)
    if computing is not None:
        when = _when_late(context, LateCause.COMPUTE, removals[LateCause.COMPUTE])
        cause = cause_of_computing_longer(
            computing, context.graph, context.steps_hit(when), context.throttled_ranks
        )
        costs[LateCause.COMPUTE if cause in costs else cause] = computing
    if (starved := costs.get(LateCause.CPU_STARVED)) is not None:
        # Any line may wait for a core.
        costs[LateCause.CPU_STARVED] = msgspec.structs.replace(starved, where=[])
    costs[LateCause.TOTAL] = total
    return {f"late.{cause}": cost for cause, cost in costs.items()}


def _at_its_frequency(context: Context, cause: LateCause, removal: _Removal, cost: Cost) -> Cost:
    """The cost, scaled to the frequency of its cause in the whole run, including the steps that are not measured."""
    if cause == LateCause.CHECKPOINT:
        return context.per_recorded_save(cost)
    return context.at_its_period(cost, context.steps_hit(_when_late(context, cause, removal)))


def _removals(context: Context) -> dict[LateCause, _Removal]:
    """Cause → the work that is removed in the replay without it. Causes without work are omitted."""
    attribution = context.attribution
    excess = attribution.gross_excess if _hide_each_other(attribution) else attribution.excess
    removals = {
        cause: _Removal(component(excess, components), components)
        for cause, components in LATE_COMPONENTS.items()
    }
    removals = {
        cause: removal for cause, removal in removals.items() if any(work.any() for work in removal.work)
    }
    if attribution.starved:
        waited = [of_group.sum(axis=-1) for of_group in attribution.starved]
        removals[LateCause.CPU_STARVED] = _Removal(waited, PHASES)
    different = different_work(context)
    unattributed = {LateCause.UNKNOWN: unseen_lateness(context.graph, attribution), LateCause.HOST: different}
    if attribution.short and all(more is None for more in unattributed.values()):
        unattributed.update(_unexplained(context, [removal.work for removal in removals.values()]))
    for cause, more in unattributed.items():
        if more is not None:
            seen = removals.get(cause)
            whole = [a + b for a, b in zip(seen.work, more, strict=True)] if seen else more
            at_different_lines = cause == LateCause.HOST and more is different
            removals[cause] = _Removal(whole, LATE_COMPONENTS[cause], at_different_lines=at_different_lines)
    if attribution.turns_excess:
        summed = [amount.sum(axis=-1) for amount in attribution.turns_excess]
        components = tuple(c for kind in attribution.turns_causes for c in LATE_COMPONENTS[kind])
        removals[LateCause.TURNS] = _Removal(summed, components)
    return removals


def _unexplained(context: Context, known: Sequence[Sequence[Array]]) -> dict[LateCause, list[Array]]:
    """Kind of work → [N, K, R] ns per group: significant lateness in a short window that ``known`` causes do not explain. The kind is the
    one that takes longer on the late rank (unknown if there is none). {} if all lateness is explained."""
    graph = context.graph
    places = regularly_late(graph)
    late = [_removable_lateness(group, np.array(places, np.int64)) for group in graph.groups]
    late_ns, explained_ns = (
        sum((of_group.sum(axis=(0, 1)) for of_group in amounts), np.zeros(len(graph.ranks)))
        for amounts in (late, [of_group for work in known for of_group in work])
    )
    error_ns = _TUNING.clock_errors * (graph.clock_error_ns or 0.0)
    enough = late_ns >= graph.cycles * max(UNSEEN.step_share * graph.mean_cycle_ns, error_ns)
    enough &= late_ns < _TUNING.most * graph.mean_cycle_ns * graph.cycles
    found: dict[LateCause, list[Array]] = {}
    for place in np.flatnonzero(enough & (explained_ns < _TUNING.priced * late_ns)).tolist():
        left = np.zeros(len(graph.ranks))
        left[place] = 1.0 - explained_ns[place] / late_ns[place]
        kind = _kind_with_excess(context.drawn, place, float(late_ns[place]) / graph.cycles)
        before = found.get(kind, [np.zeros_like(of_group) for of_group in late])
        found[kind] = [of_group * left + more for of_group, more in zip(late, before, strict=True)]
    return found


def regularly_late(graph: Graph) -> list[int]:
    """Positions of the late ranks whose mean lateness over the cycles is significant."""
    late = (
        _late_ranks(lateness(graph)[0], graph.mean_cycle_ns) if len(graph.ranks) > 1 and graph.groups else []
    )
    if not late:
        return []
    amounts = np.concatenate([np.nan_to_num(group.lateness.signed).sum(axis=1) for group in graph.groups])
    beyond = amounts - others_median(amounts)
    regular = above_zero(beyond, LATENESS.false_alarms) & above_others(beyond, LATENESS.false_alarms, amounts)
    return [place for place in late if regular[place]]


def _kind_with_excess(recorded: Array, place: int, late_ns: float) -> LateCause:
    """The kind of ``recorded`` work [cycles, R, C] ns that takes longer on the rank than on the others in each cycle, and on average by at
    least half of the rank's lateness, ``late_ns`` per cycle; unknown if there is none."""
    longer: dict[LateCause, float] = {}
    for kind, components in LATE_COMPONENTS.items():
        work = recorded[:, :, [INDEX[name] for name in components]].sum(axis=2)
        more = (work - others_median(work))[:, place]
        if kind != LateCause.UNKNOWN and more.min() > 0 and more.mean() >= _TUNING.shows * late_ns:
            longer[kind] = float(more.mean())
    return max(longer, key=lambda kind: longer[kind], default=LateCause.UNKNOWN)


def _cost(context: Context, cause: LateCause, removal: _Removal, part: Value) -> Cost:
    attribution, is_turns = context.attribution, cause == LateCause.TURNS
    fields: dict[str, Any] = {}
    if is_turns:
        fields["period_steps"] = len(context.graph.ranks) if attribution.rotates else None
        fields["kinds"] = list(attribution.turns_causes)
    positions = None if is_turns else sorted(main_stragglers(_by_rank(removal.work)))
    phase = slower_phase(context.graph, positions) if cause == LateCause.COMPUTE and positions else None
    if phase is not None:
        fields["phase"], fields["lines_of"] = phase_name(phase), (phase,)
    if cause in attribution.stands_out_in or cause != LateCause.DATA:
        fields["stands_out_in"] = attribution.stands_out_in.get(cause, [])
    if positions and not removal.at_different_lines:
        fields |= confirmed_by_events(context.drawn, cause, removal.work, positions)
        if cause in (LateCause.HOST, LateCause.COMPUTE, LateCause.CPU_STARVED):
            fields["awake_ms"] = awake_longer_ms(context.graph, removal.work, positions)
    if removal.at_different_lines and positions:
        # One line for each of these ranks: the one with most work. The rank with most work comes first.
        of_ranks = [
            (position, where)
            for position in main_stragglers(_by_rank(removal.work))
            for where in context.lines.work(removal.components, [position], context.steps)[:1]
        ]
        lines: list[Where] = []
        ranks_at = Counter(where.stack[0] for _, where in of_ranks)
        for position, where in of_ranks:
            is_own = ranks_at[where.stack[0]] == 1 and len(of_ranks) > 1
            rank = own_process(context.graph.ranks[position]) if is_own else None
            lines = joined(lines, [msgspec.structs.replace(where, process=rank)])
        fields["where"] = lines
    return context.cost(
        [without_work(removal.work)],
        _when_late(context, cause, removal),
        removal.components,
        positions,
        part=part,
        **fields,
    )


def _averaged_over_steps(cost: Cost, context: Context) -> Cost:
    """The cost of a cause in single steps of a short window, averaged over all steps of the window. A step that has no cycle, because the
    step before it was not recorded, counts as not having the cause if no rank's step is longer than usual by half of one occurrence."""
    graph, measured_ms = context.graph, context.mean_ns / 1e6
    lost_ns = (cost.occurrence_ms or 0.0) * 1e6
    lengths = [dict(zip(of.steps.tolist(), (of.end - of.start).tolist(), strict=True)) for of in graph.steps]
    of_all = set.intersection(*(set(of_rank) for of_rank in lengths))
    longest = {step: max(of_rank[step] for of_rank in lengths) for step in of_all}
    known = set(context.steps.tolist())
    usual = [ns for step, ns in longest.items() if step in known.difference(cost.stands_out_in)]
    if not usual:
        return cost
    most_ns = float(np.median(usual)) + _TUNING.shows * lost_ns
    quiet = sum(ns <= most_ns for step, ns in longest.items() if step not in known)
    spread = scaled(cost, graph.cycles / (graph.cycles + quiet), measured_ms)
    return msgspec.structs.replace(spread, steps_seen=cost.steps_seen + quiet)


def _by_rank(work: Sequence[Array]) -> Array:
    """[R] ns: the sum of ``work``, [N, K, R] ns per group."""
    return sum((of_group.sum(axis=(0, 1)) for of_group in work), np.zeros(work[0].shape[2]))


def _when_late(context: Context, cause: LateCause, removal: _Removal) -> list[Array]:
    """[N, K, R or 1] ns per group: amounts that are above 0 exactly in the cycles in which a rank is late."""
    groups = context.graph.groups
    if cause == LateCause.TURNS:
        return [np.clip(work.max(axis=2, keepdims=True), 0, None) for work in removal.work]
    if cause == LateCause.DATA and all(group.on_device for group in groups):
        # The removed work is the wait that the rank would have alone. It makes the rank late only in cycles in which the rank really waits.
        waits = component([group.work for group in groups], removal.components)
        return [
            np.minimum(work, np.clip(wait, 0, None)) for work, wait in zip(removal.work, waits, strict=True)
        ]
    return removal.work


def _hide_each_other(attribution: Attribution) -> bool:
    """Whether two ranks are late with different causes between the same synchronisations. Then each does less of the other's kind of work
    than the other does, and this must not be subtracted from its own excess. (If there is a synchronisation in between, both delays cost
    time anyway.)"""
    where: dict[LateCause, tuple[int, Array]] = {}
    for cause, positions in attribution.stragglers.items():
        gross_excess = component(attribution.gross_excess, LATE_COMPONENTS[cause])
        per_segment = np.concatenate([of_group[:, :, positions[0]].sum(axis=0) for of_group in gross_excess])
        if per_segment.any():
            where[cause] = positions[0], per_segment / per_segment.sum()
    return any(
        one != other and float(np.minimum(here, there).sum()) > _TUNING.same_segments
        for (one, here), (other, there) in combinations(where.values(), 2)
    )
