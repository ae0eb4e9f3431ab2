"""Which line it is that some ranks run and others do not, where samples are too few for any line to stand out by itself.

That these ranks do more is known by then, from what was timed in every step; samples only say where. So the lines are weighed
against each other, and against one that no sample met. If line i is where the excess of E samples lies, its count is that of its
usual rate plus a Poisson number of mean E, and every other line's is that of its usual rate. What the other ranks' count o says
of that rate is the Gamma distribution of shape o + a; a count at the usual rate is then negative binomial (Gelman et al., Bayesian
Data Analysis, section 2.6).
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
    """Probability from which on a line is named: four times as likely as all others and what was not seen together."""
    fewest: float = 2.0
    """Samples beyond the other ranks' that a named line has at least: one meets any line."""
    rate_shape: float = 0.3
    """a: lines that other ranks never showed are mostly rare. Between Jeffreys' 0.5 and none."""


_TUNING = _Tuning()


def most_probable_line(
    mine: Mapping[CodeLine, float], theirs: Mapping[CodeLine, float], scale: float
) -> dict[CodeLine, float]:
    """The line with its samples beyond ``theirs``, which are multiplied by ``scale`` to be those of as much time; {} where there
    are no other ranks, or no line is likely enough."""
    if scale <= 0:
        return {}
    net = {line: count - scale * theirs.get(line, 0.0) for line, count in mine.items()}
    excess = max(sum(mine.values()) - scale * sum(theirs.values()), *net.values(), 0.0) if net else 0.0
    best = max(net, key=lambda line: net[line], default=None)
    if best is None or net[best] < _TUNING.fewest:
        return {}
    odds = {line: _odds(round(mine[line]), round(theirs.get(line, 0.0)), scale, excess) for line in net}
    likely = odds[best] / (sum(odds.values()) + exp(-excess))
    return {best: net[best]} if likely >= _TUNING.likely else {}


def _odds(count: int, other: int, scale: float, excess: float) -> float:
    """By how much likelier a line's count is if the excess lies there than if it does not."""
    usual = _log_usual(count, other, scale)
    if excess <= 0:
        return 1.0
    numbers = np.arange(count + 1)
    poisson = numbers * log(excess) - excess - np.cumsum(np.log(np.maximum(numbers, 1)))
    return float(np.exp(usual + poisson[::-1]).sum()) / max(exp(usual[count]), 1e-300)


def _log_usual(count: int, other: int, scale: float) -> Array:
    """[count + 1] logarithm of the probability of each count up to this one where other ranks in 1 / ``scale`` times as much time have
    ``other``."""
    shape, part = other + _TUNING.rate_shape, 1.0 / (1.0 + scale)
    before = np.arange(count)
    ratios = np.log((before + shape) / (before + 1) * (1.0 - part))
    return shape * log(part) + np.concatenate(([0.0], np.cumsum(ratios)))
