"""Finds the cycles in which a rank is late with one kind of work.

The excess is *persistent* if its mean over the cycles is significantly above zero (Student's t-test), and *sporadic* if single cycles are
outliers compared with the rank's other cycles. Scatter that is alike on all ranks, as on a busy machine, is neither.

The test of the mean (:func:`ddpdoctor.measure.numerics.above_others`) has one false-positive rate for a whole window: if all ranks are
equal, at most 1 % of windows name one. This rate is divided evenly among the ranks, and among the kinds of work by their share of the step.
``tests/measure/attribution/test_error_rate.py`` checks the rates and the power by simulation; ``docs/how-it-works.md`` states them. Two
cases are not tested: a single cycle (:func:`_late_in_only_cycle`) and outliers in a short window (:func:`window_outliers`). If there are
few ranks and their work drifts, a rank that is slower for most of a short window may be named, because the window is too short to show
whether this lasts.

**Outliers in a short window.** The step log of a whole run can distinguish a rank that pauses from a machine that delays ranks at random
(:mod:`ddpdoctor.measure.numerics.significance`). A trace of five to ten steps cannot: a single pause is always on some rank, and two random
ones are on the same rank in a quarter of jobs of four ranks. On a device, even a short window has little noise: the times of kernels with
equal work vary by one or two per cent. So a large outlier is reported as observed: which rank, in which of the recorded steps, by how much.
Its frequency is unknown.

A cycle of a rank is such an outlier in a kind of work if

- the excess over the rank's own undisturbed cycle, and over the others in the same cycle, is more than six standard deviations of all
  values in the window and more than 15 % of the step;
- the rank's whole cycle is longer by as much: the rank does not gain the time back in another kind of work;
- all other excesses in the window are at most half of the smallest outlier, because noise with a heavy tail has values of all sizes in
  between;
- the other ranks' cycles are disturbed by less than half as much: if something lengthens a step on all ranks, it does so by different
  amounts, and the longest would look like an outlier.

Outliers are reported if together they cost a tenth of the window. If they are all on the same few ranks, these are stragglers. If the rank
changes, and there are at least three such cycles, the late rank rotates and none is a straggler. Two such cycles on different ranks are not
reported, because a machine that delays ranks at random causes them, too.

This is not a statistical test with a set error rate. Of simulated windows of 2 to 16 equal ranks whose work scatters by 2 to 10 %, at most
3 % report a rank; with a heavy tail (Student's t with three degrees of freedom) up to 10 % of windows of two cycles, 6 % of those of four
and 3 % of those of eight do.

If all ranks wait for data in the same cycles, no rank is named: see :func:`global_starvation`.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ddpdoctor.measure.numerics import (
    CHANCE,
    PERSISTENCE,
    Array,
    Ints,
    Mask,
    above_others,
    above_zero,
    outliers_of_few_ranks,
    scatter_of,
    undisturbed,
)
from ddpdoctor.measure.taxonomy import INDEX, LATE_COMPONENTS, RECORDED, Component, LateCause

from .comparison import Comparison, others_median


class LatenessTuning(msgspec.Struct, frozen=True):
    """Thresholds for persistent lateness and for outliers of a rank."""

    false_alarms: float = 0.01
    """False-positive rate of persistent lateness, per window of equal ranks."""
    persistent_share: float = 0.01
    """Minimum excess as a share of the step: NVRx and other tools call a rank slow if it is a few per cent slower."""
    persistent_part: float = 0.5
    """More than half of the cycles must exceed this part of the mean excess; an excess in fewer cycles can only be sporadic."""
    least_rate_part: float = 0.2
    """Part of ``false_alarms`` that each kind of work gets at least. Kinds with a smaller share of the step get it, too, because they
    seldom reach ``persistent_share`` by chance."""
    outlier_sigmas: float = 6.0
    """A cycle is an outlier if it exceeds the rank's usual excess by this many robust standard deviations (SageMaker's StepOutlier uses 3
    plain standard deviations, which the outliers themselves inflate)."""
    outlier_share: float = 0.15
    """Share of the median step that an outlier must also exceed."""
    fewest_of_drifting: int = 5
    """On CPUs, the scatter of fewer cycles than this does not include disturbances that last for some cycles."""
    drifting_sigmas: float = 3.0
    """With fewer cycles than ``fewest_of_drifting``, the minimum median excess in robust standard deviations, unless it is as large as an
    outlier. In three cycles of a healthy recorded job, the machine caused an excess of 2.3."""
    single_share: float = 0.1
    """In a window of one cycle, the minimum excess as a share of the step, if there are enough ranks to know the scatter between them."""
    fewest_outliers: int = 2
    """Minimum number of outliers of a sporadically late rank: a single one proves nothing, because it is always on some rank."""
    straggler_part: float = 0.25
    """Minimum excess of a further straggler, as a part of the first one's. If only the first one is fixed, the ranks still wait for the
    largest of the others, so smaller excesses matter little."""
    most_stalls: int = 2
    """Maximum number of outliers of a persistently late rank that are excluded from its excess; three are a pattern (as in the rules),
    which counts."""
    most_stalls_share: float = 0.1
    """Upper limit of the share of cycles with these excluded outliers; a larger share is the rank's normal behaviour."""
    stall_part: float = 0.25
    """These outliers are excluded if their sum is more than this part of the rank's total excess in all other cycles. Less does not matter,
    because the error of costs is up to a third anyway."""
    window_share: float = 0.1
    """Minimum cost of the outliers together as a share of the window, and of work that ranks have in turn as a share of the step: a job
    counts as straggling from 1.1 times the ideal step time on (Lin et al., OSDI '25)."""
    next_outlier_part: float = 0.5
    """No other excess in the window may exceed this part of the smallest outlier: noise with a heavy tail has values of all sizes in
    between."""
    starving_part: float = 0.5
    """All ranks wait for data together if each waits at least this part of the longest wait: in a cycle, or on average."""


LATENESS = LatenessTuning()
_FEWEST_COMPARED = 4
"""Minimum number of ranks for which the scatter between ranks is used. With fewer, a rank may be compared with the late rank, because that
is the median of the others."""


def late_cycles(
    excess: Array,
    work: Array,
    steps: Ints,
    step_ns: float,
    place_chance: float,
    step_share: float,
    *,
    drifts: bool = False,
) -> tuple[Mask, bool]:
    """([cycles, R] in which cycles a rank is late, persistently or sporadically; whether there are outliers, but on random ranks).

    ``excess`` and ``work``: [cycles, R] ns. ``place_chance``: see :func:`ddpdoctor.measure.numerics.outliers_of_few_ranks`. ``step_share``:
    share of the step that this kind of work takes. ``drifts``: disturbances last for several cycles, as those by other programs, clock
    rates and caches do on CPUs.
    """
    middle = np.median(excess, axis=0)
    scatter = scatter_of(excess - middle)
    least = least_outlier(scatter, step_ns)
    persistent = is_persistent(excess, work, step_ns, step_share)
    if drifts and len(excess) < LATENESS.fewest_of_drifting:
        persistent &= middle >= np.minimum(
            LATENESS.drifting_sigmas * scatter, LATENESS.outlier_share * step_ns
        )
    usual = np.where(persistent, middle, 0.0)
    persistent_cycles = (excess > 0) & persistent
    beyond = excess - usual
    outliers = beyond > least
    # Numbers of outliers are comparable only with one threshold for all ranks (the lowest of a rank that has outliers): by its own
    # threshold, a rank that scatters more has fewer.
    comparable_outliers = beyond > least[outliers.any(axis=0)].min(initial=float(least.max()))
    few_rank_outliers = outliers_of_few_ranks(comparable_outliers, excess, steps, place_chance) & outliers
    is_random = (
        bool((outliers & ~persistent_cycles).sum() >= LATENESS.fewest_outliers)
        and not few_rank_outliers.any()
    )
    sporadic = few_rank_outliers & (few_rank_outliers.sum(axis=0) >= LATENESS.fewest_outliers)
    return (persistent_cycles & ~_isolated_stalls(excess, outliers, persistent_cycles)) | sporadic, is_random


def least_outlier(scatter: Array, step_ns: float) -> Array:
    """[R] ns by which a cycle must exceed the rank's usual excess to be an outlier. ``scatter`` [R]: standard deviation of the rank's
    cycles."""
    least: Array = np.maximum(LATENESS.outlier_sigmas * scatter, LATENESS.outlier_share * step_ns)
    return least


def main_stragglers(lost_ns: Array) -> tuple[int, ...]:
    """Positions of the ranks with the largest ``lost_ns`` [R], in descending order, down to ``straggler_part`` of the largest."""
    order = np.argsort(-lost_ns, kind="stable")
    least_ns = LATENESS.straggler_part * lost_ns[order[0]]
    return tuple(int(rank) for rank in order if lost_ns[rank] >= least_ns and lost_ns[rank] > 0)


def is_single_rank(lost_ns: Array) -> bool:
    """Whether at most one rank is a main straggler."""
    return len(main_stragglers(lost_ns)) < 2


def _isolated_stalls(excess: Array, outliers: Mask, persistent_cycles: Mask) -> Mask:
    """[cycles, R] single long stalls of a persistently late rank that would distort its mean excess."""
    stalls = outliers & persistent_cycles
    lasting_ns = np.where(persistent_cycles & ~stalls, excess, 0.0).sum(axis=0)
    few = (stalls.sum(axis=0) <= LATENESS.most_stalls) & (
        stalls.sum(axis=0) < len(excess) * LATENESS.most_stalls_share
    )
    large = np.where(stalls, excess, 0.0).sum(axis=0) > LATENESS.stall_part * lasting_ns
    isolated: Mask = stalls & (few & large)
    return isolated


def is_persistent(excess: Array, work: Array, step_ns: float, step_share: float) -> Mask:
    """[R] whether the rank's excess is significantly above zero, occurs in more than half of the cycles, and is not negligible."""
    if len(excess) == 1:
        return _late_in_only_cycle(excess[0], step_ns)
    inside = _clipped(excess)
    allowed = LATENESS.false_alarms * max(step_share, LATENESS.least_rate_part)
    least = np.maximum(LATENESS.persistent_share * step_ns, LATENESS.persistent_part * inside.mean(axis=0))
    most = np.quantile(excess, 0.5, axis=0, method="lower")
    persistent: Mask = above_others(inside, allowed, _clipped(work)) & (most > least)
    if excess.shape[1] >= CHANCE.many_ranks:
        # Of many ranks, a busy machine may disturb some rank in most cycles. In ``inside``, clipping has removed such disturbances of the
        # other ranks. So the rank must also exceed the mean of the others' unclipped values (limited to this rank's maximum).
        for rank in np.flatnonzero(persistent):
            limited = np.minimum(excess, inside[:, rank].max())
            beyond = limited - np.delete(limited, rank, axis=1).mean(axis=1, keepdims=True)
            persistent[rank] = above_zero(beyond, allowed)[rank]
    return persistent


def _clipped(values: Array) -> Array:
    """``values`` [cycles, R] clipped to a range around the middle half of the rank's cycles, so that a single stall does not hide
    persistent lateness. The width of the range depends on the interquartile range of the rank, or on the median one of all ranks if that is
    larger."""
    low, high = np.quantile(values, (0.25, 0.75), axis=0)
    half = (high - low) / 2
    reach = half + LATENESS.outlier_sigmas * np.maximum(half, np.median(half))
    return np.clip(values, (low + high) / 2 - reach, (low + high) / 2 + reach)


def _late_in_only_cycle(excess: Array, step_ns: float) -> Mask:
    """[R] whether the excess in the only cycle, [R] ns, is as large as that of an outlier.

    One cycle does not allow a significance test. With four ranks or more, the threshold depends on the scatter between the ranks.
    """
    if len(excess) < _FEWEST_COMPARED:
        return excess > LATENESS.outlier_share * step_ns
    least_ns = max(LATENESS.outlier_sigmas * float(scatter_of(excess)), LATENESS.single_share * step_ns)
    return excess > least_ns


def window_outliers(comparison: Comparison) -> tuple[dict[LateCause, Mask], dict[LateCause, Mask]]:
    """Two dicts, kind of work → [cycles, R] its outliers in a short window: of the kinds whose outliers are on a few ranks, and of the
    kinds whose late rank rotates.

    Each recorded kind of work is judged by itself. Of all other kinds together, the outliers must be on the same ranks, because a
    disturbance by the machine may occur during any of these kinds.
    """
    late_ns = _outlier_lateness_ns(comparison)
    least_ns = LATENESS.window_share * comparison.duration_ns.sum()
    large = {cause: ns > 0 for cause, ns in late_ns.items() if ns.max(axis=1).sum() >= least_ns}
    unrecorded = [ns > 0 for cause, ns in late_ns.items() if cause not in RECORDED]
    united = np.logical_or.reduce(unrecorded) if unrecorded else np.zeros(comparison.work.shape[:2], bool)
    few_rank_outliers = {
        c: where for c, where in large.items() if _is_on_few_ranks(where if c in RECORDED else united)
    }
    turns_outliers = {
        c: where for c, where in large.items() if c not in RECORDED and _is_on_changing_ranks(where, united)
    }
    return few_rank_outliers, turns_outliers


def global_starvation(waits_ns: Array, step_ns: float) -> Mask:
    """[cycles] whether all ranks wait for data ([cycles, R] ns) much longer than usual and about as long as each other."""
    beyond = _above_undisturbed(waits_ns)
    least, most = beyond.min(axis=1), beyond.max(axis=1)
    starving: Mask = (least > LATENESS.outlier_share * step_ns) & (least >= LATENESS.starving_part * most)
    return starving


def _outlier_lateness_ns(comparison: Comparison) -> dict[LateCause, Array]:
    """Kind of work → [cycles, R] ns by which outliers of this kind make ranks late, 0 elsewhere. Kinds without outliers are omitted."""
    whole = _above_undisturbed(comparison.excess.sum(axis=2))
    common = others_median(_above_undisturbed(comparison.work.sum(axis=2)))
    late_ns: dict[LateCause, Array] = {}
    for cause in LATE_COMPONENTS:
        work, beyond = _work_and_excess(comparison, cause)
        excess = np.minimum(_above_undisturbed(work), _above_undisturbed(beyond))
        late = np.minimum(excess, whole)
        outlying = _outliers(late, excess, comparison.step_ns) & (
            LATENESS.next_outlier_part * excess > common
        )
        if outlying.any():
            late_ns[cause] = np.where(outlying, late, 0.0)
    return late_ns


def _work_and_excess(comparison: Comparison, cause: LateCause) -> tuple[Array, Array]:
    """[cycles, R] ns of one kind of work, and its excess over the other ranks.

    Of work of unknown cause, only idle time of the device counts: time in unmatched collectives, and time before the window began, may have
    been caused by another rank.
    """
    if cause != LateCause.UNKNOWN:
        return comparison.work_of(cause), comparison.excess_of(cause)
    column = INDEX[Component.IDLE]
    return comparison.work[:, :, column], comparison.excess[:, :, column]


def _above_undisturbed(values: Array) -> Array:
    """[cycles, R] ``values`` minus the value in the rank's undisturbed cycle (a quantile of its cycles)."""
    return values - undisturbed(values, its_own=True)


def _outliers(late: Array, excess: Array, step_ns: float) -> Mask:
    """[cycles, R] outliers of ``late``, the part of ``excess`` by which the whole cycle is longer. There are none if any other excess is
    more than half as large."""
    outlying: Mask = late > least_outlier(scatter_of((excess - np.median(excess)).ravel()), step_ns)
    if outlying.any() and excess[~outlying].max(initial=0.0) > LATENESS.next_outlier_part * float(
        late[outlying].min()
    ):
        return np.zeros_like(outlying)
    return outlying


def _is_on_few_ranks(where: Mask) -> bool:
    """Whether the outliers are on the same ranks, at most half of all, in each cycle that has outliers."""
    struck = where[where.any(axis=1)]
    return bool((struck == struck[0]).all()) and 2 * int(struck[0].sum()) <= where.shape[1]


def _is_on_changing_ranks(where: Mask, united: Mask) -> bool:
    """Whether the outliers are on different ranks in different cycles, and in no cycle on more than half of the ranks. ``united``: outliers
    of all kinds of work that are judged together."""
    struck = united[united.any(axis=1)]
    return (
        int(where.any(axis=1).sum()) >= PERSISTENCE.fewest_of_pattern
        and not is_single_rank(where.sum(axis=0))
        and bool((2 * struck.sum(axis=1) <= where.shape[1]).all())
        and not _is_on_few_ranks(united)
    )
