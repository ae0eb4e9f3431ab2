"""Counts stack samples by the user's line, for one kind of work of the training thread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from math import log, sqrt

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.phases import Gap
from ddpdoctor.measure.places import CodeLine, Stack
from ddpdoctor.measure.taxonomy import Component

from .ranking import by_line
from .table import Kind, Samples


class _Tuning(msgspec.Struct, frozen=True):
    likely: float = 0.8
    """Posterior probability from which a line is reported: four times that of all other lines and the unsampled one together."""
    fewest: float = 2.0
    """Fewest excess samples of a reported line: a single sample may be of any line."""
    rate_shape: float = 0.3
    """Shape a of the prior of a line's rate, between 0 and Jeffreys' 0.5: lines without samples on other ranks are mostly rare there."""


_TUNING = _Tuning()
_COUNTING_SIGMAS = 2.0
"""A difference is significant from this many standard deviations; that of a count is its square root."""


class SampleCounts(msgspec.Struct, frozen=True):
    """Sample counts of some ranks in some steps. A sample that may be of an operator counts less than 1."""

    at: Mapping[CodeLine, float]
    """Samples of the components' work, by line."""
    outside: Mapping[CodeLine, float]
    """Those of ``at`` whose innermost frame is not torch's."""
    followers: Mapping[CodeLine, float]
    """Samples that show only the line that ran next, see :mod:`.table`."""
    stacks: Mapping[Stack, float]
    """``at`` and ``followers`` together, by call stack."""
    samples: int
    """Samples of the components' work, on all lines."""
    any_work: int
    """Samples in these steps, of any work."""
    seconds: float
    steps: int
    """Steps times ranks."""


def count_samples(
    samples: Samples,
    positions: Sequence[int],
    components: Sequence[Component],
    wanted: Collection[int],
    parts: Sequence[Array | float],
    gap: Gap | None = None,
    trim: Callable[[Stack], Stack] | None = None,
) -> SampleCounts:
    """Counts the samples of these ranks in the ``wanted`` steps, optionally only in one ``gap`` between phases. ``parts``: by position,
    the weight of a sample, or [K] weights by stack; ``trim``: function that drops the innermost lines of a call path that do not count."""
    at, followers = np.zeros((2, len(samples.stacks)))
    count = any_work = steps = 0
    seconds = 0.0
    for position in positions:
        of_rank = samples.ranks[position]
        steps_wanted = of_rank.steps_of(wanted)
        within = of_rank.in_steps(steps_wanted)
        weights = samples.weights(position, within & of_rank.while_doing(components, gap))
        at += parts[position] * (weights.seen + np.maximum(weights.before, weights.burst))
        followers += parts[position] * weights.following
        count += round(float(weights.without_bursts.sum()))
        any_work += int(np.count_nonzero(within & (of_rank.kind != Kind.BURST)))
        seconds += int(of_rank.lengths_ns[steps_wanted].sum()) / 1e9
        steps += int(steps_wanted.sum())

    def by_stack(weights: Array) -> dict[Stack, float]:
        found: defaultdict[Stack, float] = defaultdict(float)
        for stack, weight in samples.by_stack(weights).items():
            found[trim(stack) if trim else stack] += weight
        return found

    return SampleCounts(
        at=by_line(by_stack(at)),
        outside=by_line(by_stack(at * samples.outside_torch)),
        followers=by_line(by_stack(followers)),
        stacks=by_stack(at + followers),
        samples=count,
        any_work=any_work,
        seconds=seconds,
        steps=steps,
    )


def common_counts(all_ranks: SampleCounts, each: Sequence[SampleCounts]) -> SampleCounts:
    """Counts that the ranks have in common: for each line and rank, at most the (lower) median count of the ranks plus its
    counting error. ``all_ranks``: counts of all ranks together."""
    kept = _common_shares(each)
    at, outside = (
        {
            line: sum(part * counts.get(line, 0.0) for part, counts in zip(parts, of_ranks, strict=True))
            for line, parts in kept.items()
        }
        for of_ranks in ([counts.at for counts in each], [counts.outside for counts in each])
    )
    return replace(all_ranks, at=at, outside=outside)


def same_lines(each: Sequence[SampleCounts]) -> float:
    """Share (0 to 1) of the ranks' samples at lines that they have in common. Of each rank, at most the (lower) median number of
    samples counts."""
    wholes = [sum(counts.at.values()) for counts in each]
    middle = sorted(wholes)[(len(each) - 1) // 2]
    kept = _common_shares(each)
    common = [
        sum(parts[rank] * counts.at.get(line, 0.0) for line, parts in kept.items())
        for rank, counts in enumerate(each)
    ]
    limited = [min(whole, middle) for whole in wholes]
    return min(1.0, sum(map(min, common, limited)) / max(sum(limited), 1e-9))


def _common_shares(each: Sequence[SampleCounts]) -> dict[CodeLine, list[float]]:
    """By line, the share of each rank's samples that is common to the ranks."""
    kept: dict[CodeLine, list[float]] = {}
    for line in dict.fromkeys(line for counts in each for line in counts.at):
        own = [counts.at.get(line, 0.0) for counts in each]
        middle = sorted(own)[(len(each) - 1) // 2]
        most = middle + _COUNTING_SIGMAS * sqrt(middle) + 1.0
        kept[line] = [min(1.0, most / count) if count else 0.0 for count in own]
    return kept


def excess_samples(selected: SampleCounts, reference: SampleCounts, fewest: int) -> dict[CodeLine, float]:
    """Excess samples by line over other ranks in the same time, if significant and at least ``fewest``.

    If no line has a significant excess, the most probable line; else followers (``followers``) with a significant excess.
    """
    scale = scale_of(selected, reference)
    return (
        _significant_excess(selected.at, reference.at, scale, fewest)
        or most_probable_line(selected.at, reference.at, scale)
        or _significant_excess(selected.followers, reference.followers, scale, fewest)
    )


def _significant_excess(
    selected: Mapping[CodeLine, float], reference: Mapping[CodeLine, float], scale: float, fewest: int
) -> dict[CodeLine, float]:
    net: dict[CodeLine, float] = {}
    for line, count in selected.items():
        other = reference.get(line, 0.0)
        if count - scale * other >= max(fewest, _COUNTING_SIGMAS * sqrt(count + scale**2 * other)):
            net[line] = count - scale * other
    return net


def scale_of(selected: SampleCounts, reference: SampleCounts) -> float:
    """Factor that scales the other ranks' samples to the same time; 0 if there are none."""
    return selected.seconds / reference.seconds if reference.seconds else 0.0


def most_probable_line(
    selected: Mapping[CodeLine, float], reference: Mapping[CodeLine, float], scale: float
) -> dict[CodeLine, float]:
    """The line that most probably causes the excess of some ranks if no line's excess is significant, with its excess
    samples over ``scale`` times ``reference``; {} if there are no other ranks or no line is probable enough.

    Event times of every step already show that these ranks do more work; samples only show where. So the lines are compared
    with each other, and with a line without samples. If line i causes the excess of E samples, its count is its usual count plus a
    Poisson number of mean E; all other counts are usual. Given the other ranks' count o, the usual rate is Gamma distributed
    with shape o + a, and a usual count negative binomial (Gelman et al., Bayesian Data Analysis, section 2.6).
    """
    if scale <= 0:
        return {}
    net = {line: count - scale * reference.get(line, 0.0) for line, count in selected.items()}
    excess = max(sum(selected.values()) - scale * sum(reference.values()), *net.values(), 0.0) if net else 0.0
    best = max(net, key=lambda line: net[line], default=None)
    if best is None or net[best] < _TUNING.fewest:
        return {}
    # Of hundreds of samples, the odds themselves would be 0.0.
    odds = {
        line: _log_odds(round(selected[line]), round(reference.get(line, 0.0)), scale, excess) for line in net
    }
    all_odds = np.logaddexp.reduce([*odds.values(), -excess])
    return {best: net[best]} if odds[best] - all_odds >= log(_TUNING.likely) else {}


def _log_odds(count: int, other: int, scale: float, excess: float) -> float:
    """Logarithm of the likelihood ratio of a line's ``count``, with over without the excess at this line. ``other``: samples of other
    ranks in 1 / ``scale`` times the time."""
    if excess <= 0:
        return 0.0
    shape, part = other + _TUNING.rate_shape, 1.0 / (1.0 + scale)
    before, numbers = np.arange(count), np.arange(count + 1)
    ratios = np.log((before + shape) / (before + 1) * (1.0 - part))
    usual = shape * log(part) + np.concatenate(([0.0], np.cumsum(ratios)))
    poisson = numbers * log(excess) - excess - np.cumsum(np.log(np.maximum(numbers, 1)))
    return float(np.logaddexp.reduce(usual + poisson[::-1]) - usual[count])
