"""Computes intervals and verdicts from the step times of trials.

Steps within a trial are correlated, and so are consecutive trials. The median of a trial is therefore compared with the baseline's
trials right before and after it, and the interval comes from the spread of these ratios over rounds, not from the number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ddpdoctor.diagnose.trials import Parity
from ddpdoctor.measure.numerics import mean_error, normal

from .running import Trial
from .settings import Results

_LEVEL, _LOOKS = 0.011, 5
"""Significance level per look, and the number of looks for which it holds. After each round from the third on there is one look. With more
looks, as with ``--rounds 50``, the level is multiplied by (5 / looks) ** 1.5. A constant level per look: Pocock, Biometrika 1977. Measured
false-positive rate, by simulation of 8,000 jobs without any effect and one change at a time: 4.4 to 4.8 % within 7 rounds, 4.6 to 5.3 %
within 50. With a constant 2 % per look: 6 to 8 %, and 7 to 15 %."""
LEAST_ROUNDS = 3
"""Fewest rounds for an interval."""
SAME_WITHIN = 0.02
"""Half width of the interval up to which an undecided change counts as "same", as a share of the step time."""
_LAST_BITS = 1e-4
"""Relative difference of the norms of all parameters above which more than the last bits differ. Float32 rounds by 6e-8; rounding in a few
hundred steps stays below a thousand times that."""
_MOST_LOSSES = 256


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, list[float] | None]:
    """(Mean, [low, high] of its confidence interval at ``level``). The interval is None for fewer than three values."""
    middle = float(np.mean(values))
    if len(values) < LEAST_ROUNDS:
        return middle, None
    half = normal(level) * mean_error(np.asarray(values, float), level)
    return middle, [middle - half, middle + half]


class Round(NamedTuple):
    """A trial between two trials of the unchanged job."""

    before: Trial
    trial: Trial
    after: Trial


def level_ms(trial: Trial, rare: bool = False) -> float:
    """Median step time in ms; with ``rare`` the mean, which includes effects that occur in some steps only."""
    return float(np.mean(trial.step_ms) if rare else np.median(trial.step_ms))


def ratios(rounds: Sequence[Round], rare: bool = False) -> list[float]:
    """log(step time of the trial / mean step time of the baseline's trials before and after it) of each round."""
    found = []
    for before, trial, after in rounds:
        baseline_ms = [level_ms(each, rare) for each in (before, after) if len(each.step_ms)]
        if len(trial.step_ms) and baseline_ms:
            found.append(math.log(level_ms(trial, rare) / (sum(baseline_ms) / len(baseline_ms))))
    return found


def change_of(logs: Sequence[float]) -> tuple[float, list[float] | None]:
    """(Relative change of the step time, its 95 % confidence interval corrected for repeated looks). Negative: faster."""
    looks = max(len(logs) - LEAST_ROUNDS + 1, _LOOKS)
    middle, ends = interval(logs, 1 - _LEVEL * (_LOOKS / looks) ** 1.5)
    return math.expm1(middle), None if ends is None else [math.expm1(end) for end in ends]


def verdict(change_interval: Sequence[float] | None) -> str | None:
    """``faster``, ``slower`` or ``same``; None while undecided."""
    if change_interval is None:
        return None
    low, high = change_interval
    if high < 0:
        return "faster"
    if low > 0:
        return "slower"
    return "same" if high - low <= 2 * SAME_WITHIN else None


def parity(
    baseline: Sequence[Trial], variant: Sequence[Trial], results: Results = Results.OTHER
) -> Parity | None:
    """Compare the model's parameters and losses with and without the change. None if they were not recorded. ``results``: the setting's
    possible effect on results."""
    baseline_parameters = [each.parameters for each in baseline if each.parameters]
    variant_parameters = [each.parameters for each in variant if each.parameters]
    if not baseline_parameters or not variant_parameters:
        return None
    first, other = baseline_parameters[0], variant_parameters[0]
    losses = [[a, b] for a, b in zip(_losses(baseline), _losses(variant), strict=False)][:_MOST_LOSSES]
    norm, changed = _norm(first), _norm(other)
    differs = None if norm is None or changed is None or not norm else abs(changed - norm) / norm
    if norm is not None and changed is None:
        return Parity(same_bits=False, losses=losses, says=_NOT_FINITE, unexpected=True)
    if len({each.get("sha256") for each in baseline_parameters}) > 1:
        return Parity(norm_differs=differs, losses=losses, says=_NOT_REPRODUCIBLE)
    if len(baseline_parameters) < 2:
        return Parity(norm_differs=differs, losses=losses)
    same = other.get("sha256") == first.get("sha256")
    if same:
        says = "The parameters are the same to the last bit."
        return Parity(same_bits=True, norm_differs=differs, losses=losses, says=says)
    says, unexpected = _difference_sentence(differs, results)
    return Parity(same_bits=False, norm_differs=differs, losses=losses, says=says, unexpected=unexpected)


_NOT_REPRODUCIBLE = (
    "Two runs of the unchanged job already differ in their bits: "
    "it draws other random numbers each time, or goes on from what an earlier trial wrote."
)
_NOT_FINITE = (
    "With the change some parameters are infinite or no numbers any more: the job does not train like this."
)


def _norm(parameters: Mapping[str, Any]) -> float | None:
    norm = parameters.get("norm")
    return norm if isinstance(norm, float) and math.isfinite(norm) else None


def _difference_sentence(differs: float | None, results: Results) -> tuple[str, bool]:
    """(Sentence on parameters that are not bitwise equal, whether that is unexpected for this setting)."""
    norms = "" if differs is None else f" (their norms by {differs:.0e})"
    if results is Results.SAME:
        by_itself = "which this setting by itself does not cause: something in the job depends on it"
        return f"The parameters differ{norms}, {by_itself}, such as random numbers that workers draw.", True
    if results is Results.LAST_BITS and differs is not None:
        more = differs >= _LAST_BITS
        return f"The parameters differ {'by more than' if more else 'in'} their last bits{norms}.", more
    return f"The parameters differ{norms}.", False


def _losses(trials: Sequence[Trial]) -> list[float | None]:
    return next((each.losses for each in trials if each.losses), [])
