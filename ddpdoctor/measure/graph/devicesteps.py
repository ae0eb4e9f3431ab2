"""Steps of windows in which nothing marks them: an optimizer that works on whole lists of tensors is known by its kernels.

What those kernels do between two reductions of gradients belongs to one update of the parameters, with the clipping before it and
the zeroing behind it; a step lasts from the end of one update to the end of the next. The ranks number their updates alike, by
the matched collective behind which each comes, wherever their windows begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.numerics import Ints
from ddpdoctor.measure.taxonomy import SyncKind
from ddpdoctor.measure.window import Window, launches
from ddpdoctor.trace import classify

Marks = Sequence[tuple[int, int, int]]


class _Tuning(msgspec.Struct, frozen=True):
    shortest: float = 0.3
    """Part of the usual distance between updates: what comes sooner is part of the same, as a norm that is reduced before it."""
    whole: float = 0.9
    """Part of the usual step that a window shows before its first update, where that step is whole."""


_TUNING = _Tuning()


def with_steps_of_updates(windows: Sequence[Window], rows: Ints) -> Sequence[Window]:
    """The windows with such steps where no rank's trace marks any; ``rows`` [M, R] are the matched collectives."""
    if any(window.steps or not window.on_device for window in windows):
        return windows
    found = [_updates(window, rows[:, r]) for r, window in enumerate(windows)]
    behind = _agreed([update[0] for update in found])
    if len(behind) < 2:
        return windows
    return [
        replace(window, steps=_steps(window, behind, *own))
        for window, own in zip(windows, found, strict=True)
    ]


def _updates(window: Window, matched: Ints) -> tuple[Ints, Ints]:
    """([U] the matched collective behind which each update comes, [U] when its last kernel was over; where launches were
    recorded, when that was launched)."""
    trace = window.trace
    kernels = np.flatnonzero(trace.category_mask("kernel") & trace.name_mask(classify.is_optimizer_kernel))
    reductions = np.array([kind == SyncKind.GRADIENTS for kind in window.collectives.kind], bool)
    known = np.flatnonzero(matched >= 0)
    known = known[reductions[matched[known]]]
    if not len(kernels) or not len(known):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    kernels = kernels[np.argsort(trace.start_ns[kernels], kind="stable")]
    # By their starts: which of a collective's end and what waits for it is read first is a matter of microseconds.
    begins = window.collectives.start[matched[known]]
    order = np.argsort(begins, kind="stable")
    start = trace.start_ns[kernels] + window.shifted_ns
    before = np.searchsorted(begins[order], start, side="right") - 1
    lasts = np.flatnonzero((before >= 0) & np.append(before[1:] != before[:-1], True))
    calls = launches(trace, kernels[lasts])
    over = np.where(calls >= 0, trace.end_ns[calls], trace.end_ns[kernels[lasts]]) + window.shifted_ns
    return _apart(known[order][before[lasts]], over)


def _apart(behind: Ints, over: Ints) -> tuple[Ints, Ints]:
    """The updates without those that the next one follows too soon to be a step of its own."""
    if len(over) < 2:
        return behind, over
    distance = np.diff(over)
    usual = np.median(distance[distance >= np.median(distance)])
    kept = np.append(distance >= _TUNING.shortest * usual, True)
    return behind[kept], over[kept]


def _agreed(behind: Sequence[Ints]) -> Ints:
    """Matched collectives behind which at least half of the ranks that tell their updates have one."""
    telling = sum(len(of_rank) > 0 for of_rank in behind)
    if telling < len(behind):
        return np.empty(0, np.int64)
    places, counts = np.unique(np.concatenate(behind), return_counts=True)
    agreed: Ints = places[2 * counts >= telling]
    return agreed


def _steps(window: Window, agreed: Ints, behind: Ints, over: Ints) -> Marks:
    """One rank's steps, numbered by the updates that the ranks agree on."""
    place = np.searchsorted(agreed, behind)
    same = (place < len(agreed)) & (agreed[np.minimum(place, len(agreed) - 1)] == behind)
    updates = list(zip(place[same].tolist(), over[same].tolist(), strict=True))
    steps = [
        (number, start, end) for (before, start), (number, end) in pairwise(updates) if number == before + 1
    ]
    if not steps:
        return []
    first, until = updates[0]
    usual = float(np.median([end - start for _, start, end in steps]))
    if until - window.span[0] >= _TUNING.whole * usual:
        steps.insert(0, (first, window.span[0], until))
    return steps
