"""Single cycles of one rank that stand out of a short window, which cannot tell how often such cycles come.

The step log of a whole run tells a rank that pauses from a machine that disturbs whom it meets (:mod:`.chance`). In a trace
of five to ten steps nothing is unlikely enough for that: one pause is some rank's in any case, and two are the same one's in
every fourth job of four ranks. On a device such a window is quiet, though: kernels of equal work repeat to one or two per
cent. What stands far out of everything else in it, and makes up a good part of it, is therefore told as what was seen: who,
in which of the recorded steps, by how much. How often it happens is left open.

A cycle of a rank stands out in a kind of work where

- the rank does more of it than it does itself in an undisturbed cycle, and than the others do in the same cycle, by six
  scatters of all that the window holds and by 15 % of the step;
- it is the later for it in the whole: it does not make up for it in another kind of work;
- nothing else comes near: what else the ranks do beyond their usual is less than half of that. Noise with a heavy tail
  has values of all sizes in between;
- the others are at most half as much disturbed in that cycle: a step that is long everywhere is long by different amounts.

It is told where they cost a tenth of the window together. Where all such cycles are the same few ranks', these are accused;
where they are now one rank's, now another's, in three cycles at least, all wait in turn and nobody is. In two cycles that is
what a machine does that disturbs whom it meets.

Waiting for data that strikes all ranks in the same cycles is no one's: see :func:`all_stall`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import Array, scatter_of

SIGMAS = 6.0
"""Robust standard deviations of all ranks and cycles."""
STEP_SHARE = 0.15
"""Share of the median step, as for single outliers of a whole run."""
WINDOW_SHARE = 0.1
"""Share of the window's time that the cycles must cost together: a job counts as straggling from 1.1 times the ideal step
time on (Lin et al., OSDI '25)."""
APART = 0.5
"""Part of the least outlier that nothing else may reach."""
FEWEST_CYCLES = 4
FEWEST_IN_TURN = 3
"""Cycles, and ranks with one of them at least two, from which on pauses that meet any rank are told: a pattern's fewest."""
ALIKE = 0.5
"""Part of the longest wait that every rank waits at least where all stall together."""
_NOTHING_KNOWN = ("unknown",)
"""Kinds that are no work of the rank's: time in collectives that were not matched is as likely another rank's fault."""
_UNDISTURBED = 0.25
"""Quantile of the cycles that stands for an undisturbed one: outliers may be more than half of them."""

Places = NDArray[np.bool_]


def stands_out(
    kinds: Mapping[str, Sequence[int]],
    named: Collection[str],
    work: Array,
    totals: Array,
    duration: Array,
) -> tuple[dict[str, Places], dict[str, Places]]:
    """Kind → [cycles, R] where it stands out, for kinds in which that accuses a few ranks, and for those in which the ranks
    are late in turn; kinds in which nothing does are left out.

    ``kinds`` gives the columns of ``work`` and ``totals`` [cycles, R, C] ns: the work, and what is beyond the other ranks';
    ``duration`` [cycles] ns. Kinds in ``named`` are recorded as such, and each is judged for itself. Of the others, all
    together must be the same ranks': a disturbance is of another kind wherever it meets a rank.
    """
    if len(work) < FEWEST_CYCLES:
        return {}, {}
    step_ns = float(np.median(duration))
    whole = _beyond_usual(totals.sum(axis=2))
    common = _common(_beyond_usual(work.sum(axis=2)))
    found: dict[str, tuple[Places, Array]] = {}
    for kind, columns in kinds.items():
        if kind in _NOTHING_KNOWN:
            continue
        more = np.minimum(
            _beyond_usual(work[:, :, columns].sum(axis=2)), _beyond_usual(totals[:, :, columns].sum(axis=2))
        )
        places = _outliers(np.minimum(more, whole), more, step_ns)
        places &= APART * more > common
        if places.any():
            found[kind] = places, np.where(places, np.minimum(more, whole), 0.0)
    every = {kind: places for kind, (places, _) in found.items()}
    large = {
        kind: places
        for kind, (places, extra) in found.items()
        if extra.max(axis=1).sum() >= WINDOW_SHARE * duration.sum()
    }
    unnamed = [kind for kind in every if kind not in named]
    united = (
        np.logical_or.reduce([every[kind] for kind in unnamed]) if unnamed else np.zeros(whole.shape, bool)
    )
    few = {kind: of for kind, of in large.items() if _of_few(of if kind in named else united)}
    in_turn = {kind: of for kind, of in large.items() if kind not in named and _of_any(of, united)}
    return few, in_turn


def all_stall(waits: Array, step_ns: float) -> Places:
    """[cycles] in which all ranks wait ([cycles, R] ns) by far longer than they usually do, and about as long."""
    beyond = _beyond_usual(waits)
    least, most = beyond.min(axis=1), beyond.max(axis=1)
    stalled: Places = (least > STEP_SHARE * step_ns) & (least >= ALIKE * most)
    return stalled


def _beyond_usual(values: Array) -> Array:
    """[cycles, R] beyond the rank's own undisturbed cycle."""
    beyond: Array = values - np.quantile(values, _UNDISTURBED, axis=0)
    return beyond


def _common(beyond: Array) -> Array:
    """[cycles, R] by which the (upper) median of the other ranks is disturbed in the same cycle."""
    middle = (beyond.shape[1] - 1) // 2
    order = np.argsort(beyond, axis=1, kind="stable")
    place = np.argsort(order, axis=1, kind="stable")
    # Without its own, what stands behind it moves up by one place.
    return np.take_along_axis(np.take_along_axis(beyond, order, axis=1), middle + (place <= middle), axis=1)


def _outliers(late: Array, more: Array, step_ns: float) -> Places:
    """[cycles, R] where ``late``, the part of ``more`` that the whole cycle shows, stands out of all; none where
    something comes near."""
    scatter = float(scatter_of((more - np.median(more)).ravel()))
    places: Places = late > max(SIGMAS * scatter, STEP_SHARE * step_ns)
    if places.any() and more[~places].max(initial=0.0) > APART * float(late[places].min()):
        return np.zeros_like(places)
    return places


def _of_few(places: Places) -> bool:
    """Whether all cycles that stand out are those of the same ranks, at most half of all."""
    struck = places[places.any(axis=1)]
    return bool((struck == struck[0]).all()) and 2 * int(struck[0].sum()) <= places.shape[1]


def _of_any(places: Places, united: Places) -> bool:
    """Whether now this rank is struck, now that one, never more than half of all together. ``united``: in any kind."""
    struck = united[united.any(axis=1)]
    return (
        len(struck) >= FEWEST_IN_TURN
        and int(places.any(axis=1).sum()) >= FEWEST_IN_TURN
        and int(places.any(axis=0).sum()) >= 2
        and bool((2 * struck.sum(axis=1) <= places.shape[1]).all())
        and not _of_few(united)
    )
