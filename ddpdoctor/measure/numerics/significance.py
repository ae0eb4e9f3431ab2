"""Tests whether a few ranks have the outliers or the machine delays ranks at random, and classifies when something occurs: always, in a
range of steps, every k steps, or at random.

*Which ranks.* If disturbances are distributed among R ranks at random, some F ranks get at least k of n of them with a probability of at
most C(R, F) * P(Binomial(n, F / R) >= k). Disturbances have different sizes: a hundred pauses of 3 ms on all ranks do not explain a pause
of 57 ms in every tenth step of one rank. So each has a weight w, the square of its size; n is the effective number of disturbances,
(sum of w)^2 / sum of w^2 (Kish, "Survey Sampling", 1965), and k the part of it on the few ranks. The weights depend on sizes only, not on
ranks, so the probability remains valid.

*When.* A period (every 10 steps) is also improbable by chance: of random distances, 1 in p is a multiple of p. The probabilities of ranks
and period are multiplied. The product is smaller than the probability that both occur by chance: in simulations with 2 to 16
ranks, the limit of 2 % below has a false-positive rate of 0 to 4 %.

*Where.* A disturbance by the machine (another process takes the CPU, a page is swapped in, a link stalls) occurs during a kind of work
with a probability proportional to the time that the work takes. If a kind of work takes the share q of a usual step, and t of the T
disturbances of the job are in it, the probability is P(Binomial(T, q) >= t). If all pauses are in 3 % of the step, the code there causes
them.

Outliers are attributed to few ranks if the combined probability is at most 2 %. If the place rules out the machine (0.1 %), and all
outliers are on one rank, 10 % is enough: the code that pauses is known, and the only possible error is that it could have paused on any
rank. At 2 ranks that takes 5 pauses instead of 7, at 4 ranks 3 instead of 4. A job of 4 ranks whose code pauses three times in total, on
random ranks, names one rank with a probability of 6 %; with more pauses the probability is lower.
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
    """Probabilities and thresholds of the tests."""

    unlikely: float = 0.02
    """Significance level of outliers on few ranks: one in fifty, because several kinds of work are tested."""
    ruled_out: float = 0.001
    """Probability below which random delays by the machine are ruled out as the cause."""
    rather_unlikely: float = 0.1
    """Significance level if the machine is ruled out and all outliers are on one rank; see the module's docstring."""
    mostly: float = 0.5
    """Minimum part of all outliers' weight on the few ranks: more than on all others together."""
    times_fair_share: float = 1.5
    """Minimum weight on the few ranks as a multiple of their fair share: scatter on all ranks is attributed to none."""
    comparable: float = 0.25
    """Part of the first rank's weight from which another rank is one of the few, and of the effective weight from which an outlier is
    large: pauses of one kind differ by half in size."""
    least_place: float = 0.01
    """Minimum share of the step for each kind of work, because disturbances can also occur in rare work."""
    most_place: float = 0.25
    """For kinds of work with a larger share of the step the place is not tested, because disturbances are not distributed evenly enough."""
    blocks: int = 5
    """Blocks of neighbouring cycles, over which drift is averaged. More blocks would name more ranks because of drift, and find few more
    persistent stragglers."""
    block_cycles: int = 8
    """Cycles of a block in long recordings: disturbances of a real machine last for about as long."""
    far: float = 6.0
    """Robust standard deviations from the median beyond which blocks are clipped."""
    half_weight_freedom: float = 16.0
    """Degrees of freedom at which a column's larger scatter counts half: with few cycles, some column's scatter is large by chance."""
    many_ranks: int = 8
    """Minimum number of ranks for a test of one rank's mean against the scatter of the others' means."""
    means_differ_level: float = 0.1
    """Significance level at which the means of many ranks differ by more than their scatter over the cycles explains."""


CHANCE = ChanceTuning()


def outliers_of_few_ranks(outliers: Mask, difference: Array, steps: Ints, place_chance: float = 1.0) -> Mask:
    """The ``outliers`` [cycles, R] of the few ranks that have most of them; none if outliers are distributed among all ranks.

    ``difference`` [cycles, R] is the size of each, ``place_chance`` the probability that as many random disturbances by the machine
    occur in this kind of work, see :func:`chance_of_places`.
    """
    lost_ns = np.where(outliers, difference, 0.0)
    weight = (lost_ns / max(lost_ns.max(), 1.0)) ** 2
    if not weight.any():
        return np.zeros_like(outliers)
    effective = float((weight**2).sum() / weight.sum())
    large: Mask = weight >= CHANCE.comparable * effective
    leaders, chance = _least_probable_ranks(weight.sum(axis=0), float(weight.sum()) / effective)
    chance *= chance_of_period(np.sort(steps[large[:, weight.sum(axis=0).argmax()]]))
    is_one_rank = leaders.sum() == 1 and place_chance <= CHANCE.ruled_out and not large[:, ~leaders].any()
    if chance > (CHANCE.rather_unlikely if is_one_rank else CHANCE.unlikely):
        return np.zeros_like(outliers)
    few_have_most = lost_ns[:, leaders].sum() >= CHANCE.mostly * lost_ns.sum()
    of_few: Mask = (outliers if few_have_most else large) & leaders
    return of_few


def _least_probable_ranks(weight: Array, total: float) -> tuple[Mask, float]:
    """(the few ranks [R], at most half of all, whose share of the ``weight`` [R] of ``total`` disturbances is least probable; that
    probability). No ranks and 1.0 if no few ranks have most of the weight."""
    world = len(weight)
    order = np.argsort(-weight, kind="stable")
    comparable = int((weight >= CHANCE.comparable * weight.max()).sum())
    share = np.cumsum(weight[order]) / weight.sum()
    chances = {
        few: chance_of_ranks(total * float(share[few - 1]), total, few, world)
        for few in range(1, min(comparable, world // 2) + 1)
        if share[few - 1] >= max(CHANCE.mostly, CHANCE.times_fair_share * few / world)
    }
    few = min(chances, key=chances.__getitem__, default=0)
    return np.isin(np.arange(world), order[:few]), chances.get(few, 1.0)


def chance_of_ranks(count: float, total: float, few: int, world: int) -> float:
    """Upper bound of the probability that some ``few`` ranks get at least ``count`` of ``total`` random disturbances."""
    tail = binomial_tail(count, total, few / world)
    ways = lgamma(world + 1) - lgamma(few + 1) - lgamma(world - few + 1)
    return exp(min(0.0, ways + log(tail))) if tail else 0.0


def chance_of_period(times: Ints) -> float:
    """Upper bound of the probability that as many of the distances between ``times`` are multiples of the most frequent one by chance.

    1.0 if it exceeds 10 %. Of random distances, 1 in p is a multiple of p.
    """
    gaps = np.diff(times)
    if len(gaps) < 2:
        return 1.0
    values, counts = np.unique(gaps, return_counts=True)
    period = int(values[counts.argmax()])
    # One distance defines the period, so it is no evidence.
    chance = binomial_tail(int((gaps % period == 0).sum()) - 1, len(gaps) - 1, 1.0 / period)
    return chance if chance <= CHANCE.rather_unlikely else 1.0


def shares_of_step(columns_of: Mapping[_Kind, Sequence[int]], work: Array) -> dict[_Kind, float]:
    """Kind of work → its share of an undisturbed step, at least 1 %.

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
    """Kind of work → probability that as many random disturbances by the machine occur in it as were measured.

    ``columns_of`` gives each kind's columns in ``beyond`` [cycles, R, C] ns, the excess over the other ranks, and ``shares`` its part of
    the step. A disturbance is an excess of more than ``least_ns`` over the rank's median excess, independently of the scatter; this
    overestimates the probability.
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
    """[R] whether a rank's excess over the others, ``values`` [cycles, R], is significantly above zero, see :func:`above_zero`. ``work``
    [cycles, R] is the compared work.

    Drift that is slower than blocks are long affects many ranks. So if the ranks' means differ by more than their scatter explains, a late
    rank's mean must also be an outlier of the ranks' means.
    """
    above = above_zero(values, allowed, work)
    if values.shape[1] >= CHANCE.many_ranks and above.any() and _means_differ(values, above):
        above &= _outlying_means(_blocks(values).mean(axis=0), allowed / values.shape[1])
    return above


def above_zero(values: Array, allowed: float, work: Array | None = None) -> Mask:
    """[R] whether the mean of a column of ``values`` [cycles, R] is significantly above zero. ``allowed``: the probability that any of R
    equal columns is. All False for a single cycle.

    This is Student's test of the means of blocks of neighbouring cycles, because neighbours are correlated. The scatter is that of all
    columns, or more if a column's own is larger. The columns of two ranks are equal except for the sign, so with few blocks they are also
    tested with the scatter of ``work`` [cycles, 2], whose difference they are.
    """
    world = values.shape[1]
    if len(values) < 2:
        return np.zeros(world, bool)
    above = _mean_above_zero(values, values, max(world - 1, 1), allowed)
    if work is None or world > 2 or len(_blocks(values)) > CHANCE.blocks:
        return above
    return above | _mean_above_zero(values, np.sqrt(2.0) * work, 2, allowed)


def _blocks(values: Array) -> Array:
    """[blocks, R] means of neighbouring cycles of [cycles, R]: at most five blocks, or in long recordings more of about eight cycles each.
    The latter are clipped to a range around the median, so that lateness that began during the recording does not inflate the scatter."""
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
    """([R] standard error of the mean of ``values`` [cycles, R], its degrees of freedom). The scatter is the mean of all columns of
    ``scattering`` [cycles, R], ``independent`` of which are independent; it is widened for a column with a larger scatter of its own."""
    blocks = _blocks(scattering)
    of_all, own = float(scattering.var(axis=0, ddof=1).mean()), values.var(axis=0, ddof=1)
    freedom = len(values) - 1
    larger = (own / of_all if of_all else np.ones(len(own))) - 1.0
    widened = 1.0 + np.clip(larger, 0.0, None) * freedom / (CHANCE.half_weight_freedom + freedom)
    error: Array = np.sqrt(blocks.var(axis=0, ddof=1).mean() / len(blocks) * widened)
    return error, (len(blocks) - 1) * independent


def _mean_above_zero(values: Array, scattering: Array, independent: int, allowed: float) -> Mask:
    """[R] whether the mean of ``values`` [cycles, R] is above zero at the level ``allowed``, which is divided among the columns."""
    means = _blocks(values).mean(axis=0)
    error, freedom = _error_of_mean(values, scattering, independent)
    each = allowed / len(means)
    both = zip(means.tolist(), error.tolist(), strict=True)
    return np.array([student_tail(mean, of_mean, freedom) <= each for mean, of_mean in both])


def _outlying_means(means: Array, allowed: float) -> Mask:
    """[R] the highest ``means``, of at most half of the ranks, that are outliers compared with all lower means (Rosner's test of several
    outliers, 1983)."""
    order = np.argsort(-means, kind="stable")
    outlying = np.zeros(len(means), bool)
    for few in range(1, len(means) // 2 + 1):
        others = means[order[few:]]
        beyond = float(means[order[few - 1]] - others.mean())
        error = float(others.std(ddof=1)) * np.sqrt(1.0 + 1.0 / len(others))
        if student_tail(beyond, error, len(others) - 1) <= allowed:
            outlying[order[:few]] = True
    return outlying


def _means_differ(values: Array, late: Mask) -> bool:
    """Whether the means of ``values`` [cycles, R] differ by more than their scatter explains (Fisher's F-test). The highest means, as many
    as there are ``late`` ranks but at most half of all, are excluded."""
    world = values.shape[1]
    error, freedom = _error_of_mean(values, values, world - 1)
    means = np.sort(_blocks(values).mean(axis=0))[: world - min(int(late.sum()), world // 2)]
    seen, explained = float(means.var(ddof=1)) * (len(means) - 1), float((error**2).mean()) * freedom
    if not seen:
        return False
    return (
        _incomplete_beta(freedom / 2, (len(means) - 1) / 2, explained / (explained + seen))
        <= CHANCE.means_differ_level
    )


def student_tail(mean: float, error: float, freedom: float) -> float:
    """Probability of a mean as high by chance, by Student's distribution for the standard ``error`` and its degrees of ``freedom``."""
    if mean <= 0.0:
        return 1.0
    return (
        0.5 * _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + (mean / error) ** 2)) if error else 0.0
    )


def binomial_tail(hits: float, total: float, probability: float) -> float:
    """P(Binomial(total, probability) >= hits), interpolated smoothly between whole numbers."""
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
"""Maximum number of terms of the fraction, of which about sqrt(``a + b``) are needed; and the relative change at which it ends."""


class PersistenceTuning(msgspec.Struct, frozen=True):
    """Thresholds for patterns of occurrences."""

    always_share: float = 0.8
    """Share of the steps, or of a range of steps, that counts as all: outliers and noise hide one in five."""
    regular_share: float = 0.75
    """Minimum share of the distances between occurrences that are multiples of the most frequent one."""
    fewest_of_pattern: int = 3
    """Minimum number of occurrences in a pattern: two have a distance, three have two that agree."""


PERSISTENCE = PersistenceTuning()


class Persistence(msgspec.Struct, frozen=True):
    """How occurrences are distributed over the steps."""

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
    """Classify how occurrences in the ``hit`` steps are distributed over all ``steps``.

    ``steps`` [N] are step numbers in ascending order. Each represents the steps between it and its neighbours, because only some blocks of
    a long job's later steps are measured.
    """
    times, seen = steps[hit], len(steps)
    if not len(times):
        return Persistence("random", 0, seen, None, None)
    first, last, period = int(times[0]), int(times[-1]), None
    represents = np.gradient(steps.astype(float)) if seen > 1 else np.ones(seen)
    hits, between = represents[hit].sum(), represents[(steps >= first) & (steps <= last)].sum()
    patterned = len(times) >= PERSISTENCE.fewest_of_pattern
    if hits >= PERSISTENCE.always_share * represents.sum():
        kind = "always"
    elif patterned and hits >= PERSISTENCE.always_share * between:
        kind = "range"
    else:
        period = _period(times) if patterned else None
        kind = "random" if period is None else "periodic"
    return Persistence(kind, len(times), seen, first, last, period)


def periodic_share(steps: Ints, hits: Ints, period: int) -> float:
    """Share of all steps from the first to the last of the measured ``steps`` [N] that have something of this ``period``, which
    happened in the ``hits``; steps that were not measured have it as often as those that were."""
    residue = int(np.bincount(hits % period).argmax())
    regular, due = (numbers[numbers % period == residue] for numbers in (hits, steps))
    # It may have begun before the first hit and ended after the last one, between measured steps without it.
    before, after = due[due < regular.min()], due[due > regular.max()]
    begin, end = int(steps.min()), int(steps.max()) + 1
    lasts = (int(after.min()) if len(after) else end) - (int(before.max()) + period if len(before) else begin)
    measured = len(due) - len(before) - len(after)
    return len(regular) / measured * lasts / period / (end - begin) + (len(hits) - len(regular)) / len(steps)


def _period(times: Ints) -> int | None:
    """The most frequent distance between ``times``, if most distances are multiples of it and it is not 1; else None.

    A missing or unmeasured occurrence leaves a gap of a multiple of the period.
    """
    gaps = np.diff(times)
    values, counts = np.unique(gaps, return_counts=True)
    period = int(values[counts.argmax()])
    regular = float((gaps % period == 0).mean()) >= PERSISTENCE.regular_share
    return period if period > 1 and regular else None
