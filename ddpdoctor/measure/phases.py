"""The gaps between the phases of a training step: waiting for data, forward, backward, optimizer.

What lies there belongs to no phase, whatever runs: a loss, a teacher, a metric, a rollout. Where one rank does more of it than the
others, it is work of its own, and not the same computation that takes longer.
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
"""The phases before and behind it."""

_WORDS: dict[Component, tuple[str, str]] = {
    Component.DATA: ("the batch", "the next batch"),
    Component.FORWARD: ("the forward pass", "the forward pass"),
    Component.BACKWARD: ("backward()", "backward()"),
    Component.OPTIMIZER: ("optimizer.step()", "optimizer.step()"),
}
"""What a phase is called before a gap, and behind one."""


def gap_component(gap: Gap) -> Component:
    """What operators in a gap are: a loss or the like where a step needs some to get on, else work outside the phases."""
    before, behind = gap
    needed = before is Component.FORWARD or behind in (Component.BACKWARD, Component.OPTIMIZER)
    return Component.LOSS if needed else Component.OUTSIDE


def word_of(phase: Component) -> str:
    """What a phase is called: ``the forward pass``."""
    return _WORDS[phase][0]


def words_of(gap: Gap) -> str:
    """Where it lies, for a reader: ``between optimizer.step() and the next batch``."""
    before, behind = gap
    return f"between {_WORDS[before][0]} and {_WORDS[behind][1]}"


class Gaps(msgspec.Struct, frozen=True):
    """The gaps of one rank, in order, ns."""

    times: Intervals
    """Disjoint."""
    kind: Ints
    """[N] place in ``kinds``."""
    kinds: tuple[Gap, ...]

    def shifted(self, by_ns: int) -> Gaps:
        """The same, later by this much."""
        return replace(self, times=(self.times[0] + by_ns, self.times[1] + by_ns))

    def at(self, moments: NDArray[Any]) -> Ints:
        """[M] which gap each moment lies in; -1 in none."""
        return place_in(self.times, moments)

    def kind_at(self, moments: NDArray[Any]) -> Ints:
        """[M] place in ``kinds`` of the gap in which each moment lies; -1 in none."""
        at = self.at(moments)
        kinds: Ints = np.where(at >= 0, self.kind[at], -1) if len(self.kind) else at
        return kinds

    def of(self, component: Component) -> Intervals:
        """All whose operators are of this kind of work."""
        return self.among([gap for gap in self.kinds if gap_component(gap) is component])

    def among(self, gaps: list[Gap]) -> Intervals:
        """All of these kinds."""
        chosen = np.isin(self.kind, [place for place, gap in enumerate(self.kinds) if gap in gaps])
        return self.times[0][chosen], self.times[1][chosen]


NO_GAPS = Gaps(EMPTY, np.empty(0, np.int64), ())
"""Of a rank whose phases were not all marked: nobody knows where a gap would be."""


def gaps_between(phases: Mapping[Component, Intervals]) -> Gaps:
    """The gaps between these phases, which may overlap; none where a forward, backward or optimizer is marked nowhere."""
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
        tuple((names[before], names[behind]) for before, behind in kinds),
    )


def by_gap(
    gaps: Gaps, moments: NDArray[Any], starts: NDArray[Any], ends: NDArray[Any]
) -> dict[Gap, Intervals]:
    """Intervals by the gap in which each was begun, at its ``moment``."""
    kind = gaps.kind_at(moments)
    return {
        gap: union(starts[kind == place], ends[kind == place])
        for place, gap in enumerate(gaps.kinds)
        if (kind == place).any()
    }
