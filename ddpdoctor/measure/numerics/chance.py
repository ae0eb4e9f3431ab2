"""Whose outliers they are: one rank's, or those of a machine that disturbs whom it happens to meet.

*Who.* If disturbances strike the R ranks at random, some F ranks get at least n of N of them with a probability of at
most C(R, F) * P(Binomial(N, F / R) >= n).

*When.* A rhythm (every 10 steps) is no chance either: of distances without one, 1 in p is a multiple of p. Both
probabilities count together, as their product.

*Where.* A disturbance by the machine (another process takes the CPU, a page is swapped in, a link stalls) meets a rank
where it happens to be, in proportion to the time that it spends there. If a kind of work takes the share q of a usual
step, and t of the T disturbances of the job struck it, that happens by chance with P(Binomial(T, q) >= t). Pauses that
all fall into 3 % of the step are made by the code there.

A rank is accused where who and when are unlikely (2 %). Where the place all but rules out the machine (0.1 %), and every single
outlier is the same rank's, 10 % will do: the code that pauses is found in any case, and the only mistake left is that it
might have met any rank. At 2 ranks that takes 5 pauses instead of 7, at 4 ranks 3 instead of 4; a job of 4 ranks whose code
pauses three times in all, on any rank, names one rank with a probability of 6 %, and one that pauses more often with less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb

import numpy as np
from numpy.typing import NDArray

from .arrays import Array

UNLIKELY = 0.02
RULED_OUT = 0.001
NOT_LIKELY = 0.1
MOSTLY = 0.5
ONE_SIDED = 1.5
"""Times their fair share of all sporadic excess of a kind that the accused ranks must carry, and half of it at
least: scatter that hits everybody accuses nobody."""
LEAST_PLACE = 0.01
"""Share of the step that every place counts for: work that is never there in a usual step can still be met."""
MOST_PLACE = 0.25
"""Of kinds of work that take more of the step, where disturbances fall says little: they are not spread that evenly."""
_UNDISTURBED = 0.25
"""Quantile of the cycles that stands for an undisturbed one, though disturbances strike in half of them."""


def one_sided(
    spike: NDArray[np.bool_], difference: Array, steps: NDArray[np.int64], place: float = 1.0
) -> NDArray[np.bool_]:
    """Spikes [cycles, R] of the few ranks that carry most of them; none where they hit everybody alike. ``place`` is the
    probability that a machine's disturbances fall into this kind of work as these do."""
    weight = np.where(spike, difference, 0.0).sum(axis=0)
    world, nobody = len(weight), np.zeros_like(spike)
    if not weight.sum():
        return nobody
    leaders = weight >= 0.5 * weight.max()
    few = int(leaders.sum())
    needed = max(MOSTLY, ONE_SIDED * few / world)
    if 2 * few > world or weight[leaders].sum() < needed * weight.sum():
        return nobody
    theirs, total = int(spike[:, leaders].sum()), int(spike.sum())
    all_of_one = few == 1 and theirs == total and place <= RULED_OUT
    likely = NOT_LIKELY if all_of_one else UNLIKELY
    leader = np.sort(steps[spike[:, int(weight.argmax())]])
    if by_chance(theirs, total, few, world) * rhythm_by_chance(leader) > likely:
        return nobody
    carried: NDArray[np.bool_] = spike & leaders
    return carried


def by_chance(theirs: int, total: int, few: int, world: int) -> float:
    """Bound on the probability that some ``few`` ranks get at least ``theirs`` of ``total`` disturbances that strike at
    random."""
    return min(1.0, comb(world, few) * tail(theirs, total, few / world))


def rhythm_by_chance(times: NDArray[np.int64]) -> float:
    """Bound on the probability that as many of the distances between the ``times`` are multiples of the most frequent one;
    1.0 where that is likely. Of distances that have no rhythm, 1 in p is a multiple of p."""
    gaps = np.diff(times)
    if len(gaps) < 2:
        return 1.0
    values, counts = np.unique(gaps, return_counts=True)
    period = int(values[counts.argmax()])
    # One distance is the period itself, whatever it is.
    found = tail(int((gaps % period == 0).sum()) - 1, len(gaps) - 1, 1.0 / period)
    return found if found <= NOT_LIKELY else 1.0


def scatter_of(deviations: Array) -> Array:
    """Standard deviation of a normal distribution with this median absolute deviation: 1.4826 times the median over the
    first axis of the ``deviations`` from the middle."""
    found: Array = 1.4826 * np.median(np.abs(deviations), axis=0)
    return found


def tail(hits: int, total: int, probability: float) -> float:
    """P(Binomial(total, probability) >= hits)."""
    return sum(
        comb(total, n) * probability**n * (1 - probability) ** (total - n) for n in range(hits, total + 1)
    )


def places(
    kinds: Mapping[str, Sequence[int]], work: Array, totals: Array, least_ns: float
) -> dict[str, float]:
    """Kind → probability that a machine's disturbances fall into it as often as those of the job do.

    ``kinds`` gives the columns of ``work`` and ``totals`` [cycles, R, C] ns: the work, and what is beyond the other ranks'.
    A disturbance is what lies ``least_ns`` beyond the rank's usual excess, whatever the scatter: the bound errs to the
    side of the machine.
    """
    usual = {
        kind: np.quantile(work[:, :, columns].sum(axis=2), _UNDISTURBED, axis=0)
        for kind, columns in kinds.items()
    }
    whole = max(float(sum(values.mean() for values in usual.values())), 1.0)
    struck = {}
    for kind, columns in kinds.items():
        beyond = totals[:, :, columns].sum(axis=2)
        struck[kind] = int((beyond - np.median(beyond, axis=0) > least_ns).sum())
    total = sum(struck.values())
    share = {kind: max(LEAST_PLACE, float(usual[kind].mean()) / whole) for kind in kinds}
    return {
        kind: 1.0 if share[kind] > MOST_PLACE else tail(struck[kind], total, share[kind]) for kind in kinds
    }
