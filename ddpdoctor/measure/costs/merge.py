"""All costs together: the one place where a cause that two pricers know gets one price."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ddpdoctor.measure.facts import Cost, LateFacts, SharedFacts
from ddpdoctor.measure.taxonomy import LATE_COMPONENTS, LateCause

from .context import Costs
from .sureness import together

_TOTAL = f"late.{LateCause.TOTAL}"
_WORK = frozenset(f"late.{cause}" for cause in LATE_COMPONENTS)
"""Causes with components of their own. Others are readings of the same time (uneven work is computation), or of steps that
are set aside (evaluations): they add nothing to how late ranks are in all."""


def merge(priced: Iterable[Costs], mean_ms: float | None) -> Costs:
    """Of a cause that several pricers found, the larger cost stands, never both: a window shows a few steps, the log of the
    whole run what comes now and then. All lateness together (``late.total``) grows by what stands beyond it.

    ``mean_ms`` is the mean step.
    """
    merged: Costs = {}
    for costs in priced:
        complete = _TOTAL in costs
        for path, price in costs.items():
            known = merged.get(path)
            if known is not None and _ms(known) >= _ms(price):
                continue
            merged[path] = price
            if path in _WORK and not complete and isinstance(price, Cost):
                before = merged.get(_TOTAL)
                base = before if isinstance(before, Cost) else msgspec.structs.replace(price, ranks=None)
                whole_ms = (_ms(before) if before is not None else 0.0) + _ms(price)
                whole_ms -= _ms(known) if known is not None else 0.0
                merged[_TOTAL] = grown(base, price, whole_ms, mean_ms or whole_ms)
    return merged


def late_facts(costs: Costs) -> LateFacts:
    """Facts under ``late``."""
    return LateFacts(**_under("late.", costs))


def shared_facts(costs: Costs) -> SharedFacts:
    """Facts under ``shared``."""
    return SharedFacts(**_under("shared.", costs))


def number(costs: Costs, path: str) -> float | None:
    """A plain number that pricing found; None where it did not."""
    price = costs.get(path)
    return price if isinstance(price, float) else None


def _under(prefix: str, costs: Costs) -> dict[str, Cost]:
    return {
        path.removeprefix(prefix): price
        for path, price in costs.items()
        if path.startswith(prefix) and isinstance(price, Cost)
    }


def _ms(price: Cost | float) -> float:
    return price.ms_per_step if isinstance(price, Cost) else price


def grown(cost: Cost, more: Cost, ms: float, mean_ms: float) -> Cost:
    """``cost`` grown to ``ms`` by what ``more`` has beyond it, and as unsure as both."""
    unsure = {**dict.fromkeys(("low_ms_per_step", "high_ms_per_step")), **together(cost, more, ms)}
    return msgspec.structs.replace(
        cost,
        ms_per_step=ms,
        share=ms / mean_ms,
        speedup=mean_ms / max(mean_ms - ms, 1e-3),
        waiting_ms_per_step=None,
        going_on_ms_per_step=None,
        **unsure,
    )
