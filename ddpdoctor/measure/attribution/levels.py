"""All ranks wait, now for this rank, now for that one: ranks that are late in turn, and random load imbalance. No rank is a straggler.

**Late in turn.** Rank *step mod R* writes the log, or each batch is long on another rank: the job waits in every step, yet a rank's own
mean and median say nothing. What a rank does beyond the others in single cycles is taken for such a turn where

- it stands out of the rank's own undisturbed cycles (those of its lowest quarter: its turns may be more than half of all),
  and of the others in the same cycle;
- no rank is a straggler with this kind of work by itself;
- it is not the noise of a busy machine: the turns rotate (step mod R tells whose it is), or they fall into a place where a
  machine's disturbances hardly would (:mod:`ddpdoctor.measure.numerics.significance`), or the rank was given more to compute than
  the others in those steps.

Ranks whose forward or backward takes long at random, with the same amount of work, cannot be distinguished from a machine whose cores
share a cache, a clock or a hypervisor: the wait for a CPU is recorded, such sharing is not. They are not reported. On devices,
kernel times show it: see :func:`levels`.

**Random load imbalance.** Sequences of any length, or experts that get any number of tokens: each rank has a different, random share of
work in each step. No rank stands out, and all wait between two synchronisations for

    max over ranks - mean over ranks

of the work there. On a device this is not the noise of a busy machine: kernels of equal work repeat to one or two per cent, and
devices are rarely shared. Reported is what changes from step to step. A rank's usual difference in one direction is its own
and not part of it. It counts where

- the differences are larger than kernels of equal work show (:class:`_Tuning`), or the sizes of the inputs explain them;
- the ranks wait for it in half of the cycles, and in three at least.

A replay in which each rank has the mean of all between two synchronisations gives the price, as in Lin et al., "Understanding
Stragglers in Large Model Training Using What-if Analysis" (OSDI '25), where uneven sequences are the most frequent cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from ddpdoctor.measure.graph import CycleGroup, Graph, RankSteps
from ddpdoctor.measure.numerics import CHANCE, Array, Ints, Mask, above_zero, binomial_tail
from ddpdoctor.measure.taxonomy import COMPUTATION, INDEX, SyncKind

from .comparison import in_steps
from .lateness import LATENESS

_QUARTER, _TWENTIETH = 0.25, 0.05
"""The quantiles that tell a rank's undisturbed work, and by their distance how much that scatters: it is a standard deviation of a normal
distribution. A turn in three cycles of four reaches neither."""
_COLUMNS = [INDEX[component] for component in COMPUTATION]


class _Tuning(msgspec.Struct, frozen=True):
    """What is a turn, what makes turns the job's own, and from where on uneven work counts."""

    step_share: float = 0.05
    """Share of the median step that a turn takes at least: what rules warn of when it happens in each step."""
    fewest: int = 5
    """Turns below which nothing is said: three to four outliers of any rank are what a busy machine makes in a short run."""
    fewest_rounds: int = 3
    """Rounds over all ranks from which on a rotation is believed."""
    rotating_share: float = 0.9
    """Part of the turns that must be at the rank whose residue of the step number it is."""
    more_work: float = 1.02
    """Times the median rank's amount of work from which on a rank was given more: by less, sizes differ at an epoch's end."""
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
    """Part of the turns in which a rank must have been given more; of the cycles in which the slowest rank must be waited for; and of a
    collective's ranks that must wait for it for it to stop all."""
    explains: float = 0.5
    """Part of the variance that the inputs must explain: half, as elsewhere."""
    uneven: float = 0.02
    """Standard deviation of inputs, relative to their mean, from which they differ: below, they do at an epoch's end only."""


_TUNING = _Tuning()


def amounts_given(ranks: Sequence[RankSteps], steps: Ints) -> Iterator[Array]:
    """[cycles, R] samples, then elements of inputs, that each rank was given in these steps; NaN where unknown.

    Left out is what is not known of every rank.
    """
    samples = [of_rank.samples for of_rank in ranks]
    elements = [of_rank.elements for of_rank in ranks if of_rank.elements is not None]
    for amounts in (samples, elements):
        if len(amounts) == len(ranks):
            yield in_steps(ranks, amounts, steps)


def turns(work: Array, more: Array, step_ns: float) -> Mask:
    """[cycles, R] where a rank has its turn; none where there are too few, or of one rank alone.

    ``work`` [cycles, R] ns is each rank's work of one kind, ``more`` the part beyond the median of the others.
    """
    twentieth, quarter = np.quantile(work, (_TWENTIETH, _QUARTER), axis=0)
    least = np.maximum(LATENESS.spike_sigmas * (quarter - twentieth), _TUNING.step_share * step_ns)
    where: Mask = (more > least) & (work > quarter + least)
    if where.sum() < _TUNING.fewest or np.count_nonzero(where.any(axis=0)) == 1:
        return np.zeros_like(where)
    return where


def rotate(where: Mask, steps: Ints) -> bool:
    """Whether the step number, modulo the number of ranks, tells whose turn it is."""
    world = where.shape[1]
    if where.sum() < _TUNING.fewest_rounds * world:
        return False
    by_residue = np.array([where[steps % world == residue].sum(axis=0) for residue in range(world)])
    leaders = by_residue.argmax(axis=1)
    theirs, all_turns = by_residue.max(axis=1).sum(), by_residue.sum()
    return len(set(leaders.tolist())) == world and bool(theirs >= _TUNING.rotating_share * all_turns)


def made_by_the_job(where: Mask, steps: Ints, ranks: Sequence[RankSteps], place_chance: float) -> bool:
    """Whether the turns are the job's own, and no noise of the machine; see the module's text."""
    return (
        rotate(where, steps)
        or place_chance <= CHANCE.ruled_out
        or any(_had_more_to_do(where, given) for given in amounts_given(ranks, steps))
    )


def _had_more_to_do(where: Mask, given: Array) -> bool:
    """Whether the ranks were given more than the median of all in most of their turns, and more often than else.

    ``given`` [cycles, R]: samples, or elements.
    """
    # Of two ranks the lesser is the measure.
    usual = np.sort(given, axis=1)[:, (given.shape[1] - 1) // 2, None]
    more = given > _TUNING.more_work * usual
    hits, all_turns = int(more[where].sum()), int(where.sum())
    elsewhere = float(more[~where].mean()) if (~where).any() else 0.0
    chance = binomial_tail(hits, all_turns, min(1.0, max(CHANCE.least_place, elsewhere)))
    return hits >= _TUNING.mostly * all_turns and chance <= CHANCE.ruled_out


class Levels(msgspec.Struct, frozen=True):
    """What levelling takes from the ranks that have more, and gives (negative) to those that have less."""

    removed: list[Array]
    """[N, K, R, C] ns, by group of the graph."""
    explained: float | None
    """Part of the variance over cycles and ranks that the sizes of the inputs explain; None where they are not known."""


def levels(graph: Graph) -> Levels | None:
    """Level the work of all ranks between their synchronisations.

    None where it is even, where the same ranks have more of it each time, or where collectives do not run on a device.
    """
    if (
        len(graph.ranks) < 2
        or graph.cycles < _TUNING.fewest_cycles
        or not all(group.on_device for group in graph.groups)
    ):
        return None
    work = [np.clip(group.work_with_overlap[..., _COLUMNS], 0, None) for group in graph.groups]
    whole = np.concatenate([of_group.sum(axis=(1, 3)) for of_group in work])
    beyond = whole - whole.mean(axis=1, keepdims=True)
    lasts = above_zero(beyond, LATENESS.false_alarms) | above_zero(-beyond, LATENESS.false_alarms)
    # By how much a rank's work differs usually, where that is no chance, as for stragglers.
    usual = np.where(lasts, np.median(beyond, axis=0), 0.0)
    levelled = [_levelled(group, own, usual) for group, own in zip(graph.groups, work, strict=True)]
    waited = np.concatenate([of_group.longest for of_group in levelled])
    late = waited > _TUNING.waited_share * graph.mean_cycle_ns
    if late.sum() < max(_TUNING.fewest_waited, _TUNING.mostly * len(late)):
        return None
    removed = [of_group.removed for of_group in levelled]
    explained = _explained(graph, np.concatenate([of_group.sum(axis=(1, 3)) for of_group in removed]))
    squares, of_mean = (sum(column) for column in zip(*(each.squares for each in levelled), strict=True))
    if np.sqrt(squares / max(of_mean, 1.0)) < _TUNING.spread and (explained or 0.0) < _TUNING.explains:
        return None
    return Levels(removed, explained)


class _Levelled(msgspec.Struct, frozen=True):
    """The work of a group's cycles, levelled between any two synchronisations of all ranks."""

    removed: Array
    """[N, K, R, C] ns, as in :class:`Levels`."""
    longest: Array
    """[N] ns that the ranks with most have beyond the mean of all."""
    squares: tuple[float, float]
    """ns², over cycles and ranks: of what is removed, and of the mean, with the same weight."""


def _levelled(group: CycleGroup, work: Array, usual: Array) -> _Levelled:
    """``work`` [N, K, R, components of computation]; ``usual`` [R] is what a rank has beyond the others in all cycles (ns)."""
    own = work.sum(axis=3)
    whole = np.maximum(own.sum(axis=1, keepdims=True), 1.0)
    more, longest, squares, of_mean = np.zeros(own.shape), np.zeros(len(own)), 0.0, 0.0
    for segments in _between(group):
        together = own[:, segments].sum(axis=1, keepdims=True)
        mean = together.mean(axis=2, keepdims=True)
        beyond = together - mean - usual * together / whole
        more[:, segments] = own[:, segments] * beyond / np.maximum(together, 1.0)
        longest += beyond.max(axis=(1, 2))
        squares += float((beyond**2).sum())
        of_mean += float((mean**2).sum()) * (own.shape[2] - 1)
    removed = np.zeros_like(group.work)
    removed[..., _COLUMNS] = more[..., None] * work / np.maximum(own, 1.0)[..., None]
    return _Levelled(removed, longest, (squares, of_mean))


def _between(group: CycleGroup) -> list[slice]:
    """The segments of the work between two synchronisations of all ranks.

    Buckets that are reduced beside the backward pass do not stop it, and synchronisations of some ranks do not level the others.
    """
    world = group.arrival.shape[2]
    runs = [(sync.kind, sync.micro, sync.group) for sync in group.syncs]
    cuts = [0]
    for k, sync in enumerate(group.syncs):
        stops = group.dependency_probability[k].mean() >= _TUNING.mostly
        last_bucket = sync.kind == SyncKind.GRADIENTS and runs[k] not in runs[k + 1 :]
        if k == len(runs) - 1 or (len(sync.members) == world and (stops or last_bucket)):
            cuts.append(k + 1)
    return [slice(first, end) for first, end in pairwise(cuts)]


def _explained(graph: Graph, more: Array) -> float | None:
    """Part of the variance of ``more`` [cycles, R] that goes with larger inputs than the others' in the same step.

    0.0 where the inputs are even, None where they are not known.
    """
    are_even = False
    for given in amounts_given(graph.steps, graph.numbers):
        known = ~np.isnan(given).any(axis=1)
        if known.sum() < _TUNING.fewest_cycles:
            continue
        relative = given[known] / np.maximum(given[known].mean(axis=1, keepdims=True), 1e-9) - 1.0
        if relative.std() >= _TUNING.uneven:
            correlation = np.corrcoef(relative.ravel(), more[known].ravel())[0, 1]
            return float(max(correlation, 0.0) ** 2)
        are_even = True
    return 0.0 if are_even else None
