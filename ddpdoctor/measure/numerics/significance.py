"""Whether outliers belong to a few ranks, or to a machine that delays ranks at random; and when something happens: always, in a
stretch of steps, every k steps, or now and then.

*Who.* If disturbances strike the R ranks at random, some F ranks get at least k of n of them with a probability of at
most C(R, F) * P(Binomial(n, F / R) >= k). They are not alike: a rank that pauses for 57 ms in every tenth step is not excused by a hundred
pauses of 3 ms that hit all ranks. So each counts by its weight w, the square of its size, and n is their effective number,
(sum of w)^2 / sum of w^2 (Kish, "Survey Sampling", 1965), of which k is the part of the few. That looks at sizes only, so chance has the
same odds among them.

*When.* A period (every 10 steps) is no chance either: of distances without one, 1 in p is a multiple of p. Both
probabilities count together, as their product, which is smaller than the probability of both by chance: simulated with 2 to 16
ranks, the limit of 2 % below lets 0 to 4 % through.

*Where.* A disturbance by the machine (another process takes the CPU, a page is swapped in, a link stalls) meets a rank
where it happens to be, in proportion to the time that it spends there. If a kind of work takes the share q of a usual
step, and t of the T disturbances of the job struck it, that happens by chance with P(Binomial(T, q) >= t). Pauses that
all fall into 3 % of the step are made by the code there.

Outliers are a rank's own where who and when are unlikely (2 %). Where the place all but rules out the machine (0.1 %), and
every single outlier is the same rank's, 10 % will do: the code that pauses is found in any case, and the only mistake left is
that it might have met any rank. At 2 ranks that takes 5 pauses instead of 7, at 4 ranks 3 instead of 4; a job of 4 ranks whose
code pauses three times in all, on any rank, names one rank with a probability of 6 %, and one that pauses more often with less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, lgamma, log, log1p
from typing import Any, TypeVar

import msgspec
import numpy as np

from .stats import Array, Ints, Mask, scatter_of, undisturbed

_Kind = TypeVar("_Kind", bound=str)


class ChanceTuning(msgspec.Struct, frozen=True):
    """From where on something is no chance."""

    unlikely: float = 0.02
    """Probability below which chance is not believed: the usual one in fifty, as several kinds of work are looked at."""
    ruled_out: float = 0.001
    """Probability below which random delays by the machine are ruled out as the cause."""
    rather_unlikely: float = 0.1
    """Probability that will do where the machine is ruled out and all outliers are of one rank; see the module's text."""
    mostly: float = 0.5
    """Part of the whole that the few must carry at least: more than all others together."""
    fair_shares: float = 1.5
    """Times their fair share of all outliers that the few must carry: scatter that hits all ranks belongs to none."""
    comparable: float = 0.25
    """Part of the first rank's weight that makes another one of the few, and of the effective weight that makes an outlier a large one:
    pauses of one kind differ by half in size."""
    least_place: float = 0.01
    """Share of the step that every place counts for: work that is never there in a usual step can still be met."""
    most_place: float = 0.25
    """Of kinds of work that take more of the step, where disturbances fall says little: they are not spread that evenly."""
    blocks: int = 5
    """Of neighbouring cycles, in which what drifts evens out. More would find less of a drift, and miss little less of what lasts."""
    block_cycles: int = 8
    """Cycles of a block in long recordings: disturbances of a real machine last for about as long."""
    far: float = 6.0
    """Robust standard deviations from which on a block is far outside of the others."""
    own_weighs: float = 16.0
    """Cycles that a column's own scatter must be known from to weigh as much as that of all: of few, some column's is large or small
    by chance."""
    many_ranks: int = 8
    """Ranks from which on the others' means tell how much a rank's may differ: below, they are too few to tell one apart by."""
    differ: float = 0.1
    """Probability of such a difference between many ranks' means below which their scatter over the cycles is not believed to be all."""


CHANCE = ChanceTuning()


def carried_by_few(outliers: Mask, difference: Array, steps: Ints, place_chance: float = 1.0) -> Mask:
    """The outliers [cycles, R] of the few ranks that carry most of them; none where they hit all ranks alike.

    ``difference`` [cycles, R] says how large each is, ``place_chance`` how probable it is that a machine's disturbances fall
    into this kind of work as these do.
    """
    lost_ns = np.where(outliers, difference, 0.0)
    weight = (lost_ns / max(lost_ns.max(), 1.0)) ** 2
    if not weight.any():
        return np.zeros_like(outliers)
    effective = float((weight**2).sum() / weight.sum())
    large: Mask = weight >= CHANCE.comparable * effective
    leaders, chance = _leaders(weight.sum(axis=0), float(weight.sum()) / effective)
    chance *= chance_of_period(np.sort(steps[large[:, weight.sum(axis=0).argmax()]]))
    all_of_one = leaders.sum() == 1 and place_chance <= CHANCE.ruled_out and not large[:, ~leaders].any()
    if chance > (CHANCE.rather_unlikely if all_of_one else CHANCE.unlikely):
        return np.zeros_like(outliers)
    whole = lost_ns[:, leaders].sum() >= CHANCE.mostly * lost_ns.sum()
    carried: Mask = (outliers if whole else large) & leaders
    return carried


def _leaders(weight: Array, total: float) -> tuple[Mask, float]:
    """The few ranks [R], half of all at most, that chance would least make carry as much of the ``weight`` [R] of ``total`` disturbances
    as they do; and the probability that it does. None and 1.0 where no few carry most of it."""
    world = len(weight)
    order = np.argsort(-weight, kind="stable")
    comparable = int((weight >= CHANCE.comparable * weight.max()).sum())
    share = np.cumsum(weight[order]) / weight.sum()
    chances = {
        few: chance_of_ranks(total * float(share[few - 1]), total, few, world)
        for few in range(1, min(comparable, world // 2) + 1)
        if share[few - 1] >= max(CHANCE.mostly, CHANCE.fair_shares * few / world)
    }
    few = min(chances, key=chances.__getitem__, default=0)
    return np.isin(np.arange(world), order[:few]), chances.get(few, 1.0)


def chance_of_ranks(theirs: float, total: float, few: int, world: int) -> float:
    """Bound on the probability that some ``few`` ranks get at least ``theirs`` of ``total`` disturbances that strike at
    random."""
    tail = binomial_tail(theirs, total, few / world)
    ways = lgamma(world + 1) - lgamma(few + 1) - lgamma(world - few + 1)
    return exp(min(0.0, ways + log(tail))) if tail else 0.0


def chance_of_period(times: Ints) -> float:
    """Bound on the probability that as many of the distances between the ``times`` are multiples of the most frequent one.

    1.0 where that is likely. Of distances that have no period, 1 in p is a multiple of p.
    """
    gaps = np.diff(times)
    if len(gaps) < 2:
        return 1.0
    values, counts = np.unique(gaps, return_counts=True)
    period = int(values[counts.argmax()])
    # One distance is the period itself, whatever it is.
    chance = binomial_tail(int((gaps % period == 0).sum()) - 1, len(gaps) - 1, 1.0 / period)
    return chance if chance <= CHANCE.rather_unlikely else 1.0


def shares_of_step(columns_of: Mapping[_Kind, Sequence[int]], work: Array) -> dict[_Kind, float]:
    """Kind of work → the part of a usual step that it takes, one per cent at least.

    ``columns_of`` gives each kind's columns in ``work`` [cycles, R, C] ns.
    """
    usual_ns = {
        kind: float(undisturbed(work[:, :, columns].sum(axis=2)).mean())
        for kind, columns in columns_of.items()
    }
    step_ns = max(sum(usual_ns.values()), 1.0)
    return {kind: max(CHANCE.least_place, ns / step_ns) for kind, ns in usual_ns.items()}


def chance_of_places(
    columns_of: Mapping[_Kind, Sequence[int]], shares: Mapping[_Kind, float], beyond: Array, least_ns: float
) -> dict[_Kind, float]:
    """Kind of work → probability that a machine's disturbances fall into it as often as those of the job do.

    ``columns_of`` gives each kind's columns in ``beyond`` [cycles, R, C] ns, which is what lies beyond the other ranks' work,
    and ``shares`` its part of the step. A disturbance is what lies ``least_ns`` beyond the rank's usual excess, whatever the
    scatter: the bound errs to the side of the machine.
    """
    of_kinds = {kind: beyond[:, :, columns].sum(axis=2) for kind, columns in columns_of.items()}
    struck = {
        kind: int((together - np.median(together, axis=0) > least_ns).sum())
        for kind, together in of_kinds.items()
    }
    total = sum(struck.values())
    return {
        kind: 1.0 if share > CHANCE.most_place else binomial_tail(struck[kind], total, share)
        for kind, share in shares.items()
    }


def above_others(values: Array, allowed: float, work: Array) -> Mask:
    """[R] whether a rank's excess over the others, ``values`` [cycles, R], is above zero by more than chance, as :func:`above_zero`
    says. ``work`` [cycles, R] is what is compared.

    What drifts more slowly than blocks are long does so on many ranks: where the means of these differ by more than their scatter
    explains, a rank must stand out of the other ranks' means, too.
    """
    above = above_zero(values, allowed, work)
    if values.shape[1] >= CHANCE.many_ranks and above.any() and _differ(values, above):
        above &= _stand_apart(_blocks(values).mean(axis=0), allowed / values.shape[1])
    return above


def above_zero(values: Array, allowed: float, work: Array | None = None) -> Mask:
    """[R] whether a column of ``values`` [cycles, R] has a mean above zero by more than chance, which does so with any column of R
    alike with probability ``allowed`` at most. None of a single cycle.

    By Student's test of the means of blocks of neighbouring cycles, as these resemble each other. The scatter is that of all
    columns, or more where a column's own is larger. The two columns of two ranks are the same with another sign: of few
    blocks, the ``work`` [cycles, 2] of which they are the difference says more of the scatter, where that is each rank's own.
    """
    world = values.shape[1]
    if len(values) < 2:
        return np.zeros(world, bool)
    above = _exceed(values, values, max(world - 1, 1), allowed)
    if work is None or world > 2 or len(_blocks(values)) > CHANCE.blocks:
        return above
    return above | _exceed(values, np.sqrt(2.0) * work, 2, allowed)


def _blocks(values: Array) -> Array:
    """[blocks, R] means of neighbouring cycles of [cycles, R]: five blocks, or in long recordings more of eight cycles each. Of
    these those far outside count no more than at the edge of the others: what began during the recording lasts, too."""
    count = max(min(len(values), CHANCE.blocks), len(values) // CHANCE.block_cycles)
    means = np.stack([part.mean(axis=0) for part in np.array_split(values, count)])
    if count <= CHANCE.blocks:
        return means
    middle = np.median(means, axis=0)
    scatter = scatter_of(means - middle)
    reach = CHANCE.far * np.maximum(scatter, np.median(scatter))
    blocks: Array = np.clip(means, middle - reach, middle + reach)
    return blocks


def _error_of_mean(values: Array, scattering: Array, independent: int) -> tuple[Array, int]:
    """[R] standard error of the mean of ``values`` [cycles, R], which scatter as the columns of ``scattering`` [cycles, R] do together, or
    more where a column's own scatter is larger; and its degrees of freedom, of so many ``independent`` columns."""
    blocks = _blocks(scattering)
    of_all, own = float(scattering.var(axis=0, ddof=1).mean()), values.var(axis=0, ddof=1)
    freedom = len(values) - 1
    larger = (own / of_all if of_all else np.ones(len(own))) - 1.0
    widened = 1.0 + np.clip(larger, 0.0, None) * freedom / (CHANCE.own_weighs + freedom)
    error: Array = np.sqrt(blocks.var(axis=0, ddof=1).mean() / len(blocks) * widened)
    return error, (len(blocks) - 1) * independent


def _exceed(values: Array, scattering: Array, independent: int, allowed: float) -> Mask:
    """[R] means of ``values`` [cycles, R] that are above zero by chance with no more than this probability, divided among the columns."""
    means = _blocks(values).mean(axis=0)
    error, freedom = _error_of_mean(values, scattering, independent)
    each = allowed / len(means)
    both = zip(means.tolist(), error.tolist(), strict=True)
    return np.array([student_tail(mean, of_mean, freedom) <= each for mean, of_mean in both])


def _stand_apart(means: Array, allowed: float) -> Mask:
    """[R] the highest means, of half of the ranks at most, the lowest of which is above those below by more than they differ (Rosner's
    test of several outliers, 1983)."""
    order = np.argsort(-means, kind="stable")
    apart = np.zeros(len(means), bool)
    for few in range(1, len(means) // 2 + 1):
        others = means[order[few:]]
        beyond = float(means[order[few - 1]] - others.mean())
        error = float(others.std(ddof=1)) * np.sqrt(1.0 + 1.0 / len(others))
        if student_tail(beyond, error, len(others) - 1) <= allowed:
            apart[order[:few]] = True
    return apart


def _differ(values: Array, late: Mask) -> bool:
    """Whether the means of ``values`` [cycles, R], but for the highest of the ``late`` ones, half of all at most, differ by more than
    their scatter explains: the tail of Fisher's distribution."""
    world = values.shape[1]
    error, freedom = _error_of_mean(values, values, world - 1)
    means = np.sort(_blocks(values).mean(axis=0))[: world - min(int(late.sum()), world // 2)]
    seen, explained = float(means.var(ddof=1)) * (len(means) - 1), float((error**2).mean()) * freedom
    if not seen:
        return False
    return (
        _incomplete_beta(freedom / 2, (len(means) - 1) / 2, explained / (explained + seen)) <= CHANCE.differ
    )


def student_tail(mean: float, error: float, freedom: float) -> float:
    """Probability that Student's distribution gives a mean as high by chance, if its standard ``error`` is known with so many
    degrees of ``freedom``."""
    if mean <= 0.0:
        return 1.0
    return (
        0.5 * _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + (mean / error) ** 2)) if error else 0.0
    )


def binomial_tail(hits: float, total: float, probability: float) -> float:
    """P(Binomial(total, probability) >= hits), and between whole numbers what goes on smoothly from one to the next."""
    if hits <= 0 or probability >= 1.0:
        return 1.0
    return _incomplete_beta(hits, max(total - hits, 0.0) + 1.0, probability) if hits < total + 0.5 else 0.0


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (Abramowitz and Stegun 26.5.8, evaluated as Lentz does)."""
    if not 0.0 < x < 1.0:
        return float(x >= 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _incomplete_beta(b, a, 1.0 - x)
    fraction, c, d = 1.0, 1.0, 0.0
    for n in range(_TERMS):
        m = n // 2
        if n % 2:
            part = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            part = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)) if m else 1.0
        d = 1.0 / (1.0 + part * d)
        c = 1.0 + part / c
        fraction *= c * d
        if abs(c * d - 1.0) < _EXACT:
            break
    scale = lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x)
    return exp(scale) * (fraction - 1.0) / a


_TERMS, _EXACT = 10_000, 1e-14
"""Of the fraction: some root of ``a + b`` are enough; and the last digit that one changes."""


class PersistenceTuning(msgspec.Struct, frozen=True):
    """From where on occurrences make a pattern."""

    always_share: float = 0.8
    """Share of the steps, or of those of a stretch, that counts as all: outliers and noise hide one in five."""
    regular_share: float = 0.75
    """Share of the distances between occurrences that must be multiples of the most frequent one."""
    fewest_of_pattern: int = 3
    """Occurrences from which on there is a pattern: two have a distance, three have two that agree."""


PERSISTENCE = PersistenceTuning()


class Persistence(msgspec.Struct, frozen=True):
    """How occurrences spread over the steps."""

    kind: str
    """"always", "range", "periodic" or "random"."""
    hit: int
    seen: int
    first: int | None
    last: int | None
    period: int | None = None

    def as_facts(self) -> dict[str, Any]:
        """The fields of a :class:`ddpdoctor.measure.facts.Cost` that say when it occurs."""
        return {
            "steps_hit": self.hit,
            "steps_seen": self.seen,
            "first_step": self.first,
            "last_step": self.last,
            "persistence": self.kind,
            "period_steps": self.period,
        }


def persistence(steps: Ints, hit: Mask) -> Persistence:
    """Say how something that happened in the ``hit`` ones of the ``steps`` spreads over them.

    ``steps`` [N] are step numbers in rising order. Each stands for the steps between it and its neighbours: of a long job's later steps,
    only one block in several is measured.
    """
    times, seen = steps[hit], len(steps)
    if not len(times):
        return Persistence("random", 0, seen, None, None)
    first, last, period = int(times[0]), int(times[-1]), None
    stands_for = np.gradient(steps.astype(float)) if seen > 1 else np.ones(seen)
    hits, between = stands_for[hit].sum(), stands_for[(steps >= first) & (steps <= last)].sum()
    patterned = len(times) >= PERSISTENCE.fewest_of_pattern
    if hits >= PERSISTENCE.always_share * stands_for.sum():
        kind = "always"
    elif patterned and hits >= PERSISTENCE.always_share * between:
        kind = "range"
    else:
        period = _period(times) if patterned else None
        kind = "random" if period is None else "periodic"
    return Persistence(kind, len(times), seen, first, last, period)


def _period(times: Ints) -> int | None:
    """The distance from one of the ``times`` to the next, where most distances are multiples of it; None without one.

    A missed or unmeasured occurrence leaves a gap of a multiple of the period.
    """
    gaps = np.diff(times)
    values, counts = np.unique(gaps, return_counts=True)
    period = int(values[counts.argmax()])
    regular = float((gaps % period == 0).mean()) >= PERSISTENCE.regular_share
    return period if period > 1 and regular else None
