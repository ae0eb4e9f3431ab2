"""Work that differs between the ranks in each step, on whichever rank: what it costs that all wait for the slowest.

Sequences of any length, or experts that get any number of tokens: each rank has its own share of work, drawn anew in each
step. Nobody stands out, and all wait between two meetings for

    max over ranks - mean over ranks

of the work there. On a device that is no noise of a busy machine: kernels of equal work repeat to one or two per cent, and a
device is shared with nobody as a rule. Told is what changes from step to step; by what a rank's work differs usually, in the
same direction, is its own (:mod:`.blame`), and stays. It counts where

- the differences are larger than kernels of equal work show (``SPREAD``), or the sizes of the inputs explain them;
- the ranks wait for it in half of the cycles, and in three at least.

A replay in which each rank has the mean of all between two meetings gives the price, as in Lin et al., "Understanding
Stragglers in Large Model Training Using What-if Analysis" (OSDI '25), where uneven sequences are the most frequent cause.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.graph import CycleGroup, Graph
from ddpdoctor.measure.numerics import Array, scatter_of
from ddpdoctor.measure.taxonomy import COMPUTATION, INDEX, SyncKind

SPREAD = 0.08
"""Standard deviation of the ranks' work between two meetings, relative to its mean. Of equal work it was below 0.012 in all
healthy windows at hand, and 0.2 and more where lengths were drawn at random; clocks and heat make 0.03 to 0.05."""
WAITED_SHARE = 0.03
"""Share of the mean step for which the slowest rank of a cycle is waited for."""
FEWEST_CYCLES = 4
_FEWEST_WAITED = 3
_MOSTLY = 0.5
EXPLAINS = 0.5
"""Part of the variance that the inputs must explain: half, as elsewhere."""
_UNEVEN = 0.02
"""Standard deviation of inputs, relative to their mean, from which they differ."""
_SIGMAS = 4.0
"""Standard errors of the median from which a rank's usual difference is its own."""
_COLUMNS = [INDEX[component] for component in COMPUTATION]


@dataclass(frozen=True)
class Levels:
    """What levelling takes from the ranks that have more, and gives (negative) to those that have less."""

    removed: list[Array]
    """[N, K, R, C] ns, by group of the graph."""
    explained: float | None
    """Part of the variance over cycles and ranks that the sizes of the inputs explain; None where they are not known."""


def levels(graph: Graph) -> Levels | None:
    """None where the work is even, where the same ranks have more of it each time, or where collectives do not run on a
    device."""
    world = len(graph.ranks)
    if world < 2 or graph.cycles < FEWEST_CYCLES or not all(group.on_device for group in graph.groups):
        return None
    work = [np.clip(group.work_since[..., _COLUMNS], 0, None) for group in graph.groups]
    pieces = [_pieces(group) for group in graph.groups]
    usual = _usual(np.concatenate([of.sum(axis=(1, 3)) for of in work]))
    removed, spread, waited = [], [], []
    for of, cuts in zip(work, pieces, strict=True):
        own = of.sum(axis=3)
        whole = np.maximum(own.sum(axis=1, keepdims=True), 1.0)
        more = np.zeros_like(own)
        longest = np.zeros(len(own))
        for low, high in cuts:
            part = own[:, low:high]
            total = part.sum(axis=1, keepdims=True)
            mean = total.mean(axis=2, keepdims=True)
            beyond = total - mean - usual * total / whole
            more[:, low:high] = part * beyond / np.maximum(total, 1.0)
            longest += beyond.max(axis=(1, 2))
            spread.append(((beyond**2).sum(), (mean**2).sum() * (world - 1)))
        removed.append(more[..., None] * of / np.maximum(own, 1.0)[..., None])
        waited.append(longest)
    late = np.concatenate(waited) > WAITED_SHARE * graph.mean_cycle_ns
    if late.sum() < max(_FEWEST_WAITED, _MOSTLY * len(late)):
        return None
    explained = _explained(graph, np.concatenate([of.sum(axis=(1, 3)) for of in removed]))
    relative = float(np.sqrt(sum(of for of, _ in spread) / max(sum(of for _, of in spread), 1.0)))
    if relative < SPREAD and (explained is None or explained < EXPLAINS):
        return None
    return Levels(
        [_in_all_components(group, of) for group, of in zip(graph.groups, removed, strict=True)], explained
    )


def _in_all_components(group: CycleGroup, removed: Array) -> Array:
    whole = np.zeros_like(group.work)
    whole[..., _COLUMNS] = removed
    return whole


def _pieces(group: CycleGroup) -> list[tuple[int, int]]:
    """First and one past the last segment of the work between two meetings of all ranks: buckets that are reduced beside the
    backward pass do not stop it, and meetings of some ranks do not level the others."""
    world = group.arrival.shape[2]
    runs = [(sync.kind, sync.micro, sync.group) for sync in group.syncs]
    cuts = []
    for k, sync in enumerate(group.syncs):
        stops = group.dependent is not None and bool(group.dependent[k].mean() >= _MOSTLY)
        last_bucket = sync.kind == SyncKind.GRADIENTS and runs[k] not in runs[k + 1 :]
        if k == len(runs) - 1 or (len(sync.members) == world and (stops or last_bucket)):
            cuts.append(k + 1)
    return list(zip([0, *cuts[:-1]], cuts, strict=True))


def _usual(work: Array) -> Array:
    """[R] ns by which a rank's work [cycles, R] differs from the mean of all usually, where that stands out of its scatter."""
    beyond = work - work.mean(axis=1, keepdims=True)
    middle: Array = np.median(beyond, axis=0)
    error = 1.2533 * scatter_of(beyond - middle) / np.sqrt(len(work))
    kept: Array = np.where(np.abs(middle) > _SIGMAS * error, middle, 0.0)
    return kept


def _explained(graph: Graph, more: Array) -> float | None:
    """Part of the variance of ``more`` [cycles, R] that goes with larger inputs than the others' in the same step. Nothing
    where the inputs are even."""
    steps = np.concatenate([group.steps for group in graph.groups])
    known = None
    for amounts in ([of.samples for of in graph.steps], [of.elements for of in graph.steps]):
        of_ranks = [
            _in_steps(of.steps, amount, steps)
            for of, amount in zip(graph.steps, amounts, strict=True)
            if amount is not None
        ]
        if len(of_ranks) < len(graph.ranks):
            continue
        given = np.stack(of_ranks, axis=1)
        seen = ~np.isnan(given).any(axis=1)
        if seen.sum() < FEWEST_CYCLES:
            continue
        given = given[seen] / np.maximum(given[seen].mean(axis=1, keepdims=True), 1e-9) - 1.0
        if given.std() < _UNEVEN:
            known = 0.0
            continue
        found = np.corrcoef(given.ravel(), more[seen].ravel())[0, 1]
        return float(max(found, 0.0) ** 2)
    return known


def _in_steps(numbers: NDArray[np.int64], values: Array, steps: NDArray[np.int64]) -> Array:
    """[cycles] the values of these steps; NaN where there is none."""
    known = dict(zip(numbers.tolist(), values.tolist(), strict=True))
    return np.array([known.get(int(step), np.nan) for step in steps])
