"""Finds the cycles in which a rank is late with one kind of work.

The excess is *persistent* if its mean over the cycles is significantly above zero (Student's test), and *sporadic* if single cycles are
outliers compared with the rank's other cycles. Scatter that all ranks have, as on a busy machine, is neither.

The test of the mean (:func:`ddpdoctor.measure.numerics.above_others`) has one false-positive rate for a whole window: of windows of equal
ranks, at most 1 % name a rank. The rate is divided among the ranks evenly, and among the kinds of work by their share of the step.
``tests/measure/attribution/test_error_rate.py`` checks the rates and the power by simulation; ``docs/how-it-works.md`` states them. Two
cases are not tested: a single cycle (:func:`_stands_alone`) and outliers in a short window (:func:`standing_out`). If there are few ranks
and their work drifts, a rank that is slower for most of a short window may be named: the window does not show whether that lasts.

**Outliers in a short window.** The step log of a whole run can distinguish a rank that pauses from a machine that delays ranks at random
(:mod:`ddpdoctor.measure.numerics.significance`). A trace of five to ten steps cannot: a single pause is always on some rank, and
two random ones are on the same rank in a quarter of jobs of four ranks. On a device such a window has little noise: times of kernels with
equal work vary by one or two per cent. So a large outlier is reported as observed: which rank, in which of the recorded steps, by how
much. Its frequency is unknown.

A cycle of a rank is such an outlier in a kind of work if

- the excess over the rank's own undisturbed cycle, and over the others in the same cycle, is more than six standard deviations of all
  values in the window and more than 15 % of the step;
- the rank's whole cycle is longer as well: it gains no time in another kind of work;
- all other excesses in the window are less than half of it, because noise with a heavy tail has values of all sizes in between;
- the others' cycles are disturbed by at most half as much, because a step that is long on all ranks is long by different amounts.

It is reported if these cycles together cost a tenth of the window. If they are all on the same few ranks, these are stragglers.
If the rank changes, and there are at least three such cycles, the late rank rotates and none is a straggler. Two cycles on different ranks
are reported as nothing: a machine that delays ranks at random causes them.

This is not a test. Of simulated windows of 2 to 16 equal ranks whose work scatters by 2 to 10 %, at most 3 % report a rank; with a
heavy tail (Student's with three degrees of freedom) up to 10 % of windows of two cycles, 6 % of four and 3 % of eight.

Waiting for data on all ranks in the same cycles names no rank: see :func:`all_starve`.
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
    carried_by_few,
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
    """Minimum excess as a share of the step: NVRx and others call a rank slow from a few per cent on."""
    usual: float = 0.5
    """Part of the mean excess that more than half of the cycles must exceed; a less frequent excess is sporadic."""
    least_odds: float = 0.2
    """Minimum part of ``false_alarms`` for each kind of work: kinds with a smaller share of the step seldom reach ``persistent_share`` by
    chance."""
    spike_sigmas: float = 6.0
    """Robust standard deviations beyond the rank's usual excess from which a cycle is an outlier (SageMaker's StepOutlier uses 3
    plain standard deviations, which the outliers themselves inflate)."""
    spike_share: float = 0.15
    """Share of the median step that an outlier must also exceed."""
    fewest_of_drifting: int = 5
    """Number of cycles on CPUs from which their scatter includes disturbances that last for some cycles."""
    drifting_sigmas: float = 3.0
    """With fewer cycles, minimum excess in robust standard deviations, unless it is as large as an outlier: in three cycles of a healthy
    recorded job, the machine caused an excess of 2.3."""
    single_share: float = 0.1
    """Minimum excess in a window of one cycle as a share of the step, if the scatter between its ranks is known."""
    fewest_spikes: int = 2
    """Minimum number of outliers of a late rank: a single one is always on some rank."""
    straggles: float = 0.25
    """Part of the first rank's excess from which another rank is also a straggler: after a fix of the first rank only, the others would
    wait for less than that."""
    most_stalls: int = 2
    """Maximum number of outliers of a persistently late rank that are excluded from its excess; three are a pattern, as in the rules."""
    stalls_share: float = 0.1
    """Upper limit of their share of the cycles; a larger share is the rank's normal behaviour."""
    stall_weighs: float = 0.25
    """Part of the rank's excess in all other cycles from which they are excluded, because they distort its mean: the error of costs is up
    to a third."""
    window_share: float = 0.1
    """Minimum cost of the outliers together as a share of the window: a job counts as straggling from 1.1 times the ideal step time on
    (Lin et al., OSDI '25)."""
    apart: float = 0.5
    """Part of the smallest outlier that no other excess may exceed: noise with a heavy tail has values of all sizes in between."""
    alike: float = 0.5
    """Minimum wait of each rank, as part of the longest wait, if all ranks wait for data together."""


LATENESS = LatenessTuning()
_COMPARED = 4
"""Minimum number of ranks for which the scatter between ranks is used: with fewer, the median of the others may be the late rank's."""


def late_cycles(
    more: Array,
    work: Array,
    steps: Ints,
    step_ns: float,
    place_chance: float,
    step_share: float,
    *,
    drifts: bool = False,
) -> tuple[Mask, bool]:
    """[cycles, R] whether the excess of ``work`` over the other ranks is persistent or sporadic, and whether outliers are on random ranks.

    ``more``: the excess, [cycles, R] ns like ``work``. ``place_chance``: see :func:`ddpdoctor.measure.numerics.carried_by_few`.
    ``step_share``: share of the step that this kind of work takes. ``drifts``: disturbances last for several cycles, as on CPUs, where
    other programs, clocks and caches cause them.
    """
    middle = np.median(more, axis=0)
    scatter = scatter_of(more - middle)
    least = least_outlier(scatter, step_ns)
    persistent = is_persistent(more, work, step_ns, step_share)
    if drifts and len(more) < LATENESS.fewest_of_drifting:
        persistent &= middle >= np.minimum(LATENESS.drifting_sigmas * scatter, LATENESS.spike_share * step_ns)
    usual = np.where(persistent, middle, 0.0)
    always = (more > 0) & persistent
    beyond = more - usual
    spike = beyond > least
    # One threshold for all ranks decides which ranks have outliers: ranks that scatter more have fewer by their own threshold.
    struck = beyond > least[spike.any(axis=0)].min(initial=float(least.max()))
    carried = carried_by_few(struck, more, steps, place_chance) & spike
    by_chance = bool((spike & ~always).sum() >= LATENESS.fewest_spikes) and not carried.any()
    sporadic = carried & (carried.sum(axis=0) >= LATENESS.fewest_spikes)
    return (always & ~_stalls(more, spike, always)) | sporadic, by_chance


def least_outlier(scatter: Array, step_ns: float) -> Array:
    """[R] ns beyond a rank's usual excess from which a cycle is an outlier. ``scatter`` [R]: standard deviation of its cycles."""
    least: Array = np.maximum(LATENESS.spike_sigmas * scatter, LATENESS.spike_share * step_ns)
    return least


def most_of(lost_ns: Array) -> tuple[int, ...]:
    """Positions of the ranks with the largest losses, of [R] ns, in descending order: those with at least ``straggles`` of the largest."""
    order = np.argsort(-lost_ns, kind="stable")
    least_ns = LATENESS.straggles * lost_ns[order[0]]
    return tuple(int(rank) for rank in order if lost_ns[rank] >= least_ns and lost_ns[rank] > 0)


def is_of_one(lost_ns: Array) -> bool:
    """Whether at most one rank has a large part of the losses, [R]."""
    return len(most_of(lost_ns)) < 2


def _stalls(more: Array, spike: Mask, always: Mask) -> Mask:
    """[cycles, R] single long stalls of a persistently late rank that would distort its mean excess."""
    stalls = spike & always
    lasting_ns = np.where(always & ~stalls, more, 0.0).sum(axis=0)
    lone = (stalls.sum(axis=0) <= LATENESS.most_stalls) & (
        stalls.sum(axis=0) < len(more) * LATENESS.stalls_share
    )
    heavy = np.where(stalls, more, 0.0).sum(axis=0) > LATENESS.stall_weighs * lasting_ns
    alone: Mask = stalls & (lone & heavy)
    return alone


def is_persistent(more: Array, work: Array, step_ns: float, step_share: float) -> Mask:
    """[R] whether the excess is significantly above zero, occurs in more than half of the cycles, and is not negligible."""
    if len(more) == 1:
        return _stands_alone(more[0], step_ns)
    inside = _without_outliers(more)
    allowed = LATENESS.false_alarms * max(step_share, LATENESS.least_odds)
    least = np.maximum(LATENESS.persistent_share * step_ns, LATENESS.usual * inside.mean(axis=0))
    most = np.quantile(more, 0.5, axis=0, method="lower")
    persistent: Mask = above_others(inside, allowed, _without_outliers(work)) & (most > least)
    if more.shape[1] >= CHANCE.many_ranks:
        # A busy machine may disturb one of many ranks in most cycles. ``inside`` lacks the others' disturbances: compare with their mean.
        for rank in np.flatnonzero(persistent):
            alike = np.minimum(more, inside[:, rank].max())
            beyond = alike - np.delete(alike, rank, axis=1).mean(axis=1, keepdims=True)
            persistent[rank] = above_zero(beyond, allowed)[rank]
    return persistent


def _without_outliers(values: Array) -> Array:
    """``values`` [cycles, R] clipped to a range around the middle half of the rank's cycles, so that a single stall does not hide
    persistent lateness. The range depends on the width of the rank's middle half, or on that of the median rank if it is larger."""
    low, high = np.quantile(values, (0.25, 0.75), axis=0)
    half = (high - low) / 2
    reach = half + LATENESS.spike_sigmas * np.maximum(half, np.median(half))
    return np.clip(values, (low + high) / 2 - reach, (low + high) / 2 + reach)


def _stands_alone(more: Array, step_ns: float) -> Mask:
    """[R] whether the excess, [R] ns in the only cycle, is as large as an outlier's.

    One cycle cannot be tested. From four ranks on, the threshold depends on the scatter between the ranks.
    """
    if len(more) < _COMPARED:
        return more > LATENESS.spike_share * step_ns
    least_ns = max(LATENESS.spike_sigmas * float(scatter_of(more)), LATENESS.single_share * step_ns)
    return more > least_ns


def standing_out(comparison: Comparison) -> tuple[dict[LateCause, Mask], dict[LateCause, Mask]]:
    """Kind of work → [cycles, R] outliers in a short window: for kinds whose outliers are on a few ranks, and for kinds whose late rank
    rotates.

    Recorded kinds of work are judged separately. The outliers of all other kinds together must be on the same ranks, because a
    disturbance by the machine may occur during any of these kinds.
    """
    late_ns = _late_ns(comparison)
    least_ns = LATENESS.window_share * comparison.duration_ns.sum()
    large = {cause: ns > 0 for cause, ns in late_ns.items() if ns.max(axis=1).sum() >= least_ns}
    unrecorded = [ns > 0 for cause, ns in late_ns.items() if cause not in RECORDED]
    united = np.logical_or.reduce(unrecorded) if unrecorded else np.zeros(comparison.work.shape[:2], bool)
    of_few = {c: where for c, where in large.items() if _is_of_few(where if c in RECORDED else united)}
    in_turn = {c: where for c, where in large.items() if c not in RECORDED and _is_in_turn(where, united)}
    return of_few, in_turn


def all_starve(waits_ns: Array, step_ns: float) -> Mask:
    """[cycles] whether all ranks wait for data ([cycles, R] ns) much longer than usual and about as long as each other."""
    beyond = _beyond_usual(waits_ns)
    least, most = beyond.min(axis=1), beyond.max(axis=1)
    starving: Mask = (least > LATENESS.spike_share * step_ns) & (least >= LATENESS.alike * most)
    return starving


def _late_ns(comparison: Comparison) -> dict[LateCause, Array]:
    """Kind of work → [cycles, R] ns by which outliers in it make ranks late, else 0; only kinds that have outliers."""
    whole = _beyond_usual(comparison.more.sum(axis=2))
    common = others_median(_beyond_usual(comparison.work.sum(axis=2)))
    late_ns: dict[LateCause, Array] = {}
    for cause in LATE_COMPONENTS:
        work, beyond = _own(comparison, cause)
        more = np.minimum(_beyond_usual(work), _beyond_usual(beyond))
        late = np.minimum(more, whole)
        outlying = _outliers(late, more, comparison.step_ns) & (LATENESS.apart * more > common)
        if outlying.any():
            late_ns[cause] = np.where(outlying, late, 0.0)
    return late_ns


def _own(comparison: Comparison, cause: LateCause) -> tuple[Array, Array]:
    """[cycles, R] ns of one kind of work, and its excess over the other ranks.

    For work of unknown cause, only idle time of the device: another rank may have caused time in unmatched collectives, or time before
    the window.
    """
    if cause != LateCause.UNKNOWN:
        return comparison.work_of(cause), comparison.more_of(cause)
    column = INDEX[Component.IDLE]
    return comparison.work[:, :, column], comparison.more[:, :, column]


def _beyond_usual(values: Array) -> Array:
    """[cycles, R] difference from the rank's undisturbed cycle."""
    return values - undisturbed(values, its_own=True)


def _outliers(late: Array, more: Array, step_ns: float) -> Mask:
    """[cycles, R] outliers of ``late``, the part of ``more`` by which the whole cycle is longer; none if any other excess comes near."""
    outlying: Mask = late > least_outlier(scatter_of((more - np.median(more)).ravel()), step_ns)
    if outlying.any() and more[~outlying].max(initial=0.0) > LATENESS.apart * float(late[outlying].min()):
        return np.zeros_like(outlying)
    return outlying


def _is_of_few(where: Mask) -> bool:
    """Whether all outliers are on the same ranks, at most half of all, in each cycle that has any."""
    struck = where[where.any(axis=1)]
    return bool((struck == struck[0]).all()) and 2 * int(struck[0].sum()) <= where.shape[1]


def _is_in_turn(where: Mask, united: Mask) -> bool:
    """Whether outliers are on different ranks, in no cycle on more than half of all. ``united``: outliers of any kind."""
    struck = united[united.any(axis=1)]
    return (
        int(where.any(axis=1).sum()) >= PERSISTENCE.fewest_of_pattern
        and not is_of_one(where.sum(axis=0))
        and bool((2 * struck.sum(axis=1) <= where.shape[1]).all())
        and not _is_of_few(united)
    )
