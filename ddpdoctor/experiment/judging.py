"""From the step times of trials to intervals and verdicts.

Steps within a trial resemble each other, and so do trials that follow each other: a machine is busy for a minute. What is
compared is therefore the median of a trial with those of the baseline's trials just before and behind it, and the interval comes
from how much these ratios differ from round to round, not from the number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ddpdoctor.diagnose.tried import Parity
from ddpdoctor.measure.numerics import mean_error, normal

from .running import Trial

LEVEL = 0.98
"""Of each look. A verdict is looked for after each round, from the third to the seventh: five looks at 98 % are wrong about as often
as one at 95 % (Pocock, Biometrika 1977)."""
MEASURED_FROM = 3
"""Rounds from which on there is an interval: of two, one difference is all that is known."""
ALIKE = 0.02
"""Half an interval that is this narrow and holds no change is an answer: there is no difference that anybody would notice."""
_MOST_LOSSES = 256


def interval(values: Sequence[float]) -> tuple[float, list[float] | None]:
    """(Mean, [low, high] that holds the true mean with 95 %, however often one looks); None of fewer than three values."""
    middle = float(np.mean(values))
    if len(values) < MEASURED_FROM:
        return middle, None
    half = normal(LEVEL) * mean_error(np.asarray(values, float), LEVEL)
    return middle, [middle - half, middle + half]


class Round(NamedTuple):
    """A trial between two of the job as it is."""

    before: Trial
    trial: Trial
    after: Trial


def level_ms(trial: Trial, rare: bool = False) -> float:
    """Its median step; with ``rare`` its mean step, which holds what is in some steps only."""
    return float(np.mean(trial.step_ms) if rare else np.median(trial.step_ms))


def ratios(rounds: Sequence[Round], rare: bool = False) -> list[float]:
    """Logarithms of each trial's level over that of the baseline around it."""
    found = []
    for before, trial, after in rounds:
        beside = [level_ms(each, rare) for each in (before, after) if len(each.step_ms)]
        if len(trial.step_ms) and beside:
            found.append(math.log(level_ms(trial, rare) / (sum(beside) / len(beside))))
    return found


def change_of(logs: Sequence[float]) -> tuple[float, list[float] | None]:
    """(Relative change of the step time, its interval); below 0 is faster."""
    middle, ends = interval(logs)
    return math.expm1(middle), None if ends is None else [math.expm1(end) for end in ends]


def verdict(change_interval: Sequence[float] | None) -> str | None:
    """faster, slower or same; None while it cannot be told."""
    if change_interval is None:
        return None
    low, high = change_interval
    if high < 0:
        return "faster"
    if low > 0:
        return "slower"
    return "same" if high - low <= 2 * ALIKE else None


def parity(baseline: Sequence[Trial], variant: Sequence[Trial]) -> Parity | None:
    """What became of the model with the change and without it; None where that was not recorded."""
    ours = [each.parameters for each in baseline if each.parameters]
    theirs = [each.parameters for each in variant if each.parameters]
    if not ours or not theirs:
        return None
    first, other = ours[0], theirs[0]
    losses = [[a, b] for a, b in zip(_losses(baseline), _losses(variant), strict=False)][:_MOST_LOSSES]
    norm = first.get("norm") or 0.0
    differs = abs(other.get("norm", 0.0) - norm) / norm if norm else None
    if len({each.get("sha256") for each in ours}) > 1:
        says = "Two runs of the job as it is differ in their bits already (it draws other random numbers each time)."
        return Parity(norm_differs=differs, losses=losses, says=says)
    if len(ours) < 2:
        return Parity(norm_differs=differs, losses=losses)
    same = other.get("sha256") == first.get("sha256")
    says = "The parameters are the same to the last bit." if same else ""
    return Parity(same_bits=same, norm_differs=differs, losses=losses, says=says)


def _losses(trials: Sequence[Trial]) -> list[float | None]:
    return next((each.losses for each in trials if each.losses), [])
