"""Gaps between the phases of a training step: waiting for data, forward, backward, optimizer.

Work in a gap belongs to no phase: a loss, a teacher model, a metric, a rollout. If one rank does more of it than the others, that is
additional work, not the same computation taking longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import EMPTY, Array, Intervals, Ints, place_in, union
from ddpdoctor.measure.taxonomy import Component

Gap = tuple[Component, Component]
"""The phases before and after the gap."""

_PHASE_NAMES: dict[Component, tuple[str, str]] = {
    Component.DATA: ("loading the batch", "the next batch"),
    Component.FORWARD: ("the forward pass", "the forward pass"),
    Component.BACKWARD: ("backward()", "backward()"),
    Component.OPTIMIZER: ("optimizer.step()", "optimizer.step()"),
}
"""Name of a phase that precedes a gap, and of a phase that follows one."""


def gap_component(gap: Gap) -> Component:
    """Return the component of operators in a gap: ``loss`` if a step needs some to continue (after the forward pass, or before
    the backward pass or optimizer), else ``outside``."""
    before, after = gap
    needed = before is Component.FORWARD or after in (Component.BACKWARD, Component.OPTIMIZER)
    return Component.LOSS if needed else Component.OUTSIDE


def phase_name(phase: Component) -> str:
    """Return the name of a phase: ``the forward pass``."""
    return _PHASE_NAMES[phase][0]


def gap_description(gap: Gap) -> str:
    """Return a description of the gap: ``between optimizer.step() and the next batch``."""
    before, after = gap
    return f"between {_PHASE_NAMES[before][0]} and {_PHASE_NAMES[after][1]}"


class Gaps(msgspec.Struct, frozen=True):
    """The gaps of one rank, in order, ns."""

    times: Intervals
    """Disjoint."""
    kind: Ints
    """[N] index in ``kinds``."""
    kinds: tuple[Gap, ...]

    def shifted(self, by_ns: int) -> Gaps:
        """Return the gaps moved later by ``by_ns``."""
        return replace(self, times=(self.times[0] + by_ns, self.times[1] + by_ns))

    def at(self, moments: NDArray[Any]) -> Ints:
        """[M] index of the gap that contains each moment; -1 if none does."""
        return place_in(self.times, moments)

    def kind_at(self, moments: NDArray[Any]) -> Ints:
        """[M] index in ``kinds`` of the gap that contains each moment; -1 if none does."""
        at = self.at(moments)
        kinds: Ints = np.where(at >= 0, self.kind[at], -1) if len(self.kind) else at
        return kinds

    def of(self, component: Component) -> Intervals:
        """Return the gaps whose operators belong to this component."""
        return self.of_kinds([gap for gap in self.kinds if gap_component(gap) is component])

    def of_kinds(self, gaps: list[Gap]) -> Intervals:
        """Return the gaps of these kinds."""
        chosen = np.isin(self.kind, [place for place, gap in enumerate(self.kinds) if gap in gaps])
        return self.times[0][chosen], self.times[1][chosen]


NO_GAPS = Gaps(EMPTY, np.empty(0, np.int64), ())
"""Gaps of a rank for which not all phases were marked, so that its gaps are unknown."""


def gaps_between(phases: Mapping[Component, Intervals]) -> Gaps:
    """Return the gaps between these phases, which may overlap; none if forward, backward or optimizer is not marked at all."""
    needed = (Component.FORWARD, Component.BACKWARD, Component.OPTIMIZER)
    if not all(len(phases.get(component, EMPTY)[0]) for component in needed):
        return NO_GAPS
    names = tuple(phases)
    starts = np.concatenate([phases[name][0] for name in names])
    ends = np.concatenate([phases[name][1] for name in names])
    codes = np.repeat(np.arange(len(names)), [len(phases[name][0]) for name in names])
    order = np.argsort(starts, kind="stable")
    starts, ends, codes = starts[order], ends[order], codes[order]
    reach: Array = np.maximum.accumulate(ends)
    latest = np.maximum.accumulate(np.where(ends == reach, np.arange(len(ends)), 0))
    at = np.flatnonzero(starts[1:] > reach[:-1])
    pairs = list(zip(codes[latest[at]].tolist(), codes[at + 1].tolist(), strict=True))
    kinds = list(dict.fromkeys(pairs))
    number = {pair: place for place, pair in enumerate(kinds)}
    return Gaps(
        (reach[at], starts[at + 1]),
        np.array([number[pair] for pair in pairs], np.int64),
        tuple((names[before], names[after]) for before, after in kinds),
    )


def by_gap(
    gaps: Gaps, moments: NDArray[Any], starts: NDArray[Any], ends: NDArray[Any]
) -> dict[Gap, Intervals]:
    """Return the intervals by the kind of gap that contains each one's moment in ``moments``."""
    kind = gaps.kind_at(moments)
    return {
        gap: union(starts[kind == place], ends[kind == place])
        for place, gap in enumerate(gaps.kinds)
        if (kind == place).any()
    }
