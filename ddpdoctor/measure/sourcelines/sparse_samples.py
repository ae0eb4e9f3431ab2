"""The line that most probably has the excess of some ranks, where samples are too few for any line to be significant.

That these ranks do more work is already known, from event times in every step; samples only show where. So the lines are compared
with each other, and with a line that no sample hit. If line i has the excess of E samples, its count is that of its usual rate plus a
Poisson number of mean E, and every other line's count is that of its usual rate. Given the other ranks' count o, that rate has the
Gamma distribution of shape o + a; a count at the usual rate is then negative binomial (Gelman et al., Bayesian Data Analysis,
section 2.6).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, log

import msgspec
import numpy as np

from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.places import CodeLine


class _Tuning(msgspec.Struct, frozen=True):
    likely: float = 0.8
    """Posterior probability from which on a line is named: four times that of all other lines and the unsampled one together."""
    fewest: float = 2.0
    """Excess samples that a named line has at least: a single sample may be of any line."""
    rate_shape: float = 0.3
    """a: lines without samples on other ranks are mostly rare there. Between Jeffreys' 0.5 and none."""


_TUNING = _Tuning()


def most_probable_line(
    selected: Mapping[CodeLine, float], reference: Mapping[CodeLine, float], scale: float
) -> dict[CodeLine, float]:
    """The most probable line with its excess samples over ``scale`` times ``reference``; {} where there are no other ranks, or no line
    is probable enough."""
    if scale <= 0:
        return {}
    net = {line: count - scale * reference.get(line, 0.0) for line, count in selected.items()}
    excess = max(sum(selected.values()) - scale * sum(reference.values()), *net.values(), 0.0) if net else 0.0
    best = max(net, key=lambda line: net[line], default=None)
    if best is None or net[best] < _TUNING.fewest:
        return {}
    odds = {
        line: _odds(round(selected[line]), round(reference.get(line, 0.0)), scale, excess) for line in net
    }
    likely = odds[best] / (sum(odds.values()) + exp(-excess))
    return {best: net[best]} if likely >= _TUNING.likely else {}


def _odds(count: int, other: int, scale: float, excess: float) -> float:
    """Likelihood ratio of a line's count: with the excess at this line over without it."""
    usual = _log_usual(count, other, scale)
    if excess <= 0:
        return 1.0
    numbers = np.arange(count + 1)
    poisson = numbers * log(excess) - excess - np.cumsum(np.log(np.maximum(numbers, 1)))
    return float(np.exp(usual + poisson[::-1]).sum()) / max(exp(usual[count]), 1e-300)


def _log_usual(count: int, other: int, scale: float) -> Array:
    """[count + 1] log probability of each count up to ``count``, where other ranks have ``other`` samples in 1 / ``scale`` times as
    much time."""
    shape, part = other + _TUNING.rate_shape, 1.0 / (1.0 + scale)
    before = np.arange(count)
    ratios = np.log((before + shape) / (before + 1) * (1.0 - part))
    return shape * log(part) + np.concatenate(([0.0], np.cumsum(ratios)))
