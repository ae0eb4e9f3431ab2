"""90 % range of a price: of the saving after the cause is fixed.

The saving is the difference of two means: of the recorded steps, and of future steps. It differs from the price by independent
errors, whose squares add up:

- **scatter of the cycles**: the mean of the gains, and the mean of the rest of the steps, once as recorded and once in the future.
  Both are estimated from the cycles, see :func:`~ddpdoctor.measure.numerics.mean_error`;
- **run to run**: the mean step of the same job differs from one start to the next;
- **the replay**: it removes the cause and leaves all else unchanged. Where gains differ from cycle to cycle, this can be checked: the
  rest of a cycle must not depend on its gain. If ``rest = a + b x gain``, the saving may be ``1 + b`` times the price. ``b`` is
  weighted with the known error of replays, so that a few cycles do not outweigh it. An error that all cycles have in common does
  not show;
- **the clocks** of several hosts, and assumptions of the pricer.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ddpdoctor.measure.facts import RANGE_LEVEL, Cost
from ddpdoctor.measure.numerics import Array, mean_error, normal


class _Tuning(msgspec.Struct, frozen=True):
    replay_share: float = 0.08
    """Relative error of replays (standard deviation), from test jobs with and without the fix, see docs/how-it-works.md."""
    run_share: float = 0.01
    """Part of the step by which a job's means differ from one start to the next (standard deviation): 1 to 2 %, as the
    rules' least share has it."""


_TUNING = _Tuning()


class PriceRange(msgspec.Struct, frozen=True):
    """Data for the range of a price, ns."""

    gains: Array
    """[N] by cycle, in order of steps."""
    rest: Array
    """[N] rest of each cycle without its gain."""
    assumed_ns: float = 0.0
    """Standard deviation of assumptions: clocks, extrapolations."""

    def range_ns(self) -> tuple[float, float] | None:
        """(low, high) of the mean gain, between 0 and the whole step; None with too few cycles."""
        gain, left = float(self.gains.mean()), float(self.rest.mean())
        own = mean_error(self.gains, RANGE_LEVEL)
        if np.isnan(own):
            return None
        others = mean_error(self.rest, RANGE_LEVEL)
        slope = self._dependence(others)
        errors = (
            own,
            np.sqrt(2.0) * others,
            _TUNING.run_share * left,
            _TUNING.replay_share * gain,
            self.assumed_ns,
        )
        half = normal(RANGE_LEVEL) * float(np.sqrt(np.square(errors).sum()))
        low, high = gain * (1 + min(slope, 0.0)) - half, gain * (1 + max(slope, 0.0)) + half
        return max(0.0, low), min(gain + left, high)

    def _dependence(self, rest_error: float) -> float:
        """``b`` in ``rest = a + b x gain``, weighted with the known error of replays."""
        spread = self.gains - self.gains.mean()
        square = float((spread**2).sum())
        if square <= 0.0:
            return 0.0
        slope = float((spread * self.rest).sum()) / square
        # The error of a mean of N is one value's error over the root of N; that of a slope, over the root of ``square``.
        error, known = rest_error**2 * len(self.rest) / square, _TUNING.replay_share**2
        return slope * known / (known + error)


def range_fields(gain_ns: float, ends_ns: tuple[float, float] | None, *others_ns: float) -> dict[str, Any]:
    """The fields of a :class:`~ddpdoctor.measure.facts.Cost` for a range around ``gain_ns``, widened to include the savings of the
    same fix in ``others_ns``: alone, after all others, as its share. {} where there is no range."""
    if ends_ns is None:
        return {}
    known = (gain_ns, *others_ns)
    low_ns, high_ns = min(known) - (gain_ns - ends_ns[0]), max(known) + (ends_ns[1] - gain_ns)
    return {"low_ms_per_step": max(0.0, low_ns) / 1e6, "high_ms_per_step": high_ns / 1e6}


def range_of_share(whole: Cost, ms: float, assumed_share: float) -> dict[str, Any]:
    """The same fields for ``ms``, a part of the saving that ``whole`` prices: with the width of its range, in ms, and an additional
    error of ``assumed_share`` of ``ms`` (a standard deviation)."""
    sides = _sides_ms(whole)
    assumed_ms = normal(RANGE_LEVEL) * assumed_share * ms
    return {} if sides is None else _around(ms, *(float(np.hypot(side, assumed_ms)) for side in sides))


def range_of_sum(one: Cost, other: Cost, ms: float) -> dict[str, Any]:
    """The same fields for ``ms``, the sum of two costs; {} where one of them has no range."""
    sides = _sides_ms(one), _sides_ms(other)
    if sides[0] is None or sides[1] is None:
        return {}
    return _around(ms, *(float(np.hypot(*pair)) for pair in zip(sides[0], sides[1], strict=True)))


def _sides_ms(cost: Cost) -> tuple[float, float] | None:
    """Distances of the ends of the range below and above the price, ms."""
    if cost.low_ms_per_step is None or cost.high_ms_per_step is None:
        return None
    return cost.ms_per_step - cost.low_ms_per_step, cost.high_ms_per_step - cost.ms_per_step


def _around(ms: float, below_ms: float, above_ms: float) -> dict[str, Any]:
    return {"low_ms_per_step": max(0.0, ms - below_ms), "high_ms_per_step": ms + above_ms}
