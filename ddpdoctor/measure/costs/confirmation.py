"""Check a late rank's excess against its recorded events alone.

The excess of a late rank also rests on estimates: the operators' share of a gap, waiting that hides work, work that is only slower. A
report draws the recorded events next to it. Here the ranks are compared once more by these events alone, in the steps in which the
rank is late: a rank that computes longer has longer phases there, and no longer gap between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ddpdoctor.measure.attribution import others_median
from ddpdoctor.measure.numerics import Array
from ddpdoctor.measure.taxonomy import (
    BETWEEN_PHASES,
    COMPUTATION,
    INDEX,
    LATE_COMPONENTS,
    PHASES,
    Component,
    Components,
    LateCause,
)


class _Tuning(msgspec.Struct, frozen=True):
    most: float = 0.5
    """Part of the lateness that the events must show for another kind of work, for that kind to be named."""


_TUNING = _Tuning()


def confirmed_by_events(
    drawn: Array, cause: LateCause, removed: Sequence[Array], positions: Sequence[int]
) -> dict[str, Any]:
    """The fields ``late_ms``, ``drawn_ms`` (means over the ranks) and ``drawn_as`` of a cost.

    ``drawn`` [cycles, R, C] is the recorded work, ``removed`` [N, K, R] ns per group the excess of these ranks for the cause. {} where
    they have no excess, or nothing of that kind is recorded.
    """
    said = np.concatenate([of_group.sum(axis=1) for of_group in removed])
    hits = {position: said[:, position] > 0 for position in positions if (said[:, position] > 0).any()}
    components = LATE_COMPONENTS.get(cause)
    if not hits or components is None or cause == LateCause.UNKNOWN:
        return {}
    if cause == LateCause.COMPUTE and not np.median(_of(drawn, COMPUTATION), axis=0)[list(hits)].any():
        return {}

    def in_its_steps(values: Array) -> float:
        medians = [np.median(values[hit, position]) for position, hit in hits.items()]
        return float(np.mean(medians)) / 1e6

    late_ms = in_its_steps(said)
    shown = {
        kind: in_its_steps(_beyond(drawn, kind)) for kind in LATE_COMPONENTS if kind != LateCause.UNKNOWN
    }
    elsewhere = max((kind for kind in shown if kind != cause), key=lambda kind: shown[kind])
    instead = shown[cause] < _TUNING.most * late_ms <= shown[elsewhere]
    return {"late_ms": late_ms, "drawn_ms": shown[cause], "drawn_as": elsewhere if instead else None}


def _of(drawn: Array, components: Components) -> Array:
    """[cycles, R] ns."""
    whole: Array = drawn[:, :, [INDEX[name] for name in components]].sum(axis=2)
    return whole


def _beyond(drawn: Array, cause: LateCause) -> Array:
    """[cycles, R] ns of a kind of work in excess of the median of the other ranks. For computation, a rank that is slower in its phases
    is allowed the same slowdown in the gaps between them: up to that, a longer gap counts as computation too."""
    own = _of(drawn, LATE_COMPONENTS[cause])
    beyond: Array = own - others_median(own)
    if cause != LateCause.COMPUTE:
        return beyond
    usual = np.median(_of(drawn, PHASES), axis=0)
    slower = np.clip(usual / np.maximum(others_median(usual), 1.0) - 1.0, 0.0, None)
    gaps = _of(drawn, (*BETWEEN_PHASES, Component.HOST))
    others = others_median(gaps)
    alike: Array = np.clip(np.minimum(gaps - others, slower * others), 0.0, None)
    return beyond + alike
