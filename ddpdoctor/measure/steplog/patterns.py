"""Steps that take longer than the others, and when: once, in every n-th step, from some step on, or steadily growing.

Lengths are those of whole steps, from one end on the last rank to the next. The length of a usual step is a running quantile, so that
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
    """When the longer steps come."""

    ONCE = "once"
    """In few single steps."""
    EVERY_NTH = "every_nth"
    FROM_STEP = "from_step"
    """From one step on, to the end or to the next change: longer or shorter."""
    GROWING = "growing"
    """Each step a little longer than the one before."""


class StepPattern(msgspec.Struct, frozen=True):
    """Steps that are unlike the others in one way."""

    kind: PatternKind
    steps: list[int]
    """Numbers of the steps concerned; of a change or a growth the first and the last."""
    extra_s: float
    """Seconds of the run by which these steps took longer than the usual ones; of a change, the slower steps than the level on the
    other side of it. Never negative."""
    every: int | None = None
    """Distance in steps between two of them, of :attr:`PatternKind.EVERY_NTH`."""
    hits: int | None = None
    """How many of the steps at that distance are long."""
    chances: int | None = None
    """How many steps there are at that distance."""
    before_ms: float | None = None
    """Median length before the change, or at the beginning of the growth."""
    after_ms: float | None = None
    """Median length behind the change, or at the end of the growth."""

    @property
    def recurs(self) -> bool:
        """Whether it is more than one or two single steps."""
        return self.kind is not PatternKind.ONCE or len(self.steps) > _TUNING.most_pauses

    def compared(self, numbers: Ints) -> tuple[Mask, Mask]:
        """[N] twice: which of the steps ``numbers`` are the longer ones, and which the usual ones to compare them with. Of a growth all
        steps after its first quarter are longer, and those of that quarter usual."""
        first, last = self.steps[0], self.steps[-1]
        match self.kind:
            case PatternKind.FROM_STEP:
                behind = (first <= numbers) & (numbers <= last)
                # Step 0 contains the preparation.
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
    """When a step is unlike the others."""

    fewest: int = 20
    """Steps that a usual length needs at least."""
    window: int = 101
    """Steps of the running median, odd."""
    scatters: float = 6.0
    """Times the scatter (1.4826 x the median absolute deviation) beyond the usual length. Of normal scatter one step in 10^9 is so
    long, of lengths with heavy tails (Student's t, 3 degrees of freedom) 1 in 200: such steps are long without any period, and short."""
    share: float = 0.25
    """Of the usual length, by which a step must be longer in any case."""
    beyond_lengths: tuple[float, ...] = (0.0, 1.0, 4.0)
    """Usual lengths beyond the usual length: of all long steps, and of those that are so much longer, a period is looked for."""
    slots: int = 4
    """Fewest long periodic steps."""
    usual: float = 0.3
    """Quantile of the lengths around a step that is its usual length."""
    regular: float = 0.9
    """Share of the steps at a distance that must be long."""
    between: float = 0.3
    """Share of the other steps that may be long."""
    by_chance: float = 0.01
    """Most periods as good that long steps at random would have, of all distances and beginnings tried."""
    farthest: int = 5000
    """Largest distance that is tried, steps."""
    pause_s: float = 1.0
    """Seconds beyond the usual length, from which a single step is a pause."""
    pause_lengths: float = 10.0
    """Usual lengths beyond the usual length, from which it is one in any case."""
    most_pauses: int = 2
    """Of any of these pauses. More of them recur, and must be at least both: ``pause_s`` and ``pause_lengths``."""
    rare: float = 0.02
    """Share of the steps that may be such pauses."""
    level: float = 0.05
    """Part of the length by which a level must change, in a series of all blocks. Of fewer, the part is larger, by the square root: the
    noise of neighbouring steps is often alike."""
    blocks: int = 160
    """Into which the series is cut at most to look for changes: medians of neighbouring steps."""
    fewest_in_block: int = 5
    """Steps of a block: the median of fewer still scatters much."""
    level_scatters: float = 3.0
    """Times the scatter of the blocks around their levels by which a level must change."""
    fewest_blocks: int = 4
    """Of one level."""
    as_slow: float = 0.25
    """Part of a change by which a further level must lie above the faster one to belong to its slower side."""
    most_changes: int = 4
    """Levels that alternate more often are scatter."""
    z_score: float = 4.0
    """Standard deviations of Kendall's statistic beyond which a series rises."""


_TUNING = Tuning()
_LEAST_S = 1e-9
"""A shorter length has no logarithm that says anything."""
_WHOLE_PER_SHORTER = 1.6
"""Of normal lengths: their scatter around the usual length, of those shorter than it / the scatter of these among themselves."""
_NORMAL_PER_DIFFERENCE = 0.886
"""Standard deviation of normal values / mean absolute difference of two: sqrt(pi) / 2."""


def step_patterns(numbers: Ints, lengths_s: Array, counted: Mask) -> list[StepPattern]:
    """The patterns of a run, of each kind one at most. ``numbers`` [N] of its steps, increasing; ``lengths_s`` [N] their lengths in
    seconds; ``counted`` [N] which steps to use: without warm-up, and without steps that a profiler or a suspension disturbed."""
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
    """[N] the running 30 % quantile of the lengths, seconds: a level that stays with the shorter steps where every second one is long."""
    half = min(_TUNING.window // 2, len(lengths) - 1)
    windows = sliding_window_view(np.pad(lengths, half, mode="reflect"), 2 * half + 1)
    place = int(_TUNING.usual * (2 * half + 1))
    usual: Array = np.partition(windows, place, axis=-1)[:, place]
    return usual


def without_run_ahead(numbers: Ints, lengths_s: Array) -> Array:
    """[N] lengths by the clock of a host that issues work ahead of its device: short steps, and a longer one in which it waits for the
    device, such as where a loss is logged. That time is the device's in all of these steps, so of a period it is spread over them."""
    if len(numbers) < _TUNING.fewest:
        return lengths_s
    usual = usual_lengths(lengths_s)
    extra = lengths_s - usual
    period = _costliest_period(numbers, long_steps(lengths_s, usual), extra, usual)
    if period is None or period.every is None:
        return lengths_s
    spread = lengths_s.copy()
    places = np.searchsorted(numbers, period.steps)
    # A pause in one of these steps is not the device's.
    most_s = _TUNING.pause_lengths * float(np.median(extra[places]))
    for place in places.tolist():
        first = max(place - period.every + 1, 0)
        waited_s = min(float(extra[place]), most_s)
        spread[place] -= waited_s
        spread[first : place + 1] += waited_s / (place + 1 - first)
    return spread


def long_steps(lengths: Array, usual: Array) -> Mask:
    """[N] which steps are clearly longer than the usual ones around them."""
    extra = lengths - usual
    result: Mask = extra > np.maximum(_TUNING.scatters * _scatter(extra), _TUNING.share * usual)
    return result


def _scatter(extra: Array) -> float:
    """Scatter of the steps, from those shorter than usual only, so that long ones do not count. Where these are alike, it is theirs: of
    lengths that alternate the usual one may lie in between."""
    shorter = extra[extra < 0]
    if not len(shorter):
        return 0.0
    among_them = scatter_of(shorter - np.median(shorter))
    return min(float(scatter_of(shorter)), _WHOLE_PER_SHORTER * float(among_them))


def _costliest_period(numbers: Ints, is_long: Mask, extra: Array, usual: Array) -> StepPattern | None:
    """The period that takes most time, of the long steps and of those among them that are far longer: where lengths scatter widely,
    many steps are long, and only the longest of them have a period."""
    masks = [is_long & (extra >= lengths * usual) for lengths in _TUNING.beyond_lengths]
    sizes = [int(mask.sum()) for mask in masks]
    found = [
        period
        for place, mask in enumerate(masks)
        if sizes[place] not in sizes[:place] and (period := _period(numbers, mask, extra)) is not None
    ]
    return max(found, key=lambda period: period.extra_s, default=None)


def _period(numbers: Ints, is_long: Mask, extra: Array) -> StepPattern | None:
    """The long steps at the smallest distance at which nearly all steps are long, and few are in between: throughout the run, or from
    one of them on to another one."""
    at = numbers[is_long]
    if len(at) < _TUNING.slots:
        return None
    span = int(numbers[-1] - numbers[0]) + 1
    for every in range(2, min(span // _TUNING.slots, _TUNING.farthest) + 1):
        counts = np.bincount(at % every, minlength=every)
        phase = int(counts.argmax())
        if not _may_be_period(int(counts[phase]), every, len(at), len(numbers)):
            continue
        slots = np.flatnonzero(numbers % every == phase)
        first, last = _stretch(is_long[slots], extra[slots])
        part = slice(slots[first], slots[last] + 1) if (first, last) != (0, len(slots) - 1) else slice(None)
        in_phase = np.zeros(len(numbers), bool)
        in_phase[slots[first : last + 1]] = True
        beginnings = 1.0 if part == slice(None) else len(slots) ** 2 / 2
        if _is_period(every, in_phase[part], is_long[part], extra[part], beginnings):
            steps = in_phase & is_long
            # One or two far longer ones are pauses besides.
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


def _may_be_period(count: int, every: int, long: int, steps: int) -> bool:
    """Whether ``count`` of the ``long`` steps at one of the beginnings of this distance are nearly all that there can be, or more than
    by chance (the bound of the Poisson distribution)."""
    if count < _TUNING.slots:
        return False
    if count >= _TUNING.regular * (steps // every) and long - count <= _TUNING.between * steps:
        return True
    expected = long / every
    return count > expected and count * math.log(count / expected) - count + expected >= math.log(every) + 3.0


def _stretch(hits: Mask, extra: Array) -> tuple[int, int]:
    """The first and the last of the slots [M] among which enough are ``hits``: all where they are, else those with most hits beyond.
    Slots at either end that are far shorter than the others do not belong to it."""
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


def _is_period(every: int, in_phase: Mask, is_long: Mask, extra: Array, beginnings: float) -> bool:
    """Whether nearly all steps ``in_phase`` are long and few others, among [M] consecutive steps that were chosen of so many."""
    steps, chances = in_phase & is_long, int(in_phase.sum())
    hits = int(steps.sum())
    return (
        hits >= max(_TUNING.slots, _TUNING.regular * chances)
        and int(is_long.sum()) - hits <= _TUNING.between * (len(extra) - chances)
        and beginnings * _by_chance(every, steps, in_phase, extra) <= _TUNING.by_chance
    )


def _by_chance(every: int, steps: Mask, in_phase: Mask, extra: Array) -> float:
    """How many periods of at most this distance and with as many of their ``steps`` long are expected, if as many steps as elsewhere are
    at random at least half as long as those (Chernoff's bound of the binomial distribution)."""
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
    """[N] which steps are far longer than the usual ones around them, however many there are."""
    return long_steps(lengths, usual) & _are_pauses(lengths - usual, usual)


def _levels(numbers: Ints, lengths: Array) -> list[StepPattern]:
    """Changes of the level, or its growth: whichever describes the series better, by the Bayesian information criterion with absolute
    deviations (Laplace errors): N log(mean deviation) + parameters x log N."""
    per_block = max(_TUNING.fewest_in_block, -(-len(lengths) // _TUNING.blocks))
    count = len(lengths) // per_block
    if count < 2 * _TUNING.fewest_blocks:
        return []
    blocks = np.median(lengths[: count * per_block].reshape(count, per_block), axis=1)
    cuts = _cuts(blocks)
    as_stairs = _criterion(blocks - _stairs(blocks, cuts), 2 * len(cuts))
    if _criterion(blocks - np.median(blocks), 0) <= as_stairs:
        cuts, as_stairs = [], math.inf
    place = np.arange(count, dtype=float)
    slope = trend(place, blocks, 0.9)
    line = slope.slope * place + np.median(blocks - slope.slope * place)
    # Of a growth that accelerates, the line begins below all lengths.
    first, last = max(float(line[0]), float(blocks.min())), float(line[-1])
    grows = slope.z_score >= _TUNING.z_score and last - first >= 2 * _least_part(count) * first
    if grows and last > first and _criterion(blocks - line, 1) < as_stairs:
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


def _least_part(blocks: int) -> float:
    """Part of the length by which a level must change, in a series of so many blocks."""
    return _TUNING.level * math.sqrt(max(_TUNING.blocks / blocks, 1.0))


def _criterion(deviations: Array, parameters: int) -> float:
    count = len(deviations)
    return count * float(np.log(max(np.abs(deviations).mean(), 1e-12))) + parameters * float(np.log(count))


def _cuts(blocks: Array) -> list[int]:
    """Places of the blocks at which the level changes, in order."""
    cuts: list[int] = []
    for _ in range(_TUNING.most_changes):
        edges = [0, *cuts, len(blocks)]
        offers = [
            (gain, start + place)
            for start, stop in pairwise(edges)
            if stop - start >= 2 * _TUNING.fewest_blocks
            for place, gain in [best_split(blocks[start:stop], _TUNING.fewest_blocks)]
        ]
        if not offers:
            break
        more = sorted([*cuts, max(offers)[1]])
        if not all(_is_change(blocks, more, place) for place in range(len(more))):
            break
        cuts = more
    return cuts


def _is_change(blocks: Array, cuts: Sequence[int], place: int) -> bool:
    edges = [0, *cuts, len(blocks)]
    before, after = (np.median(blocks[a:b]) for a, b in list(pairwise(edges))[place : place + 2])
    # Where blocks have one of two values, most may lie on the level: then only the differences of neighbours show the scatter.
    spread = max(
        float(scatter_of(blocks - _stairs(blocks, cuts))),
        _NORMAL_PER_DIFFERENCE * float(np.abs(np.diff(blocks)).mean()),
    )
    least = max(_least_part(len(blocks)) * before, _TUNING.level_scatters * spread)
    return bool(abs(after - before) >= least and after != before)


def _stairs(blocks: Array, cuts: Sequence[int]) -> Array:
    """[N] the median of each block's part."""
    levels = [
        np.full(stop - start, np.median(blocks[start:stop]))
        for start, stop in pairwise([0, *cuts, len(blocks)])
    ]
    return np.concatenate(levels)


def _exact_cut(lengths: Array, near: int, within: int) -> int:
    """The place of a change that was found among blocks, among the steps ``within`` on either side of it."""
    start, stop = max(near - within, 0), min(near + within, len(lengths))
    around = np.log(np.maximum(lengths[start:stop], _LEAST_S))
    return start + best_split(around, 1)[0] if stop - start >= 2 else near


def _changes(numbers: Ints, lengths: Array, cuts: Sequence[int]) -> list[StepPattern]:
    """The largest change. Its slower side reaches over all further levels that lie above the faster one by a quarter of the change, such
    as those of a machine that becomes busier; the steps of that side that do not count (warm-up, profiler) were as long."""
    if not cuts:
        return []
    edges = [0, *cuts, len(lengths)]
    levels = [float(np.median(lengths[a:b])) for a, b in pairwise(edges)]
    # Steps of a damaged log may have no length.
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
    # By the levels: a pause behind the change is none of it.
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
