"""Finds steps that are longer than the others, and their pattern: single steps, every n-th step, from some step on, or steady growth.

The length of a step is the time between its last rank's end and the previous one. The typical length is a running quantile, so that
a slow drift does not count as pauses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise

import msgspec
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ddpdoctor.measure.numerics import Array, Ints, Mask, best_split, scatter_of, trend


class PatternKind(StrEnum):
    """Pattern of the longer steps."""

    ONCE = "once"
    """A few single steps."""
    EVERY_NTH = "every_nth"
    FROM_STEP = "from_step"
    """A level change, longer or shorter, up to the next change or the end."""
    GROWING = "growing"
    """The step length rises steadily."""


class StepPattern(msgspec.Struct, frozen=True):
    """Steps that differ from the others in one way."""

    kind: PatternKind
    steps: list[int]
    """Numbers of these steps; of a level change or growth, the first and the last."""
    extra_s: float
    """Total excess of these steps over the typical length, seconds. Of a level change: excess of the slower side over the faster level.
    Never negative."""
    every: int | None = None
    """Period in steps, for :attr:`PatternKind.EVERY_NTH`."""
    hits: int | None = None
    """Number of long steps at multiples of the period."""
    chances: int | None = None
    """Number of steps at multiples of the period."""
    before_ms: float | None = None
    """Median length before the change, or level at the start of the growth."""
    after_ms: float | None = None
    """Median length after the change, or level at the end of the growth."""

    @property
    def recurs(self) -> bool:
        """Whether it is more than ``most_pauses`` single steps."""
        return self.kind is not PatternKind.ONCE or len(self.steps) > _TUNING.most_pauses

    def long_and_usual_steps(self, numbers: Ints) -> tuple[Mask, Mask]:
        """Two masks [N] of the steps ``numbers``: the longer ones, and the typical ones to compare them with. For a growth, the typical
        steps are its first quarter and the longer ones the rest."""
        first, last = self.steps[0], self.steps[-1]
        match self.kind:
            case PatternKind.FROM_STEP:
                behind = (first <= numbers) & (numbers <= last)
                # Step 0 includes start-up.
                before = (max(2 * first - last - 1, 1) <= numbers) & (numbers < first)
                is_slower = (self.after_ms or 0.0) >= (self.before_ms or 0.0)
                return (behind, before) if is_slower else (before, behind)
            case PatternKind.GROWING:
                quarter = first + (last - first) // 4
                return (quarter <= numbers) & (numbers <= last), (max(first, 1) <= numbers) & (
                    numbers < quarter
                )
        long = np.isin(numbers, self.steps)
        return long, ~long


class Tuning(msgspec.Struct, frozen=True):
    """Thresholds for unusual steps."""

    fewest: int = 20
    """Fewest steps for a typical length."""
    window: int = 101
    """Steps of the running quantile; odd."""
    scatters: float = 6.0
    """A long step exceeds the typical length by this multiple of the scatter (1.4826 x the median absolute deviation). This holds for one
    step in 10^9 of normally distributed lengths, and for 1 in 200 with heavy tails (Student's t, 3 degrees of freedom)."""
    share: float = 0.25
    """A long step exceeds the typical length by at least this share of it."""
    beyond_lengths: tuple[float, ...] = (0.0, 1.0, 4.0)
    """A period is searched for among the long steps whose excess is at least this multiple of the typical length, for each value."""
    slots: int = 4
    """Fewest long steps of a period."""
    usual: float = 0.3
    """Quantile of the surrounding lengths that is a step's typical length."""
    regular: float = 0.9
    """Fewest of the steps at multiples of the period that must be long, as a share."""
    between: float = 0.3
    """Most of the other steps that may be long, as a share."""
    by_chance: float = 0.01
    """Largest expected number of equally good periods among random long steps, over all periods and phases tried."""
    farthest: int = 5000
    """Longest period tried, in steps."""
    pause_s: float = 1.0
    """A single long step is a pause if its excess is at least this many seconds."""
    pause_lengths: float = 10.0
    """It is also a pause if its excess is at least this multiple of the typical length."""
    most_pauses: int = 2
    """Most pauses that need to meet only one of ``pause_s`` and ``pause_lengths``; if there are more, each must meet both."""
    rare: float = 0.02
    """Largest share of the steps that may be such pauses."""
    level: float = 0.05
    """Smallest relative level change in a series of ``blocks`` blocks. With n blocks it is larger by sqrt(blocks / n): the noise of
    neighbouring steps is often correlated."""
    blocks: int = 160
    """Most blocks into which the series is divided to find changes. A block is the median of neighbouring steps."""
    fewest_in_block: int = 5
    """Steps of a block: the median of fewer is noisy."""
    level_scatters: float = 3.0
    """A level change is at least this multiple of the scatter of the blocks around their levels."""
    fewest_blocks: int = 4
    """Fewest blocks of one level."""
    as_slow: float = 0.25
    """A further level belongs to the slower side if it exceeds the faster level by at least this share of the change."""
    most_changes: int = 4
    """Most level changes searched for; more frequent alternation is noise."""
    z_score: float = 4.0
    """A series rises if Kendall's statistic exceeds this many standard deviations."""
    each_quarter: float = 0.1
    """Least part of the growth from the median of each quarter to that of the next; on a straight line it is a third."""


_TUNING = Tuning()
_LEAST_S = 1e-9
"""Lower limit of a length before its logarithm is taken."""
_QUANTILE_SCATTER_RATIO = 1.6
"""For normal lengths and the 30 % quantile: scatter of the shorter steps around the quantile / their scatter around their own median."""
_QUARTERS = 4
_NORMAL_PER_DIFFERENCE = 0.886
"""For normal values: standard deviation / mean absolute difference of two = sqrt(pi) / 2."""


def step_patterns(numbers: Ints, lengths_s: Array, counted: Mask) -> list[StepPattern]:
    """The patterns of a run, at most one of each kind. ``numbers`` [N]: increasing step numbers; ``lengths_s`` [N]: their lengths in
    seconds; ``counted`` [N]: steps to use, without warm-up and steps disturbed by a profiler or a suspension."""
    numbers, lengths = numbers[counted], lengths_s[counted]
    if len(numbers) < _TUNING.fewest:
        return []
    usual = usual_lengths(lengths)
    extra = lengths - usual
    is_long = long_steps(lengths, usual)
    period = _costliest_period(numbers, is_long, extra, usual)
    found = [period] if period is not None else []
    if period is not None:
        is_long = is_long & ~np.isin(numbers, period.steps)
    pauses = _pauses(numbers, is_long, extra, usual)
    if pauses is not None:
        found.append(pauses)
    others = ~np.isin(numbers, [step for pattern in found for step in pattern.steps])
    if period is not None and period.every is not None:
        others &= numbers % period.every != period.steps[0] % period.every
    return [*found, *_levels(numbers[others], lengths[others])]


def usual_lengths(lengths: Array) -> Array:
    """[N] running 30 % quantile of the lengths, seconds. Even if every second step is long, it follows the shorter ones."""
    half = min(_TUNING.window // 2, len(lengths) - 1)
    windows = sliding_window_view(np.pad(lengths, half, mode="reflect"), 2 * half + 1)
    place = int(_TUNING.usual * (2 * half + 1))
    usual: Array = np.partition(windows, place, axis=-1)[:, place]
    return usual


def without_run_ahead(numbers: Ints, lengths_s: Array) -> Array:
    """[N] lengths without the effect of a host that issues work ahead of its device. Such a host's steps are short, except those in which
    it waits for the device, for example to log a loss. The excess of these periodic steps is spread over the steps of the period."""
    if len(numbers) < _TUNING.fewest:
        return lengths_s
    usual = usual_lengths(lengths_s)
    extra = lengths_s - usual
    period = _costliest_period(numbers, long_steps(lengths_s, usual), extra, usual)
    if period is None or period.every is None:
        return lengths_s
    spread = lengths_s.copy()
    places = np.searchsorted(numbers, period.steps)
    # Pauses in these steps are not device time, so the part beyond this limit is not spread.
    most_s = _TUNING.pause_lengths * float(np.median(extra[places]))
    for place in places.tolist():
        first = max(place - period.every + 1, 0)
        waited_s = min(float(extra[place]), most_s)
        spread[place] -= waited_s
        spread[first : place + 1] += waited_s / (place + 1 - first)
    return spread


def long_steps(lengths: Array, usual: Array) -> Mask:
    """[N] which steps are clearly longer than the typical length around them."""
    extra = lengths - usual
    result: Mask = extra > np.maximum(_TUNING.scatters * _scatter(extra), _TUNING.share * usual)
    return result


def _scatter(extra: Array) -> float:
    """Scatter of the steps, from the steps shorter than typical, so that long ones do not count. If these are close together, their own
    scatter is used: with alternating lengths the typical length may lie between the two."""
    shorter = extra[extra < 0]
    if not len(shorter):
        return 0.0
    own_scatter = scatter_of(shorter - np.median(shorter))
    return min(float(scatter_of(shorter)), _QUANTILE_SCATTER_RATIO * float(own_scatter))


def _costliest_period(numbers: Ints, is_long: Mask, extra: Array, usual: Array) -> StepPattern | None:
    """The period that costs the most time, among the long steps and among the far longer ones: if lengths scatter widely, many steps
    are long, and only the longest have a period."""
    masks = [is_long & (extra >= lengths * usual) for lengths in _TUNING.beyond_lengths]
    sizes = [int(mask.sum()) for mask in masks]
    found = [
        period
        for place, mask in enumerate(masks)
        if sizes[place] not in sizes[:place] and (period := _period(numbers, mask, extra)) is not None
    ]
    return max(found, key=lambda period: period.extra_s, default=None)


def _period(numbers: Ints, is_long: Mask, extra: Array) -> StepPattern | None:
    """The shortest period at which nearly all steps are long and few others are, over the whole run or a part of it."""
    at = numbers[is_long]
    if len(at) < _TUNING.slots:
        return None
    span = int(numbers[-1] - numbers[0]) + 1
    for every in range(2, min(span // _TUNING.slots, _TUNING.farthest) + 1):
        counts = np.bincount(at % every, minlength=every)
        phase = int(counts.argmax())
        if not _is_period_candidate(int(counts[phase]), every, len(at), len(numbers)):
            continue
        slots = np.flatnonzero(numbers % every == phase)
        first, last = _densest_part(is_long[slots], extra[slots])
        part = slice(slots[first], slots[last] + 1) if (first, last) != (0, len(slots) - 1) else slice(None)
        in_phase = np.zeros(len(numbers), bool)
        in_phase[slots[first : last + 1]] = True
        parts_tried = 1.0 if part == slice(None) else len(slots) ** 2 / 2
        if _is_period(every, in_phase[part], is_long[part], extra[part], parts_tried):
            steps = in_phase & is_long
            # One or two far longer steps are pauses, not part of the period.
            far = steps & (extra >= _TUNING.pause_lengths * np.median(extra[steps]))
            regular = steps & ~far if far.sum() <= _TUNING.most_pauses else steps
            return StepPattern(
                PatternKind.EVERY_NTH,
                numbers[regular].tolist(),
                float(extra[regular].sum()),
                every=every,
                hits=int(regular.sum()),
                chances=int(in_phase.sum() - (steps & ~regular).sum()),
            )
    return None


def _is_period_candidate(count: int, every: int, long: int, steps: int) -> bool:
    """Quick test whether ``count`` of the ``long`` steps at one phase of the period are nearly all possible ones, or more than random
    (Poisson tail bound)."""
    if count < _TUNING.slots:
        return False
    if count >= _TUNING.regular * (steps // every) and long - count <= _TUNING.between * steps:
        return True
    expected = long / every
    return count > expected and count * math.log(count / expected) - count + expected >= math.log(every) + 3.0


def _densest_part(hits: Mask, extra: Array) -> tuple[int, int]:
    """First and last of the slots [M] of the part with enough ``hits``: all slots, or else the part with the largest surplus of hits.
    Slots at either end with less than half the median excess of the hits are cut off."""
    first, last = 0, len(hits) - 1
    if hits.mean() < _TUNING.regular:
        gained = np.cumsum(np.where(hits, 1.0 - _TUNING.regular, -_TUNING.regular))
        before = np.minimum.accumulate(np.concatenate(([0.0], gained[:-1])))
        last = int((gained - before).argmax())
        first = int(np.concatenate(([0.0], gained[:last])).argmin())
    within = slice(first, last + 1)
    if not hits[within].any():
        return first, last
    as_long = first + np.flatnonzero(extra[within] >= 0.5 * np.median(extra[within][hits[within]]))
    return int(as_long[0]), int(as_long[-1])


def _is_period(every: int, in_phase: Mask, is_long: Mask, extra: Array, parts_tried: float) -> bool:
    """Whether nearly all steps ``in_phase`` and few others are long, among [M] consecutive steps; ``parts_tried``: how many were tried."""
    steps, chances = in_phase & is_long, int(in_phase.sum())
    hits = int(steps.sum())
    return (
        hits >= max(_TUNING.slots, _TUNING.regular * chances)
        and int(is_long.sum()) - hits <= _TUNING.between * (len(extra) - chances)
        and parts_tried * _expected_random_periods(every, steps, in_phase, extra) <= _TUNING.by_chance
    )


def _expected_random_periods(every: int, steps: Mask, in_phase: Mask, extra: Array) -> float:
    """Expected number of periods, up to this length, with as many long ``steps`` if long steps were random (Chernoff bound of the
    binomial distribution). Long here: at least half the median excess of ``steps``; the rate is that of the other steps."""
    as_long = extra >= 0.5 * np.median(extra[steps])
    chances, others = int(in_phase.sum()), int((~in_phase).sum())
    rate = (int((as_long & ~in_phase).sum()) + 1) / (others + 2)
    share = int((as_long & steps).sum()) / chances
    if share <= rate:
        return every**2 / 2
    divergence = share * math.log(share / rate)
    if share < 1.0:
        divergence += (1.0 - share) * math.log((1.0 - share) / (1.0 - rate))
    return every**2 / 2 * math.exp(-chances * divergence)


def _pauses(numbers: Ints, is_long: Mask, extra: Array, usual: Array) -> StepPattern | None:
    pause = is_long & _are_pauses(extra, usual)
    if pause.sum() > _TUNING.most_pauses:
        pause &= (extra >= _TUNING.pause_s) & (extra >= _TUNING.pause_lengths * usual)
    if not 0 < pause.sum() <= max(_TUNING.most_pauses, _TUNING.rare * len(numbers)):
        return None
    return StepPattern(PatternKind.ONCE, numbers[pause].tolist(), float(extra[pause].sum()))


def _are_pauses(extra: Array, usual: Array) -> Mask:
    pauses: Mask = (extra >= _TUNING.pause_s) | (extra >= _TUNING.pause_lengths * usual)
    return pauses


def pause_steps(lengths: Array, usual: Array) -> Mask:
    """[N] which steps are pauses, however many there are."""
    return long_steps(lengths, usual) & _are_pauses(lengths - usual, usual)


def _levels(numbers: Ints, lengths: Array) -> list[StepPattern]:
    """Level changes or growth, whichever fits the series better by the Bayesian information criterion with Laplace errors:
    N log(mean absolute deviation) + parameters x log N."""
    per_block = max(_TUNING.fewest_in_block, -(-len(lengths) // _TUNING.blocks))
    count = len(lengths) // per_block
    if count < 2 * _TUNING.fewest_blocks:
        return []
    blocks = np.median(lengths[: count * per_block].reshape(count, per_block), axis=1)
    cuts = _cuts(blocks)
    levels_criterion = _criterion(blocks - _piecewise_medians(blocks, cuts), 2 * len(cuts))
    if _criterion(blocks - np.median(blocks), 0) <= levels_criterion:
        cuts, levels_criterion = [], math.inf
    place = np.arange(count, dtype=float)
    slope = trend(place, blocks, 0.9)
    line = slope.slope * place + np.median(blocks - slope.slope * place)
    # If the growth accelerates, the line starts below all lengths.
    first, last = max(float(line[0]), float(blocks.min())), float(line[-1])
    grows = slope.z_score >= _TUNING.z_score and last - first >= 2 * _min_level_change(count) * first
    grows = grows and _is_throughout(blocks)
    if grows and last > first and _criterion(blocks - line, 1) < levels_criterion:
        beyond_s = float((blocks - first).mean()) * len(lengths)
        return [
            StepPattern(
                PatternKind.GROWING,
                [int(numbers[0]), int(numbers[-1])],
                max(beyond_s, 0.0),
                before_ms=first * 1e3,
                after_ms=last * 1e3,
            )
        ]
    exact = [_exact_cut(lengths, cut * per_block, 2 * per_block) for cut in cuts]
    return _changes(numbers, lengths, exact)


def _is_throughout(blocks: Array) -> bool:
    """Whether the blocks get longer from each quarter of the series to the next: disturbances of a busy machine come and go."""
    increases = np.diff([np.median(quarter) for quarter in np.array_split(blocks, _QUARTERS)])
    return bool((increases >= _TUNING.each_quarter * increases.sum()).all())


def _min_level_change(blocks: int) -> float:
    """Smallest relative level change in a series of this many blocks."""
    return _TUNING.level * math.sqrt(max(_TUNING.blocks / blocks, 1.0))


def _criterion(deviations: Array, parameters: int) -> float:
    count = len(deviations)
    return count * float(np.log(max(np.abs(deviations).mean(), 1e-12))) + parameters * float(np.log(count))


def _cuts(blocks: Array) -> list[int]:
    """Indices of the blocks at which the level changes, in order."""
    cuts: list[int] = []
    for _ in range(_TUNING.most_changes):
        edges = [0, *cuts, len(blocks)]
        candidates = [
            (gain, start + place)
            for start, stop in pairwise(edges)
            if stop - start >= 2 * _TUNING.fewest_blocks
            for place, gain in [best_split(blocks[start:stop], _TUNING.fewest_blocks)]
        ]
        if not candidates:
            break
        candidate_cuts = sorted([*cuts, max(candidates)[1]])
        if not all(_is_change(blocks, candidate_cuts, place) for place in range(len(candidate_cuts))):
            break
        cuts = candidate_cuts
    return cuts


def _is_change(blocks: Array, cuts: Sequence[int], place: int) -> bool:
    edges = [0, *cuts, len(blocks)]
    before, after = (np.median(blocks[a:b]) for a, b in list(pairwise(edges))[place : place + 2])
    # If blocks have one of two values, most may lie on the level: then only the differences of neighbours show the scatter.
    spread = max(
        float(scatter_of(blocks - _piecewise_medians(blocks, cuts))),
        _NORMAL_PER_DIFFERENCE * float(np.abs(np.diff(blocks)).mean()),
    )
    least = max(_min_level_change(len(blocks)) * before, _TUNING.level_scatters * spread)
    return bool(abs(after - before) >= least and after != before)


def _piecewise_medians(blocks: Array, cuts: Sequence[int]) -> Array:
    """[N] the median of the part in which each block lies."""
    levels = [
        np.full(stop - start, np.median(blocks[start:stop]))
        for start, stop in pairwise([0, *cuts, len(blocks)])
    ]
    return np.concatenate(levels)


def _exact_cut(lengths: Array, near: int, within: int) -> int:
    """Position of a change in steps, within ``within`` steps of the block boundary ``near``."""
    start, stop = max(near - within, 0), min(near + within, len(lengths))
    around = np.log(np.maximum(lengths[start:stop], _LEAST_S))
    return start + best_split(around, 1)[0] if stop - start >= 2 else near


def _changes(numbers: Ints, lengths: Array, cuts: Sequence[int]) -> list[StepPattern]:
    """The largest change. Its slower side includes all further levels above the faster one by a quarter of the change, for example those
    of a machine that becomes busier. Uncounted steps on that side (warm-up, profiler) are assumed to be as long as the counted ones."""
    if not cuts:
        return []
    edges = [0, *cuts, len(lengths)]
    levels = [float(np.median(lengths[a:b])) for a, b in pairwise(edges)]
    # Steps of a damaged log may have length zero.
    place = int(np.abs(np.diff(np.log(np.maximum(levels, _LEAST_S)))).argmax()) + 1
    before, after = levels[place - 1], levels[place]
    fast = min(before, after)
    least = fast + _TUNING.as_slow * abs(after - before)
    first = last = place if after >= before else place - 1
    while after >= before and last + 1 < len(levels) and levels[last + 1] >= least:
        last += 1
    while after < before and first > 0 and levels[first - 1] >= least:
        first -= 1
    start, stop = edges[first], edges[last + 1]
    slow = float(np.median(lengths[start:stop]))
    # From the levels, so that a pause after the change does not count.
    beyond_s = sum((levels[n] - fast) * (edges[n + 1] - edges[n]) for n in range(first, last + 1))
    steps = int(numbers[stop - 1]) - (int(numbers[start]) if start else 0) + 1
    return [
        StepPattern(
            PatternKind.FROM_STEP,
            [int(numbers[edges[place]]), int(numbers[stop - 1] if after >= before else numbers[-1])],
            beyond_s / (stop - start) * steps,
            before_ms=(fast if after >= before else slow) * 1e3,
            after_ms=(slow if after >= before else fast) * 1e3,
        )
    ]
