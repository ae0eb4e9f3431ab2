"""What a script does for a checkpoint before it calls ``torch.save``, and after: ``state_dict()``, copies, a file's name.

Nothing records it but the time itself: a gap between the phases in which the rank saves is longer than that gap is in other steps.
Where ranks meet in the gap, at a barrier behind the save for example, it matters on which side of it the gap is longer: what others wait
for there is over at the barrier.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import EMPTY, Intervals, subtract, union, union_of
from ddpdoctor.measure.phases import Gaps

_FEWEST_USUAL = 3
"""Gaps without a save from which on it is known how long such a gap usually is: a pattern's fewest, as rules have it."""


def prepared_for(saves: Intervals, gaps: Gaps, recorded: Intervals, meetings: Intervals) -> Intervals:
    """The time that belongs to the checkpoints in the gaps where the ``saves`` lie, ns: what of such a gap neither what is ``recorded``
    nor one of the ``meetings`` covers, beyond the median of the same kind of gap without a save. None of it where nearly each gap of the
    kind has one."""
    at = gaps.at(saves[0])
    saving = np.unique(at[at >= 0])
    free = subtract(gaps.times, union_of(recorded, meetings))
    whose = gaps.at(free[0])
    length = np.bincount(whose, free[1] - free[0], minlength=len(gaps.kind))
    without = np.ones(len(gaps.kind), bool)
    without[saving] = False
    usual_ns = {}
    for kind in np.unique(gaps.kind[saving]).tolist():
        others = length[without & (gaps.kind == kind)]
        usual_ns[kind] = float(np.median(others)) if len(others) >= _FEWEST_USUAL else np.inf
    pieces = [EMPTY]
    for gap in saving.tolist():
        own = slice(*np.searchsorted(whose, (gap, gap + 1)))
        times, begun = (free[0][own], free[1][own]), saves[0][at == gap]
        pieces.append(_beyond_usual(times, begun, meetings, usual_ns[int(gaps.kind[gap])]))
    return union_of(*pieces)


def _beyond_usual(times: Intervals, saves: NDArray[Any], meetings: Intervals, usual_ns: float) -> Intervals:
    """The ``times`` of one gap without ``usual_ns`` of them. The meetings divide the gap into parts: what is usual is taken first from
    those behind the last of the ``saves``, from the last part on, then from those before, and only the rest from parts with a save."""
    part = np.searchsorted(meetings[1], times[0], side="right")
    with_save = np.searchsorted(meetings[1], saves, side="right")
    behind = part > with_save.max()
    order = np.lexsort((np.where(behind, -part, part), np.isin(part, with_save), ~behind))
    lengths = (times[1] - times[0])[order]
    usual = np.empty(len(order))
    usual[order] = np.clip(usual_ns - (np.cumsum(lengths) - lengths), 0, lengths)
    return union(times[0] + usual, times[1])
