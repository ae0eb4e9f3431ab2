"""What a script does for a checkpoint before it calls ``torch.save``, and after: ``state_dict()``, copies, a file's name.

Nothing records it but the time itself: a gap between the phases in which the rank saves is longer than that gap is in other steps.
"""

from __future__ import annotations

import numpy as np

from ddpdoctor.measure.numerics import EMPTY, Intervals, subtract, union, union_of
from ddpdoctor.measure.phases import Gaps

_FEWEST_USUAL = 3
"""Gaps without a save from which on it is known how long such a gap usually is: a pattern's fewest, as rules have it."""


def prepared_for(saves: Intervals, gaps: Gaps, recorded: Intervals) -> Intervals:
    """The time that belongs to the checkpoints in the gaps where the ``saves`` lie, ns: what of such a gap nothing ``recorded``
    covers, beyond the median of the same kind of gap without a save. None of it where nearly each gap of the kind has one."""
    starts, ends = gaps.times
    if not len(starts):
        return EMPTY
    place = np.searchsorted(starts, saves[0], side="right") - 1
    saving = np.zeros(len(starts), bool)
    saving[place[(place >= 0) & (saves[0] < ends[place])]] = True
    free = subtract(gaps.times, recorded)
    whose = np.searchsorted(starts, free[0], side="right") - 1
    length = np.bincount(whose, free[1] - free[0], minlength=len(starts))
    usual = {}
    for kind in np.unique(gaps.kind[saving]).tolist():
        others = length[(gaps.kind == kind) & ~saving]
        usual[kind] = float(np.median(others)) if len(others) >= _FEWEST_USUAL else np.inf
    pieces = [EMPTY]
    for at in np.flatnonzero(saving):
        own = slice(*np.searchsorted(whose, (at, at + 1)))
        pieces.append(_all_but((free[0][own], free[1][own]), usual[int(gaps.kind[at])]))
    return union_of(*pieces)


def _all_but(times: Intervals, first_ns: float) -> Intervals:
    """Without as much at the beginning."""
    lengths = times[1] - times[0]
    before = np.cumsum(lengths) - lengths
    return union(times[0] + np.clip(first_ns - before, 0, lengths), times[1])
