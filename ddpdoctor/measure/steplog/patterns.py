"""Finds steps that are longer than the others, and their pattern: single steps, every n-th step, all steps from some step on, or steadily
growing steps.

The length of a step is the time from the moment when the last rank ended the previous step to the moment when the last rank ends this one.
The typical length is a running quantile, so that a slow drift does not count as pauses.
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
    """The step length changes, up or down, and stays so until the next change or the end."""
    GROWING = "growing"
    """The step length rises steadily."""


class StepPattern(msgspec.Struct, frozen=True):
    """Steps that differ from the others in one way."""

    kind: PatternKind
    steps: list[int]
    """Numbers of these steps; of a level change or growth, the first and the last."""
    extra_s: float
    """Total excess of these steps over the typical length, seconds; of a level change, that of the steps on the slower side over the level
    of the faster side. Never negative."""
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
        """Whether it is a pattern that may go on: any but ``most_pauses`` single steps or fewer."""
        return self.kind is not PatternKind.ONCE or len(self.steps) > _TUNING.most_pauses

    def long_and_usual_steps(self, numbers: Ints) -> tuple[Mask, Mask]:
        """Two masks [N] of the steps ``numbers``: the longer ones, and typical ones to compare them with. Of growth, the first quarter is
        typical and the rest is longer."""
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
    """Minimum number of steps for which a typical length is determined."""
    window: int = 101
    """Number of steps in the window of the running quantile; odd."""
    scatters: float = 6.0
    """A long step exceeds the typical length by this multiple of the scatter (1.4826 x the median absolute deviation). By chance, one step
    in 10^9 does if lengths are normally distributed, and 1 in 200 if they have heavy tails (Student's t, 3 degrees of freedom)."""
    share: float = 0.25
    """A long step exceeds the typical length by at least this share of it."""
    beyond_lengths: tuple[float, ...] = (0.0, 1.0, 4.0)
    """For each of these values, a period is searched for among the long steps whose excess is at least this multiple of the typical
    length."""
    slots: int = 4
    """Minimum number of long steps with the same period."""
    usual: float = 0.3
    """Quantile of the surrounding lengths that is a step's typical length."""
    regular: float = 0.9
    """Minimum share of long steps among the steps at multiples of the period."""
    between: float = 0.3
    """Maximum share of long steps among the other steps."""
    by_chance: float = 0.01
    """A period is accepted if, in all periods and phases tried, at most this many equally good ones are expected by chance."""
    farthest: int = 5000
    """Longest period tried, in steps."""
    pause_s: float = 1.0
    """A single long step is a pause if its excess is at least this many seconds."""
    pause_lengths: float = 10.0
    """A single long step is also a pause if its excess is at least this multiple of the typical length."""
    most_pauses: int = 2
    """If more steps than this reach ``pause_s`` or ``pause_lengths``, only those that reach both are pauses."""
    rare: float = 0.02
    """Maximum share of steps that may be pauses; if there are more, these are not single steps."""
    level: float = 0.05
    """Minimum relative level change in a series of ``blocks`` blocks. In a shorter series of n blocks it is larger, by a factor of
    sqrt(blocks / n), because the noise of neighbouring steps is often correlated."""
    blocks: int = 160
    """Maximum number of blocks into which the series is divided to find changes. The value of a block is the median of its steps."""
    fewest_in_block: int = 5
    """Minimum number of steps in a block: the median of fewer is noisy."""
    level_scatters: float = 3.0
    """A level change is at least this multiple of the scatter of the blocks around their levels."""
    fewest_blocks: int = 4
    """Minimum number of blocks with the same level."""
    as_slow: float = 0.25
    """A further level belongs to the slower side if it exceeds the faster level by at least this share of the change."""
    most_changes: int = 4
    """Maximum number of level changes searched for; more frequent alternation is noise."""
    z_score: float = 4.0
    """A series rises if Kendall's statistic exceeds this many of its standard deviations under randomness."""
    each_quarter: float = 0.1
    """Growth is steady if from each quarter of the series to the next, the median increases by at least this part of the total increase. On
    a straight line, it is a third each time."""


_TUNING = Tuning()
_LEAST_S = 1e-9
"""Lower limit of a length before its logarithm is taken."""
_QUANTILE_SCATTER_RATIO = 1.6
"""For normal lengths and the 30 % quantile: scatter of the shorter steps around the quantile / their scatter around their own median."""
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
    """[N] running 30 % quantile of the lengths, seconds. A 30 % quantile follows the shorter steps even if every second step is long."""
    half = min(_TUNING.window // 2, len(lengths) - 1)
    windows = sliding_window_view(np.pad(lengths, half, mode="reflect"), 2 * half + 1)
    place = int(_TUNING.usual * (2 * half + 1))
    usual: Array = np.partition(windows, place, axis=-1)[:, place]
    return usual


def without_run_ahead(numbers: Ints, lengths_s: Array, stalled: Mask | None = None) -> Array:
    """[N] lengths without the effect of a host that issues work ahead of its device. For such a host steps are short, except those in which
    it waits for the device, for example to log a loss. If these are periodic, their excess is spread over the steps of the period.
    ``stalled`` [N]: steps that are long for another reason."""
    if len(numbers) < _TUNING.fewest:
        return lengths_s
    usual = usual_lengths(lengths_s)
    extra = lengths_s - usual
    is_long = long_steps(lengths_s, usual)
    if stalled is not None:
        is_long &= ~stalled
    period = _costliest_period(numbers, is_long, extra, usual)
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
    """[N] which steps are clearly longer than the typical length of the steps around them."""
    extra = lengths - usual
    result: Mask = extra > np.maximum(_TUNING.scatters * _scatter(extra), _TUNING.share * usual)
    return result


def _scatter(extra: Array) -> float:
    """Scatter of the steps, estimated from those that are shorter than typical, so that long steps have no influence. If the shorter ones
    are close to each other, their scatter around their own median is used: if two lengths alternate, the typical length may lie between
    them."""
    shorter = extra[extra < 0]
    if not len(shorter):
        return 0.0
    own_scatter = scatter_of(shorter - np.median(shorter))
    return min(float(scatter_of(shorter)), _QUANTILE_SCATTER_RATIO * float(own_scatter))


def _costliest_period(numbers: Ints, is_long: Mask, extra: Array, usual: Array) -> StepPattern | None:
    """The period that costs the most time. Periods are searched for among all long steps, and among only the far longer ones: if lengths
    scatter widely, many steps are long, but only the longest may be periodic."""
    masks = [is_long & (extra >= lengths * usual) for lengths in _TUNING.beyond_lengths]
    sizes = [int(mask.sum()) for mask in masks]
    found = [
        period
        for place, mask in enumerate(masks)
        if sizes[place] not in sizes[:place] and (period := _period(numbers, mask, extra)) is not None
    ]
    return max(found, key=lambda period: period.extra_s, default=None)


def _period(numbers: Ints, is_long: Mask, extra: Array) -> StepPattern | None:
    """The shortest period whose steps are nearly all long, while few others are, in the whole run or a part of it."""
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
            # One or two steps that are far longer than the other periodic ones are pauses, not part of the period.
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
    """Quick test, before the exact one: whether ``count``, the number of the ``long`` steps at one phase of the period, is nearly the
    maximum possible, or more than expected by chance (Poisson tail bound)."""
    if count < _TUNING.slots:
        return False
    if count >= _TUNING.regular * (steps // every) and long - count <= _TUNING.between * steps:
        return True
    expected = long / every
    return count > expected and count * math.log(count / expected) - count + expected >= math.log(every) + 3.0


def _densest_part(hits: Mask, extra: Array) -> tuple[int, int]:
    """Indices of the first and last slot of the part in which the period holds. ``hits`` [M]: which slots (steps at multiples of the
    period) are long. The part is all slots if enough are long, or else the run of slots with the largest surplus of hits. From either end
    of it, slots with less than half the median excess of the hits are cut off."""
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
    """Whether, in M consecutive steps, nearly all steps ``in_phase`` and few others are long, and this is not chance. ``parts_tried``: how
    many parts of the run were tried."""
    steps, chances = in_phase & is_long, int(in_phase.sum())
    hits = int(steps.sum())
    return (
        hits >= max(_TUNING.slots, _TUNING.regular * chances)
        and int(is_long.sum()) - hits <= _TUNING.between * (len(extra) - chances)
        and parts_tried * _expected_random_periods(every, steps, in_phase, extra) <= _TUNING.by_chance
    )


def _expected_random_periods(every: int, steps: Mask, in_phase: Mask, extra: Array) -> float:
    """Expected number of periods up to this one that would have as many long ``steps`` by chance (Chernoff bound of the binomial
    distribution). A step counts as long here if it has at least half the median excess of ``steps``. The probability of a long step is
    estimated from the steps that are not ``in_phase``."""
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
    """Level changes or growth, whichever fits the series better by :func:`_criterion`."""
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
    # If the growth accelerates, the fitted line starts below all lengths.
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
    """Whether the blocks get longer from each quarter of the series to the next, unlike disturbances by a busy machine, which come and
    go."""
    increases = np.diff([np.median(quarter) for quarter in np.array_split(blocks, 4)])
    return bool((increases >= _TUNING.each_quarter * increases.sum()).all())


def _min_level_change(blocks: int) -> float:
    """Minimum relative level change in a series of this many blocks, see ``Tuning.level``."""
    return _TUNING.level * math.sqrt(max(_TUNING.blocks / blocks, 1.0))


def _criterion(deviations: Array, parameters: int) -> float:
    """How badly a model fits, given the [N] deviations from it: N log(mean absolute deviation) + parameters x log N. This is the Bayesian
    information criterion for Laplace errors (divided by 2), but with twice its penalty for parameters."""
    count = len(deviations)
    return count * float(np.log(max(np.abs(deviations).mean(), 1e-12))) + parameters * float(np.log(count))


def _cuts(blocks: Array) -> list[int]:
    """Indices of the blocks at which a new level begins, in ascending order."""
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
    # If blocks alternate between two values, most of them may equal the level, so that their scatter around it is 0. The differences
    # between neighbours show the scatter in this case, too.
    spread = max(
        float(scatter_of(blocks - _piecewise_medians(blocks, cuts))),
        _NORMAL_PER_DIFFERENCE * float(np.abs(np.diff(blocks)).mean()),
    )
    least = max(_min_level_change(len(blocks)) * before, _TUNING.level_scatters * spread)
    return bool(abs(after - before) >= least and after != before)


def _piecewise_medians(blocks: Array, cuts: Sequence[int]) -> Array:
    """[N] for each block, the median of the part between two cuts in which it lies."""
    levels = [
        np.full(stop - start, np.median(blocks[start:stop]))
        for start, stop in pairwise([0, *cuts, len(blocks)])
    ]
    return np.concatenate(levels)


def _exact_cut(lengths: Array, near: int, within: int) -> int:
    """Index of the step at which the level changes, within ``within`` steps of the block boundary ``near``."""
    start, stop = max(near - within, 0), min(near + within, len(lengths))
    around = np.log(np.maximum(lengths[start:stop], _LEAST_S))
    return start + best_split(around, 1)[0] if stop - start >= 2 else near


def _changes(numbers: Ints, lengths: Array, cuts: Sequence[int]) -> list[StepPattern]:
    """The largest change only, or [] if there is none. Its slower side also includes the adjoining levels that exceed the faster level by
    at least a quarter of the change, as when a machine gets busier in stages. Uncounted steps on that side (warm-up, profiler) are assumed
    to be as long as the counted ones."""
    if not cuts:
        return []
    edges = [0, *cuts, len(lengths)]
    levels = [float(np.median(lengths[a:b])) for a, b in pairwise(edges)]
    # In a damaged log, steps may have length zero.
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
    # Computed from levels instead of lengths, so that a pause after the change does not count.
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
