"""Blame: what a late rank did, since all were last together, that the others did not.

For component *c* of the work of rank *r* in segment *k* of cycle *n*, with the median over the **other**
ranks (of an even number of others the upper one: where most ranks are slow, slow is usual),

    d[n, k, r, c] = work[n, k, r, c] - median over others of work[n, k, :, c]

The sum over *k* says by how much the rank does more in the whole cycle: what it gains in one segment and
loses in the next is no imbalance (a barrier between the two is then the bottleneck, not the rank). The excess
is *persistent* where its median over the cycles stands out of its own scatter, and *sporadic* where single
cycles stand out of the rank's usual ones. Scatter that hits all ranks alike, as on a busy machine, is
neither. Where it is work that is recorded as such (a batch that comes late now here, now there), its cost is
real, but it is common to the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.graph import CycleGroup, Graph
from ddpdoctor.measure.numerics import MOSTLY, Array, one_sided, places, scatter_of
from ddpdoctor.measure.taxonomy import COMPONENTS, INDEX, LATE_COMPONENTS, RECORDED, SyncKind

from .levels import levels
from .standout import all_stall, stands_out
from .turns import made_by_the_job, rotate, turns

PERSISTENT_SIGMAS = 4.0
"""Standard errors of the median by which a persistent excess must stand out."""
PERSISTENT_SHARE = 0.01
"""Share of the step below which an excess is not looked at: NVRx and others call a rank slow from a few per
cent on."""
SPIKE_SIGMAS = 6.0
"""Robust standard deviations beyond a rank's own usual excess that make a cycle an outlier (SageMaker's
StepOutlier uses 3 of the plain ones, which the outliers themselves inflate)."""
SPIKE_SHARE = 0.15
"""Share of the median step that an outlier must exceed as well."""
FEWEST_SPIKES = 2
FEWEST_CYCLES = 4
FEW_CYCLES_SHARE = 0.05
"""Share of the step that an excess must reach in a window of fewer cycles; twice that with fewer than four ranks, and
twice again in a single cycle."""
_FEWEST_RANKS = 4


@dataclass(frozen=True)
class Excess:
    """Excess work per group of the graph, each [N, K, R, C] ns, zero where nobody is accused."""

    amount: list[Array]
    """What makes the rank late: no more in a cycle than it does longer in all."""
    claimed: list[Array]
    """What the rank does longer in each component, though it may make up for it in another."""
    culprits: dict[str, list[int]]
    """Positions of the accused ranks by kind of work, those with most excess first."""
    everybody: tuple[str, ...] = ()
    """Kinds of recorded work that take long now on this rank, now on that one, as chance has it."""
    in_turn: list[Array] = field(default_factory=list)
    """Like ``amount``: what makes now this rank late, now that one, where nobody alone is accused of that kind of work.
    Empty where there is none."""
    turn_kinds: tuple[str, ...] = ()
    rotates: bool = False
    """Whether the step number tells whose turn it is."""
    stands_out: dict[str, list[int]] = field(default_factory=dict)
    """Steps, by kind of work, that accuse a rank for no more than standing out of a short window (:mod:`.standout`)."""
    short: bool = False
    """A window on devices is all that is known of the job."""
    inputs_explain: float | None = None
    """Part of the differences of the ranks' computation that their inputs' sizes explain (:mod:`.levels`)."""


def _others_median(values: Array) -> Array:
    """Median over the other ranks, the upper one where their number is even. ``values`` [..., R >= 2]."""
    world = values.shape[-1]
    if world > 16:
        # The same to within one rank: the lower median of all.
        middle = np.partition(values, (world - 1) // 2, axis=-1)[..., (world - 1) // 2]
        return np.broadcast_to(middle[..., None], values.shape)
    half = (world - 1) // 2
    columns = [np.partition(np.delete(values, r, axis=-1), half, axis=-1)[..., half] for r in range(world)]
    return np.stack(columns, axis=-1)


def excess(graph: Graph, *, short: bool = False) -> Excess:
    """Who does more of what than the others, by how much, in which cycles.

    ``short``: the graph is a window on devices, and all that is known of the job."""
    world = len(graph.ranks)
    empty = [np.zeros_like(group.work) for group in graph.groups]
    if (
        world < 2
        or not graph.groups
        or any(sync.kind == SyncKind.STEP_END for group in graph.groups for sync in group.syncs)
    ):
        # Ranks that were not seen to meet cannot be late for each other.
        return Excess(empty, empty, {}, short=short)
    differences = [_differences(group.work_since) for group in graph.groups]
    # Cycle totals, all groups together: [cycles, R, C].
    totals = np.concatenate(
        [_total_difference(group, d) for group, d in zip(graph.groups, differences, strict=True)]
    )
    whole = totals.sum(axis=2)
    duration = np.concatenate([group.duration for group in graph.groups])
    step_ns = float(np.median(duration))
    steps = np.concatenate([group.steps for group in graph.groups])
    work = np.concatenate([group.work_since.sum(axis=1) for group in graph.groups])
    kinds = {kind: [INDEX[name] for name in names] for kind, names in LATE_COMPONENTS.items()}
    place = places(kinds, work, totals, SPIKE_SHARE * step_ns)
    outstanding, scattered = stands_out(kinds, RECORDED, work, totals, duration) if short else ({}, {})
    waits = np.concatenate(
        [of.sum(axis=1) for of in component([g.work for g in graph.groups], *LATE_COMPONENTS["data"])]
    )
    stalled = all_stall(waits, step_ns) & short
    told: dict[str, list[int]] = {}
    accepted, in_turn = np.zeros((2, *totals.shape), bool)
    culprits: dict[str, list[int]] = {}
    everybody, turn_kinds = [], []
    rotates, any_proven = False, False
    for kind, columns in kinds.items():
        together = totals[:, :, columns].sum(axis=2)
        hit, chance = _hits(together, steps, step_ns, 1.0 if kind in RECORDED else place[kind])
        if kind == "checkpoint" and not hit.any():
            hit = _of_few(work[:, :, columns].sum(axis=2)) & (together > PERSISTENT_SHARE * step_ns)
            chance &= not hit.any()
        if kind in outstanding and not (hit & ~outstanding[kind]).any():
            hit, chance = outstanding[kind], False
            told[kind] = sorted(steps[hit.any(axis=1)].tolist())
        if kind == "data" and stalled.any():
            # All wait in these steps, one a little longer than another; and what nobody waits for makes nobody late.
            hit = hit & ~stalled[:, None] & (waits > PERSISTENT_SHARE * step_ns)
            chance |= not hit.any()
        weight = np.where(hit, np.clip(together, 0, None), 0.0).sum(axis=0)
        turn = (
            np.zeros_like(hit) if weight.any() else turns(work[:, :, columns].sum(axis=2), together, step_ns)
        )
        proven = bool(turn.any()) and made_by_the_job(turn, steps, graph.steps, place[kind])
        if kind in scattered and not proven and not weight.any():
            turn = scattered[kind]
        if kind in RECORDED and (chance or turn.any()):
            everybody.append(kind)
        elif proven or (turn.any() and kind in scattered):
            turn_kinds.append(kind)
            any_proven |= proven
            rotates |= rotate(turn, steps)
            in_turn[:, :, columns] = turn[:, :, None]
            totals[:, :, columns] = _net(totals[:, :, columns], together)
        if not weight.any():
            continue
        accepted[:, :, columns] = hit[:, :, None]
        totals[:, :, columns] = _net(totals[:, :, columns], together)
        order = np.argsort(-weight)
        culprits[kind] = [int(r) for r in order if weight[r] >= 0.25 * weight[order[0]] and weight[r] > 0]
    claimed = _spread(differences, totals, accepted)
    _scale_to_whole(totals, whole, accepted | in_turn)
    amount = _spread(differences, totals, accepted)
    late_in_turn = _spread(differences, totals, in_turn) if turn_kinds else []
    if turn_kinds and not any_proven:
        told["turns"] = sorted(steps[in_turn.any(axis=(1, 2))].tolist())
    uneven = None if "compute" in culprits else levels(graph)
    if uneven is not None and _longest(uneven.removed) > _longest(late_in_turn, *LATE_COMPONENTS["compute"]):
        others = [c for kind in turn_kinds if kind != "compute" for c in kinds[kind]]
        late_in_turn = [
            _with(of, late_in_turn[i] if turn_kinds else None, others) for i, of in enumerate(uneven.removed)
        ]
        turn_kinds = [*(kind for kind in turn_kinds if kind != "compute"), "compute"]
        told.pop("turns", None)
    explain = uneven.explained if uneven is not None else None
    return Excess(
        *(amount, claimed, culprits, tuple(everybody), late_in_turn, tuple(turn_kinds), rotates, told, short),
        inputs_explain=explain,
    )


def _longest(amount: list[Array], *names: str) -> float:
    """ns: sum over the cycles of what the ranks with most of it have."""
    of = component(amount, *(names or COMPONENTS))
    return sum(float(part.max(axis=2).sum()) for part in of)


def _with(removed: Array, others: Array | None, columns: list[int]) -> Array:
    """``removed`` with these columns of ``others``, of work of other kinds."""
    if others is not None:
        removed[..., columns] = others[..., columns]
    return removed


def _net(totals: Array, together: Array) -> Array:
    """Components of one kind of work whose excess adds up to the kind's: what one gains, another loses, is
    none."""
    positive = np.clip(totals, 0, None)
    whole = positive.sum(axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.where(whole > 0, np.clip(together, 0, None) / whole, 0.0)
    result: Array = positive * np.minimum(1.0, factor)[:, :, None]
    return result


def _total_difference(group: CycleGroup, differences: Array) -> Array:
    """[N, R, C] over the whole cycle, with what ran beside synchronisations."""
    if group.hidden is None:
        total: Array = differences.sum(axis=1)
        return total
    spent = np.moveaxis(group.work_since.sum(axis=1), 1, -1)
    return np.moveaxis(spent - _others_median(spent), -1, 1)


def _differences(work: Array) -> Array:
    """[N, K, R, C] work minus the median of the other ranks."""
    moved = np.moveaxis(work, 2, -1)
    return np.moveaxis(moved - _others_median(moved), -1, 2)


def _hits(
    difference: Array, steps: NDArray[np.int64], step_ns: float, place: float
) -> tuple[NDArray[np.bool_], bool]:
    """[cycles, R] in which cycles a rank's excess in one kind of work counts, and whether there are outliers that
    strike the ranks by chance. ``place``: see :func:`.chance.one_sided`."""
    cycles, world = difference.shape
    usual = np.median(difference, axis=0)
    scatter = scatter_of(difference - usual)
    error = 1.2533 * scatter / np.sqrt(max(cycles, 1))
    persistent = (usual > PERSISTENT_SIGMAS * error) & (usual > PERSISTENT_SHARE * step_ns)
    if cycles < FEWEST_CYCLES:
        # Too few cycles to know a rank's own scatter: in each it must stand out of the other ranks', and clearly.
        share = FEW_CYCLES_SHARE * (1 if world >= _FEWEST_RANKS else 2) * (1 if cycles > 1 else 2)
        if world >= _FEWEST_RANKS:
            spread = scatter_of(difference.ravel())
            persistent = difference.min(axis=0) > PERSISTENT_SIGMAS * spread
        persistent &= usual > share * step_ns
    # What turns into its opposite in other cycles is no usual excess, and must not hide single ones.
    usual = np.where(persistent & ~_keeps_its_sign(difference, usual), 0.0, usual)
    persistent &= usual > 0
    hit = np.zeros(difference.shape, bool)
    hit[:, persistent] = difference[:, persistent] > 0
    beyond = difference - np.maximum(usual, 0)
    least = np.maximum(SPIKE_SIGMAS * scatter, SPIKE_SHARE * step_ns)
    spike = beyond > least
    # Ranks that scatter more have fewer outliers of their own; whose they are is judged by one measure for all.
    struck = beyond > least[spike.any(axis=0)].min(initial=float(least.max()))
    carried = one_sided(struck, difference, steps, place) & spike
    chance = bool((spike & ~hit).sum() >= FEWEST_SPIKES) and not carried.any()
    return hit | (carried & (carried.sum(axis=0) >= FEWEST_SPIKES)), chance


def _of_few(work: Array) -> NDArray[np.bool_]:
    """[R] the ranks, half of all at most, that alone ever do this work [cycles, R]; nobody where more do. What a rank is seen
    to do, and the others never, is no chance, however seldom."""
    doers: NDArray[np.bool_] = (work > 0).sum(axis=0) > 0
    return doers if 2 * doers.sum() <= len(doers) else np.zeros_like(doers)


def _keeps_its_sign(difference: Array, usual: Array) -> NDArray[np.bool_]:
    """[R] whether a rank's excess does not turn into its opposite in other cycles, as that of ranks that are late in turn
    does: by a sign test of what is half as large as the usual excess or larger, at three sigmas, or in four of five cycles."""
    positive = (difference > 0.5 * usual).sum(axis=0)
    negative = (difference < -0.5 * usual).sum(axis=0)
    both = positive + negative
    kept: NDArray[np.bool_] = positive - negative > np.minimum(3.0 * np.sqrt(both), 0.6 * both)
    return kept


def _scale_to_whole(totals: Array, whole: Array, accepted: NDArray[np.bool_]) -> None:
    """What a rank does longer in one component and shorter in another does not make it late: scale to the net
    excess."""
    positive = np.where(accepted, np.clip(totals, 0, None), 0.0)
    claimed = positive.sum(axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.where(claimed > 0, np.clip(whole, 0, None) / claimed, 0.0)
    totals *= np.minimum(1.0, factor)[:, :, None]


def _spread(differences: list[Array], totals: Array, accepted: NDArray[np.bool_]) -> list[Array]:
    """Give each cycle's accepted excess back to the segments in which it arose."""
    result, offset = [], 0
    for d in differences:
        rows = slice(offset, offset + len(d))
        offset += len(d)
        positive = np.clip(d, 0, None)
        sums = positive.sum(axis=1)
        wanted = np.where(accepted[rows], np.clip(totals[rows], 0, None), 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(sums > 0, np.minimum(1.0, wanted / sums), 0.0)
        result.append(positive * share[:, None])
    return result


def component(amount: list[Array], *names: str) -> list[Array]:
    """[N, K, R] ns per group: the sum of the named components of an excess or of work."""
    columns = [INDEX[name] for name in names]
    return [of[..., columns].sum(axis=-1) for of in amount]


UNSEEN_SHARE = 0.05
"""Share of the step that one rank must keep the others waiting to be called late by a window too short to
show why."""


def unseen(graph: Graph, found: Excess) -> list[Array] | None:
    """[N, K, R] ns per group: waiting for the one rank that causes most of it, in windows that do not show
    what it did before.

    None where the cycles begin with all ranks together, or where no single rank causes half of all waiting.
    """
    column = INDEX["unseen"]
    if len(graph.ranks) < 2 or not any(group.work[..., column].any() for group in graph.groups):
        return None
    caused = [_caused(group) for group in graph.groups]
    weight = sum((wait.sum(axis=(0, 1)) for wait in caused), np.zeros(len(graph.ranks)))
    leader = int(weight.argmax())
    step_ns = float(np.median(np.concatenate([group.duration for group in graph.groups])))
    if weight[leader] < UNSEEN_SHARE * step_ns * graph.cycles or weight[leader] < MOSTLY * float(
        weight.sum()
    ):
        return None
    explained_ns = sum(float(amount[:, :, leader].sum()) for amount in found.amount)
    if explained_ns >= MOSTLY * float(weight[leader]):
        return None
    only = [np.zeros_like(wait) for wait in caused]
    for kept, wait, amount in zip(only, caused, found.amount, strict=True):
        # What the rank was seen to do longer has its own price.
        explained = amount[:, :, leader].sum(axis=(1, 2))[:, None]
        whole = wait[:, :, leader].sum(axis=1, keepdims=True)
        share = np.clip(1.0 - explained / np.maximum(whole, 1.0), 0.0, 1.0)
        kept[:, :, leader] = wait[:, :, leader] * share
    return only


def _caused(group: CycleGroup) -> Array:
    """[N, K, R] ns by which a rank was the last to arrive, ahead of the second last."""
    caused = np.zeros(group.arrival.shape)
    rows = np.arange(len(group.steps))
    for k, sync in enumerate(group.syncs):
        if len(sync.members) < 2 or sync.kind == SyncKind.STEP_END or sync.root is not None:
            continue
        members = np.array(sync.members)
        arrival = group.arrival[:, k, members]
        ordered = np.sort(arrival, axis=1)
        caused[rows, k, members[arrival.argmax(axis=1)]] = ordered[:, -1] - ordered[:, -2]
    return caused
