"""Whose outliers they are: one rank's, or those of a machine that disturbs whom it happens to meet; and when something happens:
always, in a stretch of steps, every k steps, or now and then.

*Which.* Those in which the time is lost: a rank that pauses for 57 ms in every tenth step is not excused by a hundred pauses of
3 ms that strike everybody. Half of all that is lost (then a quarter) is lost in outliers of a certain size or larger; outliers of
half that size count, or all, where the few carry these as well. That looks at sizes only, so chance has the same odds among them.

*Who.* If disturbances strike the R ranks at random, some F ranks get at least n of N of them with a probability of at
most C(R, F) * P(Binomial(N, F / R) >= n).

*When.* A rhythm (every 10 steps) is no chance either: of distances without one, 1 in p is a multiple of p. Both
probabilities count together, as their product, which is smaller than the probability of both by chance: simulated with 2 to 16
ranks, the limit of 2 % below lets 0.5 to 4 % through.

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

from .stats import Array, Ints, Mask, undisturbed

_Kind = TypeVar("_Kind", bound=str)


class ChanceTuning(msgspec.Struct, frozen=True):
    """From where on something is no chance."""

    unlikely: float = 0.02
    """Probability below which chance is not believed: the usual one in fifty, as several kinds of work are looked at."""
    ruled_out: float = 0.001
    """Probability below which the machine is ruled out as the cause, whoever it strikes."""
    rather_unlikely: float = 0.1
    """Probability that will do where the machine is ruled out and all outliers are of one rank; see the module's text."""
    mostly: float = 0.5
    """Part of the whole that the few must carry at least: more than all others together."""
    looks: tuple[tuple[float, float], ...] = ((0.5, 1.0), (0.25, 0.25))
    """Parts of the time that is lost in the largest outliers, which are looked at one after the other, and what is left of the
    limits above at each: pauses that lose less than those of a busy machine do stand out by their size alone, and more clearly."""
    weighty: float = 0.5
    """Part of the size of those from which on an outlier counts: pauses of one kind differ by as much."""
    fair_shares: float = 1.5
    """Times their fair share of all outliers that the few must carry: scatter that strikes everybody is nobody's."""
    leads: float = 0.5
    """Part of what the first rank carries that makes another one of the few."""
    least_place: float = 0.01
    """Share of the step that every place counts for: work that is never there in a usual step can still be met."""
    most_place: float = 0.25
    """Of kinds of work that take more of the step, where disturbances fall says little: they are not spread that evenly."""


CHANCE = ChanceTuning()


def carried_by_few(outliers: Mask, difference: Array, steps: Ints, place_chance: float = 1.0) -> Mask:
    """The outliers [cycles, R] of the few ranks that carry most of them; none where they strike everybody alike.

    ``difference`` [cycles, R] says how large each is, ``place_chance`` how probable it is that a machine's disturbances fall
    into this kind of work as these do.
    """
    lost_ns = np.where(outliers, difference, 0.0)
    nobody = np.zeros_like(outliers)
    if not lost_ns.sum():
        return nobody
    for part, odds in CHANCE.looks:
        weighty = _weighty(lost_ns, part)
        leaders, needed = _leaders(np.where(weighty, lost_ns, 0.0).sum(axis=0))
        if leaders is not None and _is_no_chance(weighty, leaders, lost_ns, steps, place_chance, odds):
            whole = lost_ns[:, leaders].sum() >= needed * lost_ns.sum()
            carried: Mask = (outliers if whole else weighty) & leaders
            return carried
    return nobody


def _weighty(lost_ns: Array, part: float) -> Mask:
    """[cycles, R] the outliers as large as those in which this part of all is lost, or half as large."""
    sizes = np.sort(lost_ns[lost_ns > 0])[::-1]
    usual = sizes[np.searchsorted(np.cumsum(sizes), part * sizes.sum())]
    weighty: Mask = lost_ns >= CHANCE.weighty * usual
    return weighty


def _leaders(carried_ns: Array) -> tuple[Mask | None, float]:
    """The few ranks that carry most, [R], None where there are none; and the part of the whole that they must carry."""
    world = len(carried_ns)
    leaders: Mask = carried_ns >= CHANCE.leads * carried_ns.max()
    few = int(leaders.sum())
    needed = max(CHANCE.mostly, CHANCE.fair_shares * few / world)
    carry_it = 2 * few <= world and carried_ns[leaders].sum() >= needed * carried_ns.sum()
    return (leaders if carry_it else None), needed


def _is_no_chance(
    weighty: Mask, leaders: Mask, lost_ns: Array, steps: Ints, place_chance: float, odds: float
) -> bool:
    """Whether chance would hardly give so many of the ``weighty`` outliers [cycles, R] to these ranks, at these times: not with
    more than this part, ``odds``, of the limits."""
    few, theirs, total = int(leaders.sum()), int(weighty[:, leaders].sum()), int(weighty.sum())
    all_of_one = few == 1 and theirs == total and place_chance <= CHANCE.ruled_out
    enough = CHANCE.rather_unlikely if all_of_one else CHANCE.unlikely
    most = int(np.where(weighty, lost_ns, 0.0).sum(axis=0).argmax())
    times = np.sort(steps[weighty[:, most]])
    return chance_of_ranks(theirs, total, few, len(leaders)) * chance_of_rhythm(times) <= odds * enough


def chance_of_ranks(theirs: int, total: int, few: int, world: int) -> float:
    """Bound on the probability that some ``few`` ranks get at least ``theirs`` of ``total`` disturbances that strike at
    random."""
    tail = binomial_tail(theirs, total, few / world)
    return exp(min(0.0, _log_choose(world, few) + log(tail))) if tail else 0.0


def chance_of_rhythm(times: Ints) -> float:
    """Bound on the probability that as many of the distances between the ``times`` are multiples of the most frequent one.

    1.0 where that is likely. Of distances that have no rhythm, 1 in p is a multiple of p.
    """
    gaps = np.diff(times)
    if len(gaps) < 2:
        return 1.0
    values, counts = np.unique(gaps, return_counts=True)
    period = int(values[counts.argmax()])
    # One distance is the period itself, whatever it is.
    chance = binomial_tail(int((gaps % period == 0).sum()) - 1, len(gaps) - 1, 1.0 / period)
    return chance if chance <= CHANCE.rather_unlikely else 1.0


def chance_of_places(
    columns_of: Mapping[_Kind, Sequence[int]], work: Array, beyond: Array, least_ns: float
) -> dict[_Kind, float]:
    """Kind of work → probability that a machine's disturbances fall into it as often as those of the job do.

    ``columns_of`` gives each kind's columns in ``work`` and ``beyond`` [cycles, R, C] ns: the work, and what is beyond the
    other ranks'. A disturbance is what lies ``least_ns`` beyond the rank's usual excess, whatever the scatter: the bound errs
    to the side of the machine.
    """
    usual_ns = {
        kind: float(undisturbed(work[:, :, columns].sum(axis=2)).mean())
        for kind, columns in columns_of.items()
    }
    step_ns = max(sum(usual_ns.values()), 1.0)
    struck = {kind: _disturbances(beyond[:, :, columns], least_ns) for kind, columns in columns_of.items()}
    total = sum(struck.values())
    share = {kind: max(CHANCE.least_place, ns / step_ns) for kind, ns in usual_ns.items()}
    return {
        kind: 1.0 if share[kind] > CHANCE.most_place else binomial_tail(struck[kind], total, share[kind])
        for kind in columns_of
    }


def _disturbances(beyond: Array, least_ns: float) -> int:
    """How many cycles of ranks lie ``least_ns`` beyond the rank's median, of [cycles, R, components of one kind]."""
    together = beyond.sum(axis=2)
    return int((together - np.median(together, axis=0) > least_ns).sum())


def binomial_tail(hits: int, total: int, probability: float) -> float:
    """P(Binomial(total, probability) >= hits). By logarithms: of a thousand trials the coefficients are beyond any float."""
    if hits <= 0 or probability >= 1.0:
        return 1.0
    if probability <= 0.0:
        return 0.0
    summed = 0.0
    for n in range(hits, total + 1):
        term = exp(_log_choose(total, n) + n * log(probability) + (total - n) * log1p(-probability))
        summed += term
        if n > total * probability and term <= _NO_MORE * summed:
            break
    return min(1.0, summed)


_NO_MORE = 1e-17
"""Of a sum: behind the most likely number, smaller terms than this change no digit of it."""


def _log_choose(total: int, few: int) -> float:
    return lgamma(total + 1) - lgamma(few + 1) - lgamma(total - few + 1)


class PersistenceTuning(msgspec.Struct, frozen=True):
    """From where on occurrences make a pattern."""

    always_share: float = 0.8
    """Share of the steps, or of those of a stretch, that is as good as all: outliers and noise hide one in five."""
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

    ``steps`` [N] are step numbers in rising order.
    """
    times, seen = steps[hit], len(steps)
    if not len(times):
        return Persistence("random", 0, seen, None, None)
    first, last, period = int(times[0]), int(times[-1]), None
    between = int(((steps >= first) & (steps <= last)).sum())
    patterned = len(times) >= PERSISTENCE.fewest_of_pattern
    if len(times) >= PERSISTENCE.always_share * seen:
        kind = "always"
    elif patterned and len(times) >= PERSISTENCE.always_share * between:
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
