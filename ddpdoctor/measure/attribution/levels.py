"""Work that differs between the ranks in each step, on whichever rank: what it costs that all wait for the slowest.

Sequences of any length, or experts that get any number of tokens: each rank has its own share of work, drawn anew in each
step. Nobody stands out, and all wait between two synchronisations for

    max over ranks - mean over ranks

of the work there. On a device that is no noise of a busy machine: kernels of equal work repeat to one or two per cent, and a
device is shared with nobody as a rule. Told is what changes from step to step; by what a rank's work differs usually, in the
same direction, is its own (:mod:`.judging`), and stays. It counts where

- the differences are larger than kernels of equal work show (:class:`LevelsTuning`), or the sizes of the inputs explain them;
- the ranks wait for it in half of the cycles, and in three at least.

A replay in which each rank has the mean of all between two synchronisations gives the price, as in Lin et al., "Understanding
Stragglers in Large Model Training Using What-if Analysis" (OSDI '25), where uneven sequences are the most frequent cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.graph import CycleGroup, Graph, RankSteps
from ddpdoctor.measure.numerics import Array, Ints, above_zero
from ddpdoctor.measure.taxonomy import COMPUTATION, INDEX, SyncKind

from .lateness import LATENESS


def amounts_given(ranks: Sequence[RankSteps], steps: Ints) -> Iterator[Array]:
    """[cycles, R] samples, then elements of inputs, that each rank was given in these steps; NaN where unknown.

    Left out is what is not known of every rank.
    """
    samples = [of_rank.samples for of_rank in ranks]
    elements = [of_rank.elements for of_rank in ranks if of_rank.elements is not None]
    for amounts in (samples, elements):
        if len(amounts) == len(ranks):
            columns = [
                _in_steps(of_rank.steps, amount, steps)
                for of_rank, amount in zip(ranks, amounts, strict=True)
            ]
            yield np.stack(columns, axis=1)


def _in_steps(numbers: Ints, values: Array, steps: Ints) -> Array:
    """[cycles] the values of these steps; NaN where there is none."""
    known = dict(zip(numbers.tolist(), values.tolist(), strict=True))
    return np.array([known.get(int(step), np.nan) for step in steps])


_COLUMNS = [INDEX[component] for component in COMPUTATION]


class LevelsTuning(msgspec.Struct, frozen=True):
    """From where on uneven work counts."""

    spread: float = 0.08
    """Standard deviation of the ranks' work between two synchronisations, relative to its mean. Of equal work it was below 0.012
    in all healthy windows at hand, and 0.2 and more where lengths were drawn at random; clocks and heat make 0.03 to 0.05."""
    waited_share: float = 0.03
    """Share of the mean step for which the slowest rank of a cycle is waited for."""
    fewest_cycles: int = 4
    """Cycles from which on it is known what a rank usually does."""
    fewest_waited: int = 3
    """Cycles in which the slowest rank must be waited for: a pattern's fewest."""
    mostly: float = 0.5
    """Part of the cycles in which that must be so, and of a collective's ranks that must wait for it for it to stop all."""
    explains: float = 0.5
    """Part of the variance that the inputs must explain: half, as elsewhere."""
    uneven: float = 0.02
    """Standard deviation of inputs, relative to their mean, from which they differ: below, they do at an epoch's end only."""


LEVELS = LevelsTuning()


class Levels(msgspec.Struct, frozen=True):
    """What levelling takes from the ranks that have more, and gives (negative) to those that have less."""

    removed: list[Array]
    """[N, K, R, C] ns, by group of the graph."""
    explained: float | None
    """Part of the variance over cycles and ranks that the sizes of the inputs explain; None where they are not known."""


class _Piece(msgspec.Struct, frozen=True):
    """The work between two synchronisations of all ranks, in all cycles of a group."""

    more: Array
    """[N, segments, R] ns that levelling takes from the rank."""
    longest: Array
    """[N] ns that the rank with most has beyond the mean of all."""
    squares_of_more: float
    """ns², over cycles and ranks."""
    squares_of_mean: float
    """ns², with the same weight."""


def levels(graph: Graph) -> Levels | None:
    """Level the work of all ranks between their synchronisations.

    None where it is even, where the same ranks have more of it each time, or where collectives do not run on a device.
    """
    if (
        len(graph.ranks) < 2
        or graph.cycles < LEVELS.fewest_cycles
        or not all(group.on_device for group in graph.groups)
    ):
        return None
    work = [np.clip(group.work_with_overlap[..., _COLUMNS], 0, None) for group in graph.groups]
    usual = _usual(np.concatenate([of_group.sum(axis=(1, 3)) for of_group in work]))
    pieces = [_pieces(group, of_group, usual) for group, of_group in zip(graph.groups, work, strict=True)]
    if not _is_waited_for(graph, pieces):
        return None
    more = [np.concatenate([piece.more for piece in of_group], axis=1) for of_group in pieces]
    removed = [_of_components(beyond, of_group) for beyond, of_group in zip(more, work, strict=True)]
    explained = _explained(graph, np.concatenate([of_group.sum(axis=(1, 3)) for of_group in removed]))
    if _spread(pieces) < LEVELS.spread and (explained is None or explained < LEVELS.explains):
        return None
    return Levels(
        [_in_all_components(group, own) for group, own in zip(graph.groups, removed, strict=True)], explained
    )


def _pieces(group: CycleGroup, work: Array, usual: Array) -> list[_Piece]:
    """The pieces of a group's cycles. ``work`` [N, K, R, components of computation] and ``usual`` [R] ns."""
    own = work.sum(axis=3)
    whole = np.maximum(own.sum(axis=1, keepdims=True), 1.0)
    return [_piece(own[:, first:end], whole, usual) for first, end in _cuts(group)]


def _piece(part: Array, whole: Array, usual: Array) -> _Piece:
    """``part`` [N, segments, R] of the cycle's ``whole`` computation [N, 1, R]; ``usual`` [R] is what the rank has beyond the
    others in all cycles (all in ns)."""
    together = part.sum(axis=1, keepdims=True)
    mean = together.mean(axis=2, keepdims=True)
    beyond = together - mean - usual * together / whole
    return _Piece(
        more=part * beyond / np.maximum(together, 1.0),
        longest=beyond.max(axis=(1, 2)),
        squares_of_more=(beyond**2).sum(),
        squares_of_mean=(mean**2).sum() * (part.shape[2] - 1),
    )


def _is_waited_for(graph: Graph, pieces: list[list[_Piece]]) -> bool:
    """Whether the ranks wait for the slowest in enough cycles."""
    longest = [sum((piece.longest for piece in of_group), np.zeros(())) for of_group in pieces]
    late = np.concatenate(longest) > LEVELS.waited_share * graph.mean_cycle_ns
    return bool(late.sum() >= max(LEVELS.fewest_waited, LEVELS.mostly * len(late)))


def _spread(pieces: list[list[_Piece]]) -> float:
    """Standard deviation of the ranks' work between two synchronisations, relative to its mean."""
    every = [piece for of_group in pieces for piece in of_group]
    of_mean = max(sum(piece.squares_of_mean for piece in every), 1.0)
    return float(np.sqrt(sum(piece.squares_of_more for piece in every) / of_mean))


def _of_components(more: Array, work: Array) -> Array:
    """``more`` [N, K, R] ns, divided among the components of computation as ``work`` is."""
    divided: Array = more[..., None] * work / np.maximum(work.sum(axis=3), 1.0)[..., None]
    return divided


def _in_all_components(group: CycleGroup, removed: Array) -> Array:
    """[N, K, R, C] ns of [N, K, R, components of computation]."""
    whole = np.zeros_like(group.work)
    whole[..., _COLUMNS] = removed
    return whole


def _cuts(group: CycleGroup) -> list[tuple[int, int]]:
    """First and one past the last segment of the work between two synchronisations of all ranks.

    Buckets that are reduced beside the backward pass do not stop it, and synchronisations of some ranks do not level the others.
    """
    world = group.arrival.shape[2]
    runs = [(sync.kind, sync.micro, sync.group) for sync in group.syncs]
    cuts = []
    for k, sync in enumerate(group.syncs):
        stops = group.dependency_probability is not None and bool(
            group.dependency_probability[k].mean() >= LEVELS.mostly
        )
        last_bucket = sync.kind == SyncKind.GRADIENTS and runs[k] not in runs[k + 1 :]
        if k == len(runs) - 1 or (len(sync.members) == world and (stops or last_bucket)):
            cuts.append(k + 1)
    return list(zip([0, *cuts[:-1]], cuts, strict=True))


def _usual(work: Array) -> Array:
    """[R] ns by which a rank's work [cycles, R] differs from the mean of all usually, where that is no chance, as for stragglers."""
    beyond = work - work.mean(axis=1, keepdims=True)
    lasts = above_zero(beyond, LATENESS.false_alarms) | above_zero(-beyond, LATENESS.false_alarms)
    usual: Array = np.where(lasts, np.median(beyond, axis=0), 0.0)
    return usual


def _explained(graph: Graph, more: Array) -> float | None:
    """Part of the variance of ``more`` [cycles, R] that goes with larger inputs than the others' in the same step.

    0.0 where the inputs are even, None where they are not known.
    """
    steps = np.concatenate([group.steps for group in graph.groups])
    are_even = False
    for given in amounts_given(graph.steps, steps):
        known = ~np.isnan(given).any(axis=1)
        if known.sum() < LEVELS.fewest_cycles:
            continue
        relative = given[known] / np.maximum(given[known].mean(axis=1, keepdims=True), 1e-9) - 1.0
        if relative.std() >= LEVELS.uneven:
            correlation = np.corrcoef(relative.ravel(), more[known].ravel())[0, 1]
            return float(max(correlation, 0.0) ** 2)
        are_even = True
    return 0.0 if are_even else None
