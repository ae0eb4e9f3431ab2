"""The cycles in which a rank's excess in one kind of work counts.

It is *persistent* where its mean over the cycles is not zero by chance, by Student's test, and *sporadic* where single cycles stand
out of the rank's usual ones. Scatter that hits all ranks alike, as on a busy machine, is neither.

The test of the mean (:func:`ddpdoctor.measure.numerics.above_others`) has one error rate for a whole window: in at most one of a
hundred windows of ranks alike a rank is named. It is divided among the ranks evenly, and among the kinds of work by the part of the
step that each takes. The rates and what is found at them are held by simulation (``tests/measure/attribution/test_error_rate.py``) and
stated in ``docs/how-it-works.md``. Two cases are no test: a single cycle (:func:`_stands_alone`) and single cycles of a short window
(:func:`standing_out`). Of few ranks whose work drifts, one that stays longer than the others' for most of a short window may be named:
it is late while that lasts, and nothing in the window tells it from a lasting fault.

A single cycle of one rank may stand out of a short window, which cannot show how often such cycles occur.

The step log of a whole run can distinguish a rank that pauses from a machine that delays ranks at random
(:mod:`ddpdoctor.measure.numerics.significance`). A trace of five to ten steps cannot: a single pause is always on some rank, and
two are on the same rank in every fourth job of four ranks. On a device such a window has little noise, though: kernels of equal
work repeat to one or two per cent. So an outlier far from everything else in the window, and a good part of it, is reported as
observed: which rank, in which of the recorded steps, by how much. How often it happens remains open.

A cycle of a rank stands out in a kind of work where

- the rank does more of it than it does itself in an undisturbed cycle, and than the others do in the same cycle, by six
  scatters of all that the window holds and by 15 % of the step;
- it is the later for it in the whole: it does not make up for it in another kind of work;
- nothing else comes near: what else the ranks do beyond their usual is less than half of that. Noise with a heavy tail
  has values of all sizes in between;
- the others are at most half as much disturbed in that cycle: a step that is long everywhere is long by different amounts.

It is reported if these cycles together cost a tenth of the window. If they are all on the same few ranks, these are stragglers.
If the rank changes, and there are at least three such cycles, the ranks wait for each other in turn and none is a straggler. Two
cycles on different ranks are what a machine does that delays ranks at random.

That is no test. Of simulated windows of 2 to 16 ranks alike, whose work scatters by 2 to 10 %, at most 3 % report a rank, and with a
heavy tail (Student's with three degrees of freedom) up to 10 % of those of two cycles, 6 % of four and 3 % of eight.

Waiting for data that strikes all ranks in the same cycles is no one's: see :func:`all_starve`.
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
    """What stands out of a rank's scatter."""

    false_alarms: float = 0.01
    """Part of the windows of ranks alike in which one may be called persistently late."""
    persistent_share: float = 0.01
    """Share of the step below which an excess is not looked at: NVRx and others call a rank slow from a few per cent on."""
    usual: float = 0.5
    """Part of the mean excess that more than half of the cycles must reach: what comes now and then is sporadic."""
    least_odds: float = 0.2
    """Part of these that every kind of work has: those that take less of the step seldom reach the share below by chance."""
    spike_sigmas: float = 6.0
    """Robust standard deviations beyond a rank's own usual excess that make a cycle an outlier (SageMaker's StepOutlier uses 3
    of the plain ones, which the outliers themselves inflate)."""
    spike_share: float = 0.15
    """Share of the median step that an outlier must exceed as well."""
    fewest_of_drifting: int = 5
    """Cycles on CPUs from which on their scatter shows how a machine disturbs a rank for some cycles at a time."""
    drifting_sigmas: float = 3.0
    """Robust standard deviations of its cycles that an excess must have in fewer, if it is smaller than an outlier: in three cycles of a
    healthy recorded job, one of 2.3 was the machine's."""
    single_share: float = 0.1
    """Share of the step that is enough in the only cycle of a window whose ranks show how they scatter."""
    fewest_spikes: int = 2
    """Outliers of a rank below which it is not late with them: one is some rank's in any case."""
    straggles: float = 0.25
    """Part of the first rank's excess from which on another rank is late, too: the others would wait for less than that
    if only the first were fixed."""
    most_stalls: int = 2
    """Outliers of a rank that is late in every cycle, which are no part of what lasts; three are a pattern, as rules have it."""
    stalls_share: float = 0.1
    """And the part of all cycles that they must be less than: of few cycles none is beyond the usual."""
    stall_weighs: float = 0.25
    """Part of what the rank loses in all other cycles from which on they would spoil its mean: prices are good to a third."""
    window_share: float = 0.1
    """Share of the window's time that the cycles must cost together: a job counts as straggling from 1.1 times the ideal step
    time on (Lin et al., OSDI '25)."""
    apart: float = 0.5
    """Part of the least outlier that nothing else may reach: the tail of noise has values of all sizes in between."""
    alike: float = 0.5
    """Part of the longest wait that every rank waits at least where all starve together."""


LATENESS = LatenessTuning()
_COMPARED = 4
"""Ranks from which on the median of the others is never the late one's, so that their scatter can stand for that over the cycles.
That follows from how they are compared, and is no matter of degree."""


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
    """Where an excess of ``work`` over the other ranks, ``more`` (both [cycles, R] ns), is persistent or sporadic.

    ``place_chance``: see :func:`ddpdoctor.measure.numerics.carried_by_few`. ``step_share``: the part of a usual step that this kind
    of work takes. ``drifts``: other programs, clocks and caches disturb neighbouring cycles alike, as on CPUs. Also whether there are
    outliers that strike the ranks by chance.
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
    # Ranks that scatter more have fewer outliers of their own; whose they are is judged by one measure for all.
    struck = beyond > least[spike.any(axis=0)].min(initial=float(least.max()))
    carried = carried_by_few(struck, more, steps, place_chance) & spike
    by_chance = bool((spike & ~always).sum() >= LATENESS.fewest_spikes) and not carried.any()
    sporadic = carried & (carried.sum(axis=0) >= LATENESS.fewest_spikes)
    return (always & ~_stalls(more, spike, always)) | sporadic, by_chance


def least_outlier(scatter: Array, step_ns: float) -> Array:
    """[R] ns beyond its usual from which on a cycle of a rank is an outlier, by the ``scatter`` [R] of its cycles."""
    least: Array = np.maximum(LATENESS.spike_sigmas * scatter, LATENESS.spike_share * step_ns)
    return least


def most_of(lost_ns: Array) -> tuple[int, ...]:
    """Positions of the ranks that make the others lose most, of [R] ns, the first one first."""
    order = np.argsort(-lost_ns, kind="stable")
    least_ns = LATENESS.straggles * lost_ns[order[0]]
    return tuple(int(rank) for rank in order if lost_ns[rank] >= least_ns and lost_ns[rank] > 0)


def is_of_one(lost_ns: Array) -> bool:
    """Whether that is one rank, or none."""
    return len(most_of(lost_ns)) < 2


def _stalls(more: Array, spike: Mask, always: Mask) -> Mask:
    """[cycles, R] where a rank that is late in every cycle stopped once or twice for so long that its mean would tell of that:
    such a stall is no part of what lasts."""
    stalls = spike & always
    lasting_ns = np.where(always & ~stalls, more, 0.0).sum(axis=0)
    lone = (stalls.sum(axis=0) <= LATENESS.most_stalls) & (
        stalls.sum(axis=0) < len(more) * LATENESS.stalls_share
    )
    heavy = np.where(stalls, more, 0.0).sum(axis=0) > LATENESS.stall_weighs * lasting_ns
    alone: Mask = stalls & (lone & heavy)
    return alone


def is_persistent(more: Array, work: Array, step_ns: float, step_share: float) -> Mask:
    """[R] whose excess is above zero by more than chance, in more than half of the cycles, and no small part of the step."""
    if len(more) == 1:
        return _stands_alone(more[0], step_ns)
    inside = _without_outliers(more)
    allowed = LATENESS.false_alarms * max(step_share, LATENESS.least_odds)
    least = np.maximum(LATENESS.persistent_share * step_ns, LATENESS.usual * inside.mean(axis=0))
    most = np.quantile(more, 0.5, axis=0, method="lower")
    persistent: Mask = above_others(inside, allowed, _without_outliers(work)) & (most > least)
    if more.shape[1] >= CHANCE.many_ranks:
        # Of many ranks a busy machine strikes one in most cycles, and what it does to the others is then outside of their middle halves.
        for rank in np.flatnonzero(persistent):
            alike = np.minimum(more, inside[:, rank].max())
            beyond = alike - np.delete(alike, rank, axis=1).mean(axis=1, keepdims=True)
            persistent[rank] = above_zero(beyond, allowed)[rank]
    return persistent


def _without_outliers(values: Array) -> Array:
    """``values`` [cycles, R] without what is far outside of the middle half of a rank's cycles, by its own width or the median rank's,
    lest a single stall hide what lasts."""
    low, high = np.quantile(values, (0.25, 0.75), axis=0)
    half = (high - low) / 2
    reach = half + LATENESS.spike_sigmas * np.maximum(half, np.median(half))
    return np.clip(values, (low + high) / 2 - reach, (low + high) / 2 + reach)


def _stands_alone(more: Array, step_ns: float) -> Mask:
    """[R] whose excess, [R] ns in the only cycle, is as large as an outlier's. That is no test: of one cycle there is none. Where
    four ranks show by how much they differ, it must be larger than that, and less of the step is enough."""
    if len(more) < _COMPARED:
        return more > LATENESS.spike_share * step_ns
    least_ns = max(LATENESS.spike_sigmas * float(scatter_of(more)), LATENESS.single_share * step_ns)
    return more > least_ns


def standing_out(comparison: Comparison) -> tuple[dict[LateCause, Mask], dict[LateCause, Mask]]:
    """Kind of work → [cycles, R] where it stands out of a short window: of the kinds in which that makes a few ranks stragglers, and of
    those in which ranks are late in turn.

    Kinds of work that are recorded as such are each judged for themselves. Of the others, all together must be the same ranks':
    a disturbance is of another kind wherever it meets a rank.
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
    """[cycles] in which all ranks wait for data ([cycles, R] ns) by far longer than they usually do, and about as long."""
    beyond = _beyond_usual(waits_ns)
    least, most = beyond.min(axis=1), beyond.max(axis=1)
    starving: Mask = (least > LATENESS.spike_share * step_ns) & (least >= LATENESS.alike * most)
    return starving


def _late_ns(comparison: Comparison) -> dict[LateCause, Array]:
    """Kind of work → [cycles, R] ns by which it makes ranks late where it stands out, else 0; without kinds in which it never
    does."""
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
    """[cycles, R] ns of one kind of work, and of what is beyond the other ranks'.

    Of what has no known cause, a device that stands idle is late itself; time in collectives that were not matched, or before the
    window, is as likely another rank's fault.
    """
    if cause != LateCause.UNKNOWN:
        return comparison.work_of(cause), comparison.more_of(cause)
    column = INDEX[Component.IDLE]
    return comparison.work[:, :, column], comparison.more[:, :, column]


def _beyond_usual(values: Array) -> Array:
    """[cycles, R] beyond the rank's own undisturbed cycle."""
    return values - undisturbed(values, its_own=True)


def _outliers(late: Array, more: Array, step_ns: float) -> Mask:
    """[cycles, R] where ``late``, the part of ``more`` that the whole cycle shows, stands out of all; none where
    something comes near."""
    outlying: Mask = late > least_outlier(scatter_of((more - np.median(more)).ravel()), step_ns)
    if outlying.any() and more[~outlying].max(initial=0.0) > LATENESS.apart * float(late[outlying].min()):
        return np.zeros_like(outlying)
    return outlying


def _is_of_few(where: Mask) -> bool:
    """Whether all cycles that stand out are those of the same ranks, at most half of all."""
    struck = where[where.any(axis=1)]
    return bool((struck == struck[0]).all()) and 2 * int(struck[0].sum()) <= where.shape[1]


def _is_in_turn(where: Mask, united: Mask) -> bool:
    """Whether now this rank is struck, now that one, never more than half of all together. ``united``: in any kind."""
    struck = united[united.any(axis=1)]
    return (
        int(where.any(axis=1).sum()) >= PERSISTENCE.fewest_of_pattern
        and not is_of_one(where.sum(axis=0))
        and bool((2 * struck.sum(axis=1) <= where.shape[1]).all())
        and not _is_of_few(united)
    )
