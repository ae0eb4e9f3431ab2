"""Each rank beside the others: what it did, since all were last together, that they did not.

For component *c* of the work of rank *r* in segment *k* of cycle *n*, with the median over the **other** ranks (of an even
number of others the upper one: where most ranks are slow, slow is usual),

    d[n, k, r, c] = work[n, k, r, c] - median over others of work[n, k, :, c]

Where a rank is slower in the phases of its steps, it is in the gaps between them, too: so much of what it does longer there is the
same computation, slower (:func:`_slower_in_gaps`), and only the rest is work of its own.

The sum over *k* says by how much the rank does more in the whole cycle: what it gains in one segment and loses in the next is no
imbalance (a barrier between the two is then the bottleneck, not the rank).

Where nothing was recorded of some ranks' hosts, why their devices idle is not known: it may be for the same reason as that of the
rank that is looked at, and may not. An excess counts as far as it is one either way.

Verdicts on whole cycles lead back to the segments in which the excess arose (:func:`spread`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.graph import Graph, RankSteps
from ddpdoctor.measure.numerics import Array, Ints, Mask
from ddpdoctor.measure.taxonomy import (
    BETWEEN_PHASES,
    DEVICE_WORK,
    INDEX,
    LATE_COMPONENTS,
    NO_WORK,
    PHASES,
    Component,
    LateCause,
)

COLUMNS = {
    cause: [INDEX[component] for component in components] for cause, components in LATE_COMPONENTS.items()
}
"""Kind of work → its columns on the axis of components. Each column belongs to one kind."""
_PHASES = [INDEX[component] for component in PHASES]
_GAPS = [INDEX[component] for component in BETWEEN_PHASES]
_IDLE = INDEX[Component.IDLE]
_WHY_IDLE = [place for kind, place in INDEX.items() if kind not in (*DEVICE_WORK, *NO_WORK)]
"""Columns of what a device's idle time is where its host was recorded."""
_MANY_RANKS = 16
"""From more ranks on the median of all stands for that of the others: it is the same to within one rank, and found once for
all of them."""


class Comparison(msgspec.Struct, frozen=True):
    """All measured cycles, groups together: R ranks and C components of work, ns."""

    steps: Ints
    """[cycles] step number."""
    duration_ns: Array
    """[cycles]"""
    step_ns: float
    """The median step."""
    on_device: bool
    """Whether the work ran on devices."""
    work: Array
    """[cycles, R, C]"""
    more: Array
    """[cycles, R, C] beyond the median of the other ranks."""
    differences: list[Array]
    """The same by segment, for each group of the graph: [N, K, R, C]."""

    def work_of(self, cause: LateCause) -> Array:
        """[cycles, R] ns of one kind of work."""
        work: Array = self.work[:, :, COLUMNS[cause]].sum(axis=2)
        return work

    def more_of(self, cause: LateCause) -> Array:
        """[cycles, R] ns of one kind of work beyond the other ranks."""
        more: Array = self.more[:, :, COLUMNS[cause]].sum(axis=2)
        return more


def compare(graph: Graph) -> Comparison:
    """Compare the ranks of a graph that has cycles and more than one rank."""
    duration_ns = np.concatenate([group.duration for group in graph.groups])
    work = _slower_in_gaps([group.work_with_overlap for group in graph.groups])
    by_class = [
        _beyond_others(group.segment_classes.by_class(of_group))
        for group, of_group in zip(graph.groups, work, strict=True)
    ]
    # What runs beside synchronisations counts in the segment where it ends up, which may be another on each rank: only the whole
    # cycle tells then.
    more = [
        difference.sum(axis=1) if group.hidden is None else _beyond_others(of_group.sum(axis=1))
        for group, of_group, difference in zip(graph.groups, work, by_class, strict=True)
    ]
    return Comparison(
        steps=np.concatenate([group.steps for group in graph.groups]),
        duration_ns=duration_ns,
        step_ns=float(np.median(duration_ns)),
        on_device=any(group.on_device for group in graph.groups),
        work=np.concatenate([of_group.sum(axis=1) for of_group in work]),
        more=np.concatenate(more),
        differences=[
            group.segment_classes.by_segment(of_group)
            for group, of_group in zip(graph.groups, by_class, strict=True)
        ],
    )


def _slower_in_gaps(work: Sequence[Array]) -> list[Array]:
    """``work`` [N, K, R, C] ns per group, in which a slower rank's operators between the phases take, up to as much longer as its
    phases do, part in its computation."""
    phases = np.concatenate([of_group[..., _PHASES].sum(axis=(1, 3)) for of_group in work])
    result = []
    for of_group in work:
        moved = np.zeros(of_group.shape)
        for column in _GAPS:
            moved[..., column] = longer_alike(of_group[..., column], phases)
        moved[..., INDEX[Component.FORWARD]] = -moved.sum(axis=-1)
        result.append(of_group - moved)
    return result


def longer_alike(gaps: Array, phases: Array) -> Array:
    """[..., R] ns of the work in ``gaps`` [..., R] beyond the other ranks, up to as much longer as the rank's usual ``phases`` [cycles, R]
    are: the same computation, slower."""
    usual, others = np.median(phases, axis=0), others_median(gaps)
    slower = np.clip(usual / np.maximum(others_median(usual), 1.0) - 1.0, 0.0, None)
    return np.clip(np.minimum(gaps - others, slower * others), 0.0, None)


def _beyond_others(work: Array) -> Array:
    """[..., R, C] work minus the median of the other ranks."""
    by_kind = np.swapaxes(work, -1, -2)
    beyond = by_kind - others_median(by_kind)
    unseen: Mask = by_kind[..., _IDLE, :].reshape(-1, by_kind.shape[-1]).max(axis=0) > 0
    if unseen.any() and not unseen.all():
        beyond[..., _WHY_IDLE, :], beyond[..., _IDLE, :] = _idle_beyond_others(by_kind, unseen)
    return np.swapaxes(beyond, -1, -2)


def _idle_beyond_others(by_kind: Array, unseen: Mask) -> tuple[Array, Array]:
    """The idle time beyond the other ranks, of [..., C, R]: [..., kinds, R] as far as it is known why, and [..., R] of the ranks
    of whose hosts nothing was recorded (``unseen`` [R])."""
    known, unknown = by_kind[..., _WHY_IDLE, :], by_kind[..., _IDLE, :]
    most = others_median(known + unknown[..., None, :])
    whole = np.where(unseen, unknown, known.sum(axis=-2))
    beyond = np.where(unseen, whole - others_median(whole), 0.0)
    return known - np.clip(known, others_median(known), most), beyond


def others_median(values: Array) -> Array:
    """Median over the other ranks, the upper one where their number is even. ``values`` [..., R >= 2]."""
    world = values.shape[-1]
    half = (world - 1) // 2
    if world > _MANY_RANKS:
        middle = np.partition(values, half, axis=-1)[..., half]
        return np.broadcast_to(middle[..., None], values.shape)
    others = (np.delete(values, rank, axis=-1) for rank in range(world))
    return np.stack([np.partition(of_others, half, axis=-1)[..., half] for of_others in others], axis=-1)


def in_steps(ranks: Sequence[RankSteps], values: Sequence[Array], steps: Ints) -> Array:
    """[cycles, R] what ``values`` (by rank, [N] by its own steps) are in these ``steps``; NaN where a rank did not record the step."""
    known = [
        dict(zip(of_rank.steps.tolist(), own.tolist(), strict=True))
        for of_rank, own in zip(ranks, values, strict=True)
    ]
    rows = [[own.get(step, np.nan) for own in known] for step in steps.tolist()]
    return np.array(rows, float).reshape(len(steps), len(ranks))


def in_columns(shape: tuple[int, ...], marked: Iterable[tuple[LateCause, Mask]]) -> Mask:
    """[cycles, R, C] (``shape``): the cycles of each kind of work, [cycles, R], marked in all its components."""
    mask = np.zeros(shape, bool)
    for cause, where in marked:
        mask[:, :, COLUMNS[cause]] = where[:, :, None]
    return mask


def net_within(more: Array, causes: Iterable[LateCause]) -> Array:
    """``more`` [cycles, R, C] ns with the components of each kind of work scaled to add up to the kind's excess: what one gains
    and another loses is none."""
    net = np.copy(more)
    for cause in causes:
        own = more[:, :, COLUMNS[cause]]
        positive = np.clip(own, 0, None)
        net[:, :, COLUMNS[cause]] = positive * _factor(own.sum(axis=2), positive.sum(axis=2))[:, :, None]
    return net


def net_of_all(net: Array, more: Array, marked: Mask) -> Array:
    """``net`` [cycles, R, C] ns scaled so that what is ``marked`` of it adds up to no more than the cycle's whole excess.

    What a rank does longer in one component and shorter in another does not make it late. ``more``: its excess, as measured.
    """
    positive = np.where(marked, np.clip(net, 0, None), 0.0)
    scaled = np.copy(net)
    scaled *= _factor(more.sum(axis=2), positive.sum(axis=2))[:, :, None]
    return scaled


def _factor(wanted: Array, whole: Array) -> Array:
    """By which ``whole`` must be multiplied to be no more than ``wanted``; 0 where there is nothing to multiply."""
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.where(whole > 0, np.clip(wanted, 0, None) / whole, 0.0)
    return np.minimum(1.0, factor)


def spread(differences: Sequence[Array], net: Array, marked: Mask) -> list[Array]:
    """[N, K, R, C] ns per group: each cycle's ``net`` excess, where it is ``marked`` (both [cycles, R, C]), in the segments in
    which it arose."""
    ends = np.cumsum([len(difference) for difference in differences])
    segments = []
    for end, difference in zip(ends, differences, strict=True):
        cycles = slice(end - len(difference), end)
        positive = np.clip(difference, 0, None)
        wanted = np.where(marked[cycles], np.clip(net[cycles], 0, None), 0.0)
        segments.append(positive * _factor(wanted, positive.sum(axis=1))[:, None])
    return segments
