"""Merge the costs of all pricers into one price per cause."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ddpdoctor.measure.facts import Cost, saving
from ddpdoctor.measure.taxonomy import LATE_COMPONENTS, LateCause

from .context import Costs
from .price_range import range_of_sum

_TOTAL = f"late.{LateCause.TOTAL}"
_WORK = frozenset(f"late.{cause}" for cause in LATE_COMPONENTS)
"""Causes with components of their own. Others describe the same time (uneven work is computation) or excluded steps (evaluations),
and add nothing to the total lateness."""


_COMPUTING = tuple(
    f"late.{cause}"
    for cause in (LateCause.COMPUTE, LateCause.UNEVEN, LateCause.THROTTLED, LateCause.CPU_STARVED)
)
"""``late.compute`` and its more specific names; a pricer uses one of them."""


def merge(priced: Iterable[Costs], mean_ms: float | None) -> Costs:
    """One cost per cause: the largest of those that several pricers found. A window shows a few steps, the log of the whole run what
    happens seldom. ``late.total`` grows by what the merged prices add to it.

    ``mean_ms`` is the mean step.
    """
    merged: Costs = {}
    summed: Costs = {}
    for costs in priced:
        for path, price in costs.items():
            if path not in merged or price.ms_per_step > merged[path].ms_per_step:
                merged[path] = price
                summed = costs if path == _TOTAL else summed
    for path in sorted(_WORK & merged.keys()):
        price, total = merged[path], merged.get(_TOTAL)
        names = _COMPUTING if path == _COMPUTING[0] else (path,)
        more_ms = price.ms_per_step - sum(summed[name].ms_per_step for name in names if name in summed)
        if more_ms > 0:
            if total is not None:
                whole_ms = total.ms_per_step + more_ms
                merged[_TOTAL] = add_cost(total, price, whole_ms, mean_ms or whole_ms)
            else:
                merged[_TOTAL] = msgspec.structs.replace(price, ranks=None)
    return merged


def costs_under(group: str, costs: Costs) -> dict[str, Cost]:
    """Costs of one group of facts, ``late`` or ``shared``, by their names in it."""
    prefix = f"{group}."
    return {path.removeprefix(prefix): price for path, price in costs.items() if path.startswith(prefix)}


def add_cost(cost: Cost, more: Cost, ms: float, mean_ms: float) -> Cost:
    """``cost`` increased to ``ms`` by ``more``, with the range of the sum of both."""
    unsure = {**dict.fromkeys(("low_ms_per_step", "high_ms_per_step")), **range_of_sum(cost, more, ms)}
    return msgspec.structs.replace(
        cost,
        **saving(ms, mean_ms),
        waiting_ms_per_step=None,
        going_on_ms_per_step=None,
        **unsure,
    )
