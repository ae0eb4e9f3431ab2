"""Finds lateness without a straggler: a late rank that rotates, and random load imbalance.

**Rotation.** Rank *step mod R* writes the log, or each long batch is on another rank: the job waits in every step, but no rank's mean or
median shows it. A rank's excess in a cycle is called its turn if

- it is an outlier compared with the rank's own undisturbed cycles (its lowest quarter, because its turns may be more than half of all),
  and compared with the others in the same cycle;
- no rank is a straggler with this kind of work;
- it is not the noise of a busy machine: the turns rotate (step mod R determines the rank), or they occur in a place where random
  disturbances are improbable (:mod:`ddpdoctor.measure.numerics.significance`), or the rank had larger inputs than the others in those
  steps.

Ranks whose forward or backward takes long at random, with the same amount of work, cannot be distinguished from a machine whose cores
share a cache, a clock or a hypervisor: the wait for a CPU is recorded, such sharing is not. They are not reported. On devices,
kernel times show it: see :func:`levels`.

**Random load imbalance.** With sequences of varying length, or experts that get varying numbers of tokens, each rank has a different,
random share of work in each step. No rank is a straggler, and all wait between two synchronisations for

    max over ranks - mean over ranks

of the work there. On a device this is not the noise of a busy machine: times of kernels with equal work vary by one or two per cent, and
devices are rarely shared. Only differences that change from step to step count, not a rank's constant difference. They are reported if

- they are larger than those of kernels of equal work (:class:`_Tuning`), or the sizes of the inputs explain them;
- the ranks wait for them in half of the cycles, and in at least three.

The cost comes from a replay in which each rank has the mean work between two synchronisations, as in Lin et al., "Understanding
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

from .comparison import values_in_steps
from .lateness import LATENESS

_QUARTER, _TWENTIETH = 0.25, 0.05
"""Quantiles of a rank's undisturbed work. Their distance is its scatter: for a normal distribution, one standard deviation. Turns in up to
three of four cycles do not change them."""
_COLUMNS = [INDEX[component] for component in COMPUTATION]


class _Tuning(msgspec.Struct, frozen=True):
    """Thresholds for turns, for turns caused by the job, and for uneven work."""

    step_share: float = 0.05
    """Minimum length of a turn as a share of the median step: the share from which rules warn of a cost in each step."""
    fewest: int = 5
    """Minimum number of turns: a busy machine causes three to four outliers of any rank in a short run."""
    fewest_rounds: int = 3
    """Minimum number of rounds over all ranks in a rotation."""
    rotating_share: float = 0.9
    """Minimum part of the turns in which the late rank is the one that the step number determines."""
    more_work: float = 1.02
    """Multiple of the median rank's inputs from which a rank had more: smaller differences occur at an epoch's end."""
    spread: float = 0.08
    """Minimum standard deviation of the ranks' work between two synchronisations, relative to its mean. For equal work it was below 0.012
    in all recorded healthy windows; for random lengths 0.2 and more; different clocks and temperatures cause 0.03 to 0.05."""
    waited_share: float = 0.03
    """Share of the mean step from which the ranks wait for the slowest rank of a cycle."""
    fewest_cycles: int = 4
    """Minimum number of cycles that show a rank's normal work."""
    fewest_waited: int = 3
    """Minimum number of cycles in which ranks wait for the slowest: the fewest occurrences of a pattern."""
    mostly: float = 0.5
    """Minimum part of the turns in which the rank had larger inputs; of the cycles in which ranks wait for the slowest; and mean
    probability over the ranks, from which a collective blocks the computation."""
    explains: float = 0.5
    """Minimum part of the variance that the inputs explain: half, as elsewhere."""
    uneven: float = 0.02
    """Standard deviation of inputs, relative to their mean, from which they are uneven: smaller ones come from an epoch's end only."""


_TUNING = _Tuning()


def input_amounts(ranks: Sequence[RankSteps], steps: Ints) -> Iterator[Array]:
    """[cycles, R] samples, then elements of inputs, of each rank in these steps; NaN for unknown steps."""
    yield values_in_steps(ranks, [of_rank.samples for of_rank in ranks], steps)
    yield values_in_steps(ranks, [of_rank.elements for of_rank in ranks], steps)


def turns(work: Array, excess: Array, step_ns: float) -> Mask:
    """[cycles, R] whether a rank has its turn; all False if there are too few turns, or if all are on one rank.

    ``work`` [cycles, R] ns is each rank's work of one kind, ``excess`` its excess over the median of the others.
    """
    twentieth, quarter = np.quantile(work, (_TWENTIETH, _QUARTER), axis=0)
    least = np.maximum(LATENESS.outlier_sigmas * (quarter - twentieth), _TUNING.step_share * step_ns)
    where: Mask = (excess > least) & (work > quarter + least)
    if where.sum() < _TUNING.fewest or np.count_nonzero(where.any(axis=0)) == 1:
        return np.zeros_like(where)
    return where


def is_rotation(where: Mask, steps: Ints) -> bool:
    """Whether the step number modulo the number of ranks determines the late rank."""
    world = where.shape[1]
    if where.sum() < _TUNING.fewest_rounds * world:
        return False
    by_residue = np.array([where[steps % world == residue].sum(axis=0) for residue in range(world)])
    leaders = by_residue.argmax(axis=1)
    theirs, all_turns = by_residue.max(axis=1).sum(), by_residue.sum()
    return len(set(leaders.tolist())) == world and bool(theirs >= _TUNING.rotating_share * all_turns)


def is_caused_by_job(where: Mask, steps: Ints, ranks: Sequence[RankSteps], place_chance: float) -> bool:
    """Whether the job causes the turns, not noise of the machine; see the module's docstring."""
    return (
        is_rotation(where, steps)
        or place_chance <= CHANCE.ruled_out
        or any(_had_larger_inputs(where, given) for given in input_amounts(ranks, steps))
    )


def _had_larger_inputs(where: Mask, given: Array) -> bool:
    """Whether ranks had larger inputs than the median rank in most of their turns, and significantly more often than otherwise.

    ``given`` [cycles, R]: samples, or elements.
    """
    # The lower median: of two ranks the smaller value.
    usual = np.sort(given, axis=1)[:, (given.shape[1] - 1) // 2, None]
    more = given > _TUNING.more_work * usual
    hits, all_turns = int(more[where].sum()), int(where.sum())
    elsewhere = float(more[~where].mean()) if (~where).any() else 0.0
    chance = binomial_tail(hits, all_turns, min(1.0, max(CHANCE.least_place, elsewhere)))
    return hits >= _TUNING.mostly * all_turns and chance <= CHANCE.ruled_out


class Levels(msgspec.Struct, frozen=True):
    """Work that levelling removes from ranks with more than the mean, and adds (negative) to those with less."""

    removed: list[Array]
    """[N, K, R, C] ns, by group of the graph."""
    explained: float | None
    """Part of the variance over cycles and ranks that the sizes of the inputs explain; None if they are unknown."""


def levels(graph: Graph) -> Levels | None:
    """Level the work of all ranks between their synchronisations.

    None if it is even, if the same ranks always have more, or if collectives do not run on a device.
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
    # Constant difference of each rank, if it is significant, as for stragglers.
    usual = np.where(lasts, np.median(beyond, axis=0), 0.0)
    levelled = [_level_group(group, own, usual) for group, own in zip(graph.groups, work, strict=True)]
    waited = np.concatenate([of_group.longest for of_group in levelled])
    late = waited > _TUNING.waited_share * graph.mean_cycle_ns
    if late.sum() < max(_TUNING.fewest_waited, _TUNING.mostly * len(late)):
        return None
    removed = [of_group.removed for of_group in levelled]
    explained = _explained_by_inputs(
        graph, np.concatenate([of_group.sum(axis=(1, 3)) for of_group in removed])
    )
    squares, of_mean = (sum(column) for column in zip(*(each.squares for each in levelled), strict=True))
    if np.sqrt(squares / max(of_mean, 1.0)) < _TUNING.spread and (explained or 0.0) < _TUNING.explains:
        return None
    return Levels(removed, explained)


class _Levelled(msgspec.Struct, frozen=True):
    """The work of a group's cycles, levelled between any two synchronisations of all ranks."""

    removed: Array
    """[N, K, R, C] ns, as in :class:`Levels`."""
    longest: Array
    """[N] ns by which the ranks with most work exceed the mean, summed over the levelled parts."""
    squares: tuple[float, float]
    """ns², sums over cycles and ranks of the squares of the removed work, and of the mean; their ratio is a squared relative deviation."""


def _level_group(group: CycleGroup, work: Array, usual: Array) -> _Levelled:
    """``work`` [N, K, R, components of computation]; ``usual`` [R] ns is a rank's constant difference from the mean."""
    own = work.sum(axis=3)
    whole = np.maximum(own.sum(axis=1, keepdims=True), 1.0)
    more, longest, squares, of_mean = np.zeros(own.shape), np.zeros(len(own)), 0.0, 0.0
    for segments in _ranges_between_syncs(group):
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


def _ranges_between_syncs(group: CycleGroup) -> list[slice]:
    """Ranges of segments between two synchronisations of all ranks.

    Buckets that are reduced during the backward pass do not block it, and synchronisations of some ranks do not level the others.
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


def _explained_by_inputs(graph: Graph, more: Array) -> float | None:
    """Part of the variance of ``more`` [cycles, R] that correlates with the size of the inputs relative to the other ranks'.

    0.0 if the inputs are even, None if they are unknown.
    """
    are_even = False
    for given in input_amounts(graph.steps, graph.numbers):
        known = ~np.isnan(given).any(axis=1)
        if known.sum() < _TUNING.fewest_cycles:
            continue
        relative = given[known] / np.maximum(given[known].mean(axis=1, keepdims=True), 1e-9) - 1.0
        if relative.std() >= _TUNING.uneven:
            correlation = np.corrcoef(relative.ravel(), more[known].ravel())[0, 1]
            return float(max(correlation, 0.0) ** 2)
        are_even = True
    return 0.0 if are_even else None
