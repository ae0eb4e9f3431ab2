"""Compares each rank's work since the last synchronisation with the other ranks' work.

For component *c* of the work of rank *r* in segment *k* of cycle *n*, with the median over the **other** ranks (the upper median of an
even number of others, because slow is normal if half of the others are slow),

    d[n, k, r, c] = work[n, k, r, c] - median over others of work[n, k, :, c]

A rank that is slower in the phases of its steps is also slower in the gaps between them. The excess in the gaps counts as computation up to
the same proportion (:func:`_with_slow_gaps_as_computation`); only the rest is separate work.

The sum over *k* is the excess in the whole cycle: time lost in one segment and gained in the next is no load imbalance (the bottleneck
is then the barrier between the two, not the rank).

If nothing was recorded of some ranks' hosts, the reason for idle time of their devices is unknown, and may be the same as on the rank
that is compared. An excess counts only as far as it is one in both cases.

:func:`spread_over_segments` distributes the excess of whole cycles over the segments in which it arose.
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
_IDLE_REASONS = [place for kind, place in INDEX.items() if kind not in (*DEVICE_WORK, *NO_WORK)]
"""Columns of the reasons for a device's idle time, which are known if its host was recorded."""
_MANY_RANKS = 16
"""With more ranks, the median of all replaces the median of the others: it differs by at most one place in order, and is computed once."""


class Comparison(msgspec.Struct, frozen=True):
    """All measured cycles of all groups: R ranks and C components of work, ns."""

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
    excess: Array
    """[cycles, R, C] excess over the median of the other ranks."""
    segment_excess: list[Array]
    """The same by segment, for each group of the graph: [N, K, R, C]."""

    def work_of(self, cause: LateCause) -> Array:
        """[cycles, R] ns of one kind of work."""
        work: Array = self.work[:, :, COLUMNS[cause]].sum(axis=2)
        return work

    def excess_of(self, cause: LateCause) -> Array:
        """[cycles, R] ns of one kind of work, excess over the median of the other ranks."""
        excess: Array = self.excess[:, :, COLUMNS[cause]].sum(axis=2)
        return excess


def compare(graph: Graph) -> Comparison:
    """Compare the ranks of a graph that has cycles and more than one rank."""
    duration_ns = np.concatenate([group.duration for group in graph.groups])
    work = _with_slow_gaps_as_computation([group.work_with_overlap for group in graph.groups])
    by_class = [
        _excess(group.segment_classes.by_class(of_group))
        for group, of_group in zip(graph.groups, work, strict=True)
    ]
    # Work concurrent with synchronisations counts in the next segment, which may differ between ranks: only whole cycles are comparable.
    excess = [
        difference.sum(axis=1) if group.hidden is None else _excess(of_group.sum(axis=1))
        for group, of_group, difference in zip(graph.groups, work, by_class, strict=True)
    ]
    return Comparison(
        steps=np.concatenate([group.steps for group in graph.groups]),
        duration_ns=duration_ns,
        step_ns=float(np.median(duration_ns)),
        on_device=any(group.on_device for group in graph.groups),
        work=np.concatenate([of_group.sum(axis=1) for of_group in work]),
        excess=np.concatenate(excess),
        segment_excess=[
            group.segment_classes.by_segment(of_group)
            for group, of_group in zip(graph.groups, by_class, strict=True)
        ],
    )


def _with_slow_gaps_as_computation(work: Sequence[Array]) -> list[Array]:
    """``work`` [N, K, R, C] ns per group, with the gap excess that is in proportion to the rank's slower phases moved to FORWARD."""
    phases = np.concatenate([of_group[..., _PHASES].sum(axis=(1, 3)) for of_group in work])
    result = []
    for of_group in work:
        moved = np.zeros(of_group.shape)
        for column in _GAPS:
            moved[..., column] = proportional_gap_excess(of_group[..., column], phases)
        moved[..., INDEX[Component.FORWARD]] = -moved.sum(axis=-1)
        result.append(of_group - moved)
    return result


def proportional_gap_excess(gaps: Array, phases: Array) -> Array:
    """[..., R] ns excess of ``gaps`` [..., R], limited to the proportion by which the rank's median ``phases`` [cycles, R] are longer."""
    usual, others = np.median(phases, axis=0), others_median(gaps)
    slower = np.clip(usual / np.maximum(others_median(usual), 1.0) - 1.0, 0.0, None)
    return np.clip(np.minimum(gaps - others, slower * others), 0.0, None)


def _excess(work: Array) -> Array:
    """[..., R, C] excess of work over the median of the other ranks."""
    by_kind = np.swapaxes(work, -1, -2)
    excess = by_kind - others_median(by_kind)
    unrecorded: Mask = by_kind[..., _IDLE, :].reshape(-1, by_kind.shape[-1]).max(axis=0) > 0
    if unrecorded.any() and not unrecorded.all():
        excess[..., _IDLE_REASONS, :], excess[..., _IDLE, :] = _idle_excess(by_kind, unrecorded)
    return np.swapaxes(excess, -1, -2)


def _idle_excess(by_kind: Array, unrecorded: Mask) -> tuple[Array, Array]:
    """Excess idle time of [..., C, R]: [..., kinds, R] with a known reason, and [..., R] on the ranks whose hosts were not recorded
    (``unrecorded`` [R])."""
    known, unknown = by_kind[..., _IDLE_REASONS, :], by_kind[..., _IDLE, :]
    upper_limit = others_median(known + unknown[..., None, :])
    whole = np.where(unrecorded, unknown, known.sum(axis=-2))
    unknown_excess = np.where(unrecorded, whole - others_median(whole), 0.0)
    return known - np.clip(known, others_median(known), upper_limit), unknown_excess


def others_median(values: Array) -> Array:
    """Median over the other ranks, the upper one if their number is even. ``values`` [..., R >= 2]."""
    world = values.shape[-1]
    half = (world - 1) // 2
    if world > _MANY_RANKS:
        middle = np.partition(values, half, axis=-1)[..., half]
        return np.broadcast_to(middle[..., None], values.shape)
    others = (np.delete(values, rank, axis=-1) for rank in range(world))
    return np.stack([np.partition(of_others, half, axis=-1)[..., half] for of_others in others], axis=-1)


def values_in_steps(ranks: Sequence[RankSteps], values: Sequence[Array], steps: Ints) -> Array:
    """[cycles, R] ``values`` (of each rank, [N] by its own steps) in these ``steps``; NaN if a rank did not record the step."""
    known = [
        dict(zip(of_rank.steps.tolist(), own.tolist(), strict=True))
        for of_rank, own in zip(ranks, values, strict=True)
    ]
    rows = [[own.get(step, np.nan) for own in known] for step in steps.tolist()]
    return np.array(rows, float).reshape(len(steps), len(ranks))


def mask_of_components(shape: tuple[int, ...], marked: Iterable[tuple[LateCause, Mask]]) -> Mask:
    """[cycles, R, C] (``shape``): the mask [cycles, R] of each kind of work, repeated for all its components."""
    mask = np.zeros(shape, bool)
    for cause, where in marked:
        mask[:, :, COLUMNS[cause]] = where[:, :, None]
    return mask


def net_within_kinds(excess: Array, causes: Iterable[LateCause]) -> Array:
    """``excess`` [cycles, R, C] ns with the components of each kind of work clipped at 0 and scaled to add up to the kind's net excess."""
    net = np.copy(excess)
    for cause in causes:
        own = excess[:, :, COLUMNS[cause]]
        positive = np.clip(own, 0, None)
        net[:, :, COLUMNS[cause]] = (
            positive * _scale_factor(own.sum(axis=2), positive.sum(axis=2))[:, :, None]
        )
    return net


def net_over_kinds(net: Array, excess: Array, marked: Mask) -> Array:
    """``net`` [cycles, R, C] ns scaled so that its ``marked`` part adds up to no more than the cycle's whole excess.

    Time lost in one component and gained in another does not make a rank late. ``excess``: the measured excess.
    """
    positive = np.where(marked, np.clip(net, 0, None), 0.0)
    scaled = np.copy(net)
    scaled *= _scale_factor(excess.sum(axis=2), positive.sum(axis=2))[:, :, None]
    return scaled


def _scale_factor(wanted: Array, whole: Array) -> Array:
    """Factor, at most 1, by which ``whole`` becomes at most ``wanted``; 0 where ``whole`` is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.where(whole > 0, np.clip(wanted, 0, None) / whole, 0.0)
    return np.minimum(1.0, factor)


def spread_over_segments(segment_excess: Sequence[Array], net: Array, marked: Mask) -> list[Array]:
    """[N, K, R, C] ns per group: the ``marked`` part of the ``net`` excess (both [cycles, R, C]), in the segments in which it arose."""
    ends = np.cumsum([len(difference) for difference in segment_excess])
    spread = []
    for end, difference in zip(ends, segment_excess, strict=True):
        cycles = slice(end - len(difference), end)
        positive = np.clip(difference, 0, None)
        wanted = np.where(marked[cycles], np.clip(net[cycles], 0, None), 0.0)
        spread.append(positive * _scale_factor(wanted, positive.sum(axis=1))[:, None])
    return spread
