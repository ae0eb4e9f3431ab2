"""Finds the ranks that make the others wait. Compares the ranks, separates CPU contention, reaches a verdict on each kind of work, limits
each rank's excess to that in all components together, and distributes it over the segments.

A verdict (:func:`_verdicts`) on a kind of work is one of: it has stragglers; the late rank changes from cycle to cycle; random ranks are
late; no rank is late. Random lateness of recorded work (a slow batch on one rank or another) has a cost, which all ranks share.
:func:`unseen_lateness` finds a rank for which the others wait in windows that are too short to show why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.graph import CycleGroup, Graph
from ddpdoctor.measure.numerics import Array, Mask, chance_of_places, shares_of_step
from ddpdoctor.measure.taxonomy import (
    COMPONENTS,
    COMPUTATION,
    INDEX,
    LATE_COMPONENTS,
    RECORDED,
    Component,
    LateCause,
    SyncKind,
)

from .comparison import (
    COLUMNS,
    Comparison,
    compare,
    mask_of_components,
    net_over_kinds,
    net_within_kinds,
    spread_over_segments,
)
from .lateness import (
    LATENESS,
    global_starvation,
    is_single_rank,
    late_cycles,
    main_stragglers,
    window_outliers,
)
from .levels import is_caused_by_job, is_rotation, levels, turns
from .starved import starved_of_cpu


class Attribution(msgspec.Struct, frozen=True):
    """Excess work per group of the graph, each [N, K, R, C] ns, zero where no rank is late."""

    excess: list[Array]
    """What makes the stragglers late; its sum in a cycle is at most the rank's excess in all components together."""
    gross_excess: list[Array]
    """Excess of the stragglers in each component, not reduced by time that they gain in other components."""
    stragglers: dict[LateCause, list[int]]
    """Positions of the stragglers by kind of work, those with most excess first."""
    random_causes: tuple[LateCause, ...] = ()
    """Kinds of recorded work that are late on random ranks."""
    turns_excess: list[Array] = msgspec.field(default_factory=list)
    """Like ``excess``, for the cause TURNS: kinds of work whose late rank changes and that have no straggler. Empty if there are none."""
    turns_causes: tuple[LateCause, ...] = ()
    """Kinds of work of ``turns_excess``."""
    rotates: bool = False
    """Whether the step number determines which rank is late."""
    stands_out_in: dict[LateCause, list[int]] = msgspec.field(default_factory=dict)
    """By kind of work, the steps that are outliers in a short window, if there is no other evidence (:func:`.window_outliers`)."""
    short: bool = False
    """Whether a window on devices is the only recording of the job."""
    starved: list[Array] = msgspec.field(default_factory=list)
    """Like ``excess``, but not included in it: the time that ranks waited for CPU cores longer than expected (:mod:`.starved`). Empty if
    there is none."""
    inputs_explain: float | None = None
    """Part of the variance of the ranks' computation that the sizes of their inputs explain (:mod:`.levels`)."""


def component(amounts: Iterable[Array], components: Sequence[Component]) -> list[Array]:
    """[N, K, R] ns per group: the sum of these components. ``amounts`` [N, K, R, C]: excess or work, per group."""
    columns = [INDEX[name] for name in components]
    return [amount[..., columns].sum(axis=-1) for amount in amounts]


class UnseenTuning(msgspec.Struct, frozen=True):
    """Thresholds for a straggler whose recorded work does not explain its lateness."""

    step_share: float = 0.05
    """Minimum time that the others wait for this rank, as a share of the step: the share from which rules warn."""
    mostly: float = 0.5
    """The rank must cause at least this part of all waiting, and its recorded excess must explain less than this part of the waiting that
    it causes."""


UNSEEN = UnseenTuning()


def unseen_lateness(graph: Graph, attribution: Attribution) -> list[Array] | None:
    """[N, K, R] ns per group: waiting caused by the rank that causes most waiting, without the part that this rank's recorded excess
    explains.

    For windows that begin during a cycle. None if all cycles were recorded from their beginning, if no rank causes half of all waiting, or
    if the rank's recorded excess explains half of the waiting that it causes.
    """
    # A cycle may begin before a rank's own window does.
    unseen_work = [group.work[..., INDEX[Component.UNSEEN]] for group in graph.groups]
    if len(graph.ranks) < 2 or not any(work.any() for work in unseen_work):
        return None
    waits = [_caused_waiting_ns(group) for group in graph.groups]
    caused_ns = sum((wait.sum(axis=(0, 1)) for wait in waits), np.zeros(len(graph.ranks)))
    leader = int(caused_ns.argmax())
    step_ns = float(np.median(graph.lengths_ns))
    least_ns = max(UNSEEN.step_share * step_ns * graph.cycles, UNSEEN.mostly * float(caused_ns.sum()))
    explained_ns = sum(float(excess[:, :, leader].sum()) for excess in attribution.excess)
    if caused_ns[leader] < least_ns or explained_ns >= UNSEEN.mostly * float(caused_ns[leader]):
        return None
    unexplained = []
    for wait, excess in zip(waits, attribution.excess, strict=True):
        # The waiting that the rank's recorded excess explains is priced with that excess.
        explained = excess[:, :, leader].sum(axis=(1, 2))[:, None]
        whole = np.maximum(wait[:, :, leader].sum(axis=1, keepdims=True), 1.0)
        unexplained.append(np.zeros_like(wait))
        unexplained[-1][:, :, leader] = wait[:, :, leader] * np.clip(1.0 - explained / whole, 0.0, 1.0)
    return unexplained


def _caused_waiting_ns(group: CycleGroup) -> Array:
    """[N, K, R] ns from the second-to-last to the last arrival, minus what the second-to-last rank computed in that time; counted for the
    last rank, 0 for the others."""
    caused = np.zeros(group.arrival.shape)
    cycles = np.arange(len(group.steps))
    for k, sync in enumerate(group.syncs):
        if len(sync.members) < 2 or sync.kind == SyncKind.STEP_END or sync.root is not None:
            continue
        members = np.array(sync.members)
        arrival = group.arrival[:, k, members]
        order = np.argsort(arrival, axis=1, kind="stable")
        last, second = members[order[:, -1]], members[order[:, -2]]
        waited = group.arrival[cycles, k, last] - group.arrival[cycles, k, second]
        waited -= group.concurrent_compute_in_wait[cycles, k, second]
        caused[cycles, k, last] = np.clip(waited, 0.0, None)
    return caused


def attribute(graph: Graph, *, short: bool = False) -> Attribution:
    """Find the ranks that do more work than the others: which kind, how much, in which cycles.

    ``short``: the graph is a window on devices, which is the only recording of the job.
    """
    if len(graph.ranks) < 2 or not graph.groups or not graph.ranks_meet:
        # If ranks do not synchronise, they cannot make each other wait. (A ``STEP_END`` is only a mark, without waiting.)
        nothing = [np.zeros_like(group.work) for group in graph.groups]
        return Attribution(excess=nothing, gross_excess=nothing, stragglers={}, short=short)
    compared = compare(graph)
    starved = starved_of_cpu(graph, compared)
    comparison = compared if starved is None else replace(compared, excess=starved.rest)
    verdicts = _verdicts(graph, comparison, short=short)
    straggling = [verdict for verdict in verdicts if verdict.stragglers]
    turns_by_cause = {verdict.cause: verdict.turns for verdict in verdicts if verdict.turns is not None}
    shape, segment_excess = comparison.excess.shape, comparison.segment_excess
    late = mask_of_components(shape, [(verdict.cause, verdict.late) for verdict in straggling])
    turns_mask = mask_of_components(shape, turns_by_cause.items())
    net = net_within_kinds(comparison.excess, [*(verdict.cause for verdict in straggling), *turns_by_cause])
    excess = net_over_kinds(net, comparison.excess, late | turns_mask)
    stragglers = {verdict.cause: list(verdict.stragglers) for verdict in straggling}
    stands_out_in = {
        verdict.cause: list(verdict.stands_out_in) for verdict in verdicts if verdict.stands_out_in
    }
    turns_excess = spread_over_segments(segment_excess, excess, turns_mask) if turns_by_cause else []
    turns_causes = tuple(turns_by_cause)
    uneven = None if LateCause.COMPUTE in stragglers else levels(graph)
    if uneven is not None and _longest_ns(uneven.removed, COMPONENTS) > _longest_ns(
        turns_excess, COMPUTATION
    ):
        # Random load imbalance explains more than the outliers of computation on changing ranks, so it replaces them.
        computes = np.isin(COMPONENTS, COMPUTATION)
        turns_excess = [
            np.where(computes, removed, other)
            for removed, other in zip(uneven.removed, turns_excess or uneven.removed, strict=True)
        ]
        turns_causes = (*(c for c in turns_causes if c != LateCause.COMPUTE), LateCause.COMPUTE)
    elif turns_by_cause and not any(verdict.turns_proven for verdict in verdicts):
        stands_out_in[LateCause.TURNS] = sorted(comparison.steps[turns_mask.any(axis=(1, 2))].tolist())
    return Attribution(
        excess=spread_over_segments(segment_excess, excess, late),
        gross_excess=spread_over_segments(segment_excess, net, late),
        stragglers=stragglers,
        random_causes=tuple(verdict.cause for verdict in verdicts if verdict.is_random),
        turns_excess=turns_excess,
        turns_causes=turns_causes,
        rotates=any(is_rotation(where, comparison.steps) for where in turns_by_cause.values()),
        stands_out_in=stands_out_in,
        short=short,
        inputs_explain=None if uneven is None else uneven.explained,
        starved=[]
        if starved is None
        else spread_over_segments(segment_excess, starved.waited, starved.waited > 0),
    )


def _longest_ns(amounts: Sequence[Array], components: Sequence[Component]) -> float:
    """ns of these components on the rank with most of them in each segment, summed over cycles and synchronisations."""
    return sum(float(amount.max(axis=2).sum()) for amount in component(amounts, components))


class _Verdict(msgspec.Struct, frozen=True):
    """Verdict on one kind of work: stragglers, or a late rank that changes, or neither."""

    cause: LateCause
    late: Mask
    """[cycles, R] whether the rank is late."""
    is_random: bool
    """Whether random ranks are late."""
    stands_out_in: tuple[int, ...] = ()
    """The steps that are outliers in a short window, if there is no other evidence."""
    stragglers: tuple[int, ...] = ()
    """Positions, those with most excess first."""
    turns: Mask | None = None
    """[cycles, R] whether the rank is late, if the late rank changes from cycle to cycle."""
    turns_proven: bool = False
    """Whether ``turns`` has more evidence than outliers in a short window."""


def _verdicts(graph: Graph, comparison: Comparison, *, short: bool) -> list[_Verdict]:
    """The verdict on each kind of work."""
    shares = shares_of_step(COLUMNS, comparison.work)
    least_ns = LATENESS.outlier_share * comparison.step_ns
    place_chance = chance_of_places(COLUMNS, shares, comparison.excess, least_ns)
    few_rank_outliers, turns_outliers = window_outliers(comparison) if short else ({}, {})
    verdicts = []
    for cause in LATE_COMPONENTS:
        chance = 1.0 if cause in RECORDED else place_chance[cause]
        verdict = _lateness_verdict(cause, comparison, chance, shares[cause], few_rank_outliers.get(cause))
        if cause == LateCause.DATA and short:
            verdict = _excluding_global_starvation(verdict, graph, comparison)
        excess_ns = np.where(verdict.late, np.clip(comparison.excess_of(cause), 0, None), 0.0).sum(axis=0)
        if excess_ns.any():
            is_random = cause in RECORDED and verdict.is_random
            verdicts.append(replace(verdict, stragglers=main_stragglers(excess_ns), is_random=is_random))
        else:
            verdicts.append(_turns_verdict(verdict, graph, comparison, chance, turns_outliers.get(cause)))
    return verdicts


def _turns_verdict(
    verdict: _Verdict, graph: Graph, comparison: Comparison, place_chance: float, outliers: Mask | None
) -> _Verdict:
    """Extend a verdict without stragglers. ``outliers`` [cycles, R]: outliers of changing ranks in a short window."""
    excess = comparison.excess_of(verdict.cause)
    where = turns(comparison.work_of(verdict.cause), excess, comparison.step_ns)
    if verdict.cause in RECORDED:
        # Ranks that take about as long on average, but not in the same cycles, are late at random.
        means, longest = comparison.work_of(verdict.cause).mean(axis=0), excess.max(axis=1).mean()
        alike = means.min() >= LATENESS.starving_part * means.max()
        alike = bool(alike and longest >= LATENESS.window_share * comparison.step_ns)
        return replace(verdict, is_random=verdict.is_random or alike or bool(where.any()))
    # If one rank has nearly all of the excess, the late rank does not rotate, even though that rank is not significantly late.
    of_several = not is_single_rank(np.where(where, excess, 0.0).sum(axis=0))
    turns_proven = of_several and is_caused_by_job(where, comparison.steps, graph.steps, place_chance)
    return replace(
        verdict, is_random=False, turns=where if turns_proven else outliers, turns_proven=turns_proven
    )


def _lateness_verdict(
    cause: LateCause,
    comparison: Comparison,
    place_chance: float,
    step_share: float,
    outliers: Mask | None,
) -> _Verdict:
    """Find the cycles in which ranks are late. ``outliers`` [cycles, R]: outliers of a few ranks in a short window."""
    excess = comparison.excess_of(cause)
    late, is_random = late_cycles(
        excess,
        comparison.work_of(cause),
        comparison.steps,
        comparison.step_ns,
        place_chance,
        step_share,
        drifts=not comparison.on_device and cause not in RECORDED,
    )
    if cause == LateCause.CHECKPOINT and not late.any():
        # If at most half of the ranks ever save checkpoints, it is not chance which ranks save, even if they do so rarely.
        saving_ranks = (comparison.work_of(cause) > 0).sum(axis=0) > 0
        if 2 * saving_ranks.sum() <= len(saving_ranks):
            late = saving_ranks & (excess > LATENESS.persistent_share * comparison.step_ns)
            is_random = is_random and not late.any()
    if outliers is None or (late & ~outliers).any():
        return _Verdict(cause, late, is_random)
    steps = sorted(comparison.steps[outliers.any(axis=1)].tolist())
    return _Verdict(cause, outliers, is_random=False, stands_out_in=tuple(steps))


def _excluding_global_starvation(verdict: _Verdict, graph: Graph, comparison: Comparison) -> _Verdict:
    """If there are steps in which all ranks wait for data for about the same time, exclude these steps, and steps in which the late rank
    does not really wait for data."""
    waits = component([group.work for group in graph.groups], LATE_COMPONENTS[LateCause.DATA])
    waits_ns = np.concatenate([of_group.sum(axis=1) for of_group in waits])
    starving = global_starvation(waits_ns, comparison.step_ns)
    if not starving.any():
        return verdict
    late = verdict.late & ~starving[:, None] & (waits_ns > LATENESS.persistent_share * comparison.step_ns)
    return replace(verdict, late=late, is_random=verdict.is_random or not late.any())
