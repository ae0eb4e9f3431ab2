"""Costs that all ranks have in common: work, synchronisations, transfers, waiting for a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.attribution import component, values_in_steps
from ddpdoctor.measure.facts import Cost
from ddpdoctor.measure.graph import CycleGroup, Graph, SegmentClasses
from ddpdoctor.measure.numerics import Array, Mask
from ddpdoctor.measure.replay import (
    Change,
    common_part,
    idle_after,
    without_sync,
    without_transfer,
    without_work,
)
from ddpdoctor.measure.taxonomy import (
    LATE_COMPONENTS,
    SHARED_COMPONENTS,
    SHARED_SYNCS,
    SHARED_TRANSFERS,
    Component,
    Components,
    LateCause,
    SharedCause,
    SyncKind,
)

from .price import Context, Costs, waits_for_hosts
from .why import awake_of_all_ms

_USER_CODE = (SharedCause.HOST, SharedCause.OUTSIDE)
"""Causes in the user's code, which may do different work on each rank."""
MOSTLY_THE_SAME = 0.8
"""Part of the ranks' stack samples at common lines from which they count as the same work: counting errors and noise hide one in five."""
DIFFERENT = 0.5
"""The same part, below which they count as different work."""
LEAST_DIFFERENT = 0.05
"""Minimum share of the step of such different work: the share from which rules warn."""
USUAL_TRANSFER = 0.4
"""Quantile of the transfers over the cycles that counts as the transfer without disturbances, as ``usual_gain`` in :mod:`.price`."""


def shared_work(context: Context) -> Costs:
    """``shared.*`` of each kind of work, except the first batches of an epoch (see ``epoch_starts``)."""
    costs = {
        cause: common_work(context, components, by_kind=cause in _USER_CODE)
        for cause, components in SHARED_COMPONENTS.items()
        if cause != SharedCause.DATA_EPOCH_START
    }
    saving = costs[SharedCause.CHECKPOINT]
    if saving is not None:
        costs[SharedCause.CHECKPOINT] = context.per_recorded_save(saving)
    for cause in _USER_CODE:
        if (own := costs[cause]) is not None:
            awake_ms = awake_of_all_ms(context.graph, own.own_ms)
            costs[cause] = msgspec.structs.replace(own, awake_ms=awake_ms)
    launch = costs[SharedCause.LAUNCH]
    if launch is not None:
        names = context.lines.operators(SHARED_COMPONENTS[SharedCause.LAUNCH])
        costs[SharedCause.LAUNCH] = msgspec.structs.replace(launch, operators=names)
    return _present(costs)


def shared_synchronisations(context: Context) -> Costs:
    """``shared.*`` of barriers, blocking collectives, host-device synchronisations, and broadcasts of buffers."""
    return _present({cause: _without_syncs(context, kind) for cause, kind in SHARED_SYNCS.items()})


def exposed_transfers(context: Context) -> dict[SharedCause, Cost | None]:
    """Cost of the exposed transfers, by cause. Longer transfers in some steps are disturbances (a busy CPU or link) and do not count."""
    costs: dict[SharedCause, Cost | None] = {}
    for cause, kind in SHARED_TRANSFERS.items():
        transfers = [usual_transfer(group, kind) for group in context.graph.groups]
        if any(transfer.any() for transfer in transfers):
            spent = [transfer[:, :, None] for transfer in transfers]
            names = _names(context.graph, [kind]) if kind == SyncKind.MODEL else None
            where = context.lines.syncs([kind])
            costs[cause] = context.cost([without_transfer(transfers)], spent, where=where, operation=names)
    return costs


def redundant_reductions(context: Context) -> Costs:
    """``shared.redundant_sync``: reductions after which the same gradients are reduced again before the optimizer steps."""
    groups = context.graph.groups
    # Step logs know the module of each reduction, a window only its process group.
    graphs = [context.graph] if context.log_graph is None else [context.graph, context.log_graph]
    if not all(any(group.reduced_again.any() for group in graph.groups) for graph in graphs):
        return {}
    transfers = [group.transfer[:, :, None] * group.reduced_again[:, None] for group in groups]
    changes = without_reductions(context.graph, context.reducer.synced_ns)
    where = context.lines.syncs([SyncKind.GRADIENTS])
    return _present({SharedCause.REDUNDANT_SYNC: context.cost(changes, transfers, where=where)})


def without_reductions(graph: Graph, synced_ns: Sequence[float] = ()) -> list[Change]:
    """Changes that remove the reductions that are repeated later in the step, and their time on each rank's training thread before its
    arrival: ``synced_ns`` by position, 0 if unknown, see :class:`~.price.ReducerCosts`."""
    without_repeated = without_sync(lambda group, k: bool(group.reduced_again[k]))
    if not any(synced_ns):
        return [without_repeated]
    own = np.array(synced_ns)
    removed = []
    for group in graph.groups:
        backward = np.clip(component([group.work], [Component.BACKWARD])[0], 0, None)
        removed.append(np.minimum(backward, own) * group.reduced_again[None, :, None])
    return [without_repeated, without_work(removed)]


def starved_of_cpu(context: Context) -> Costs:
    """``shared.cpu_starved``: each rank's run delay, up to that of the (lower) median rank in the same step, distributed over its work. For
    steps in which it is not known for all ranks, the mean of the other steps."""
    ranks, removed = context.graph.steps, []
    for group in context.graph.groups:
        delay = values_in_steps(ranks, [of_rank.run_delay for of_rank in ranks], group.steps)
        known = ~np.isnan(delay).any(axis=1)
        common = np.zeros((len(delay), 1, delay.shape[1]))
        if known.any():
            common[known] = common_part(delay[known, None, :], delay[known, None, :])
            common[~known] = common[known].mean(axis=0)
        work = np.clip(group.work.sum(axis=3), 0, None)
        removed.append(work * np.minimum(1.0, common / np.maximum(work.sum(axis=1, keepdims=True), 1.0)))
    if not any(delay.any() for delay in removed):
        return {}
    return _present({SharedCause.CPU_STARVED: context.cost([without_work(removed)], removed)})


def common_work(context: Context, components: Components, *, by_kind: bool = False) -> Cost | None:
    """Cost of this work on all ranks.

    If random ranks are late with it, all of it counts; else the part that the ranks have in common, without the stragglers' excess. With
    ``by_kind``, work is common only if it is of the same component and at the same lines. In steps that a pattern of the run makes longer,
    only its usual amount counts then, because the pattern is a separate finding.
    """
    attribution = context.attribution
    random_components = {c for kind in attribution.random_causes for c in LATE_COMPONENTS[kind]}
    all_ranks = random_components.issuperset(components)
    kinds = [(each,) for each in components] if by_kind else [components]
    removed: list[Array] = []
    alone: list[Array] = []
    for group, gross_excess in zip(context.graph.groups, attribution.gross_excess, strict=True):
        # Measured and standalone work. If devices wait for hosts, waiting that overlaps with a synchronisation counts as well.
        both = [group.work, group.work_standalone]
        if waits_for_hosts(group, components):
            both = [group.with_overlap(group.work), group.work_with_overlap]
        parts = [
            _in_common(component([*both, gross_excess], kind), all_ranks, group.segment_classes)
            for kind in kinds
        ]
        removed.append(np.sum([part for part, _ in parts], axis=0))
        alone.append(np.sum([part for _, part in parts], axis=0))
    if not sum(float(work.sum()) for work in removed):
        return None
    same = context.lines.common_share(components, context.steps) if by_kind else None
    if same is not None and same < MOSTLY_THE_SAME:
        removed, alone = [same * work for work in removed], [same * work for work in alone]
    where = None
    for pattern in context.patterns if by_kind else ():
        numbers = context.graph.numbers
        long, usual = pattern.long_and_usual_steps(numbers)
        if long.any() and usual.any():
            removed, alone = _limited_to_usual(removed, long, usual), _limited_to_usual(alone, long, usual)
            where = context.lines.work(components, None, numbers[usual], fallback_steps=numbers)
    cost = context.cost([without_work(removed, alone)], removed, components, where=where)
    return (
        cost
        if Component.CHECKPOINT in components
        else context.at_its_period(cost, context.steps_hit(removed))
    )


def _limited_to_usual(work: list[Array], long: Mask, usual: Mask) -> list[Array]:
    """``work`` ([N, K, R] ns per group), in ``long`` cycles limited to each rank's median of the ``usual`` ones; both masks [cycles], group
    by group."""
    of_cycle = np.concatenate([of_group.sum(axis=1) for of_group in work])
    most = np.median(of_cycle[usual], axis=0)
    kept = np.where(long[:, None], np.minimum(most / np.maximum(of_cycle, 1.0), 1.0), 1.0)
    ends = np.cumsum([len(of_group) for of_group in work])[:-1]
    return [of_group * part[:, None, :] for of_group, part in zip(work, np.split(kept, ends), strict=True)]


def _in_common(of_kind: Sequence[Array], all_ranks: bool, like: SegmentClasses | None) -> tuple[Array, Array]:
    """[N, K, R] ns, twice: common part of the measured work, and of the standalone work. ``of_kind``: both, and the stragglers' excess."""
    work, own, excess = of_kind
    if all_ranks:
        return np.clip(work, 0, None), np.clip(own, 0, None)
    return common_part(work - excess, own - excess, like), common_part(own - excess, own - excess, like)


def different_work(context: Context) -> list[Array] | None:
    """[N, K, R] ns per group: host work that is equally long on all ranks, but at different lines. No rank is late, but the step is as long
    as if one were. None if most of the work is at the same lines, or if the lines are unknown."""
    graph, components = context.graph, LATE_COMPONENTS[LateCause.HOST]
    if len(graph.ranks) < 2 or not context.host_timed:
        return None
    same = context.lines.common_share(components, context.steps)
    if same is None or same >= DIFFERENT:
        return None
    work = [component([group.work], components)[0] for group in graph.groups]
    gross_excess = component(context.attribution.gross_excess, components)
    alike = [
        common_part(own - more, own - more, group.segment_classes)
        for group, own, more in zip(graph.groups, work, gross_excess, strict=True)
    ]
    apart = [(1.0 - same) * common for common in alike]
    mean_ns = float(np.concatenate([of_group.sum(axis=1) for of_group in apart]).mean())
    return apart if mean_ns >= LEAST_DIFFERENT * graph.mean_cycle_ns else None


def usual_transfer(group: CycleGroup, kind: SyncKind = SyncKind.GRADIENTS) -> Array:
    """[N, K] ns: exposed transfer of this kind of collectives, limited to a quantile (:data:`USUAL_TRANSFER`) over the cycles."""
    exposed = group.transfer if group.exposed is None else group.exposed
    transfers = exposed * np.array([sync.kind == kind for sync in group.syncs])[None, :]
    usual: Array = np.minimum(transfers, np.quantile(transfers, USUAL_TRANSFER, axis=0)[None, :])
    return usual


def _without_syncs(context: Context, kind: SyncKind) -> Cost | None:
    graph, kinds = context.graph, [kind]
    spent, idle = [], idle_after(graph, kinds)
    for group, idle_ns in zip(graph.groups, idle, strict=True):
        # Waiting for other ranks is included.
        inside_ns = np.clip(np.nan_to_num(group.end - group.arrival) - group.concurrent_compute, 0, None)
        chosen = np.array([sync.kind in kinds for sync in group.syncs])
        spent.append(inside_ns * chosen[:, None] + idle_ns)
    if not any(time.any() for time in spent):
        return None
    return context.cost(
        [without_sync(lambda group, k: group.syncs[k].kind in kinds), without_work(idle)],
        spent,
        where=context.lines.syncs(kinds),
        operation=_names(graph, kinds) or context.lines.operation(kinds, None),
        # A broadcast occurs in every step: a longer one in some steps is a disturbance by a busy machine.
        usually=kind == SyncKind.BROADCAST,
    )


def _names(graph: Graph, kinds: Sequence[str]) -> str | None:
    names = {sync.name for group in graph.groups for sync in group.syncs if sync.kind in kinds}
    return ", ".join(sorted(names)) or None


def _present(costs: dict[SharedCause | str, Cost | None]) -> Costs:
    return {f"shared.{cause}": cost for cause, cost in costs.items() if cost is not None}
