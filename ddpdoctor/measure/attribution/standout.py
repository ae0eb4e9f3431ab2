"""Single cycles of one rank that stand out of a short window, which cannot show how often such cycles occur.

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

from ddpdoctor.measure.numerics import PERSISTENCE, Array, Mask, scatter_of, undisturbed
from ddpdoctor.measure.taxonomy import INDEX, LATE_COMPONENTS, RECORDED, Component, LateCause

from .comparison import Comparison, others_median
from .lateness import LATENESS, is_of_one, least_outlier


class StandoutTuning(msgspec.Struct, frozen=True):
    """What stands out of a short window, and what of it is reported."""

    window_share: float = 0.1
    """Share of the window's time that the cycles must cost together: a job counts as straggling from 1.1 times the ideal step
    time on (Lin et al., OSDI '25)."""
    apart: float = 0.5
    """Part of the least outlier that nothing else may reach: the tail of noise has values of all sizes in between."""
    alike: float = 0.5
    """Part of the longest wait that every rank waits at least where all starve together."""


STANDOUT = StandoutTuning()


class StandingOut(msgspec.Struct, frozen=True):
    """Kind of work → [cycles, R] where it stands out; kinds in which nothing does are left out."""

    of_few: dict[LateCause, Mask]
    """Where that makes a few ranks stragglers."""
    in_turn: dict[LateCause, Mask]
    """Where ranks are late in turn."""


def standing_out(comparison: Comparison) -> StandingOut:
    """Look for cycles that stand out of a short window.

    Kinds of work that are recorded as such are each judged for themselves. Of the others, all together must be the same ranks':
    a disturbance is of another kind wherever it meets a rank.
    """
    late_ns = _late_ns(comparison)
    large = {cause: ns > 0 for cause, ns in late_ns.items() if _is_reported(ns, comparison.duration_ns)}
    unrecorded = [ns > 0 for cause, ns in late_ns.items() if cause not in RECORDED]
    united = np.logical_or.reduce(unrecorded) if unrecorded else np.zeros(comparison.work.shape[:2], bool)
    return StandingOut(
        of_few={
            cause: where
            for cause, where in large.items()
            if _is_of_few(where if cause in RECORDED else united)
        },
        in_turn={
            cause: where
            for cause, where in large.items()
            if cause not in RECORDED and _is_in_turn(where, united)
        },
    )


def all_starve(waits_ns: Array, step_ns: float) -> Mask:
    """[cycles] in which all ranks wait for data ([cycles, R] ns) by far longer than they usually do, and about as long."""
    beyond = _beyond_usual(waits_ns)
    least, most = beyond.min(axis=1), beyond.max(axis=1)
    starving: Mask = (least > LATENESS.spike_share * step_ns) & (least >= STANDOUT.alike * most)
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
        outlying = _outliers(late, more, comparison.step_ns) & (STANDOUT.apart * more > common)
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


def _is_reported(late_ns: Array, duration_ns: Array) -> bool:
    """Whether cycles that stand out, [cycles, R], cost enough of the window."""
    return bool(late_ns.max(axis=1).sum() >= STANDOUT.window_share * duration_ns.sum())


def _beyond_usual(values: Array) -> Array:
    """[cycles, R] beyond the rank's own undisturbed cycle."""
    return values - undisturbed(values, its_own=True)


def _outliers(late: Array, more: Array, step_ns: float) -> Mask:
    """[cycles, R] where ``late``, the part of ``more`` that the whole cycle shows, stands out of all; none where
    something comes near."""
    outlying: Mask = late > least_outlier(scatter_of((more - np.median(more)).ravel()), step_ns)
    if outlying.any() and more[~outlying].max(initial=0.0) > STANDOUT.apart * float(late[outlying].min()):
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
