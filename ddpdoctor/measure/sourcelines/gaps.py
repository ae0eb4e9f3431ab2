"""Finds the gap between phases of a training step that contains most of some work, or most of the late ranks' excess work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.numerics import EMPTY, Intervals, intersect, subtract, total, union, union_of
from ddpdoctor.measure.phases import Gap, gap_component, gap_description
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.measure.taxonomy import BETWEEN_PHASES, PHASES, Component
from ddpdoctor.measure.window import Window


class _Tuning(msgspec.Struct, frozen=True):
    most: float = 0.5
    """The main gap contains more than this share of the time in all gaps."""
    whole: float = 0.9
    """Share from which the gap is reported without "mostly"; a cost includes the other gaps in any case."""


_TUNING = _Tuning()


class RankGaps(msgspec.Struct, frozen=True):
    """Work of one rank in gaps between phases."""

    times: Mapping[Gap, Intervals]
    """By kind of gap, on the rank's own clock, without recorded activities and waiting for other ranks."""
    per_step: float
    """1 / number of steps."""
    elsewhere_ns: float = 0.0
    """The same kinds of work outside of gaps, ns per step."""

    def ns_in(self, gap: Gap) -> float:
        """Work in the gap, ns per step."""
        return self.per_step * total(self.times[gap]) if gap in self.times else 0.0


def free_gaps(log: RankLog) -> dict[Gap, Intervals]:
    """Gaps of all steps of a log, minus recorded activities and synchronisations; ns since its origin."""
    activities, origin_ns = log.activities, log.activities.origin_ns
    points = [(point.arrival_ns - origin_ns, point.end_ns - origin_ns) for point in log.sync_points]
    syncs = np.array(points, float).reshape(-1, 2)
    covered_times = union_of(union(syncs[:, 0], syncs[:, 1]), *activities.sets.values())
    return {gap: subtract(activities.gaps.of_kinds([gap]), covered_times) for gap in activities.gaps.kinds}


def gaps_of_log(log: RankLog, free: Mapping[Gap, Intervals], wanted: set[int]) -> RankGaps:
    """The gaps in the ``wanted`` steps of a log. ``free``: the gaps of all its steps."""
    origin_ns = log.activities.origin_ns
    steps = [step for step in log.steps if step.number in wanted]
    inside = union(
        np.array([step.start_ns - origin_ns for step in steps], float),
        np.array([step.end_ns - origin_ns for step in steps], float),
    )
    times = {gap: intersect(whole, inside) for gap, whole in free.items()}
    return RankGaps(times, 1.0 / max(len(steps), 1))


def gaps_of_window(window: Window, work: Intervals) -> RankGaps:
    """The part of ``work`` in the gaps of a window."""
    covered_times = union(window.collectives.start, window.collectives.end)
    own = work if window.on_device else subtract(work, covered_times)
    times = {gap: intersect(own, inside) for gap, inside in window.phase_gaps.items()}
    per_step = 1.0 / max(len(window.steps), 1)
    elsewhere = subtract(own, union_of(EMPTY, *times.values()))
    return RankGaps(times, per_step, per_step * total(elsewhere))


def lies_in_gaps(components: Sequence[Component]) -> bool:
    """Whether this is only work between the phases."""
    return not set(components).isdisjoint(BETWEEN_PHASES) and set(components).isdisjoint(PHASES)


def lies_outside(components: Sequence[Component]) -> bool:
    """Whether this is host work outside the phases."""
    outside = {Component.HOST, *BETWEEN_PHASES}
    return not outside.isdisjoint(components) and set(components).isdisjoint(PHASES)


class MainGap(msgspec.Struct, frozen=True):
    """The gap that contains most of some work."""

    gap: Gap
    whole: bool
    """Whether nearly all of the work is in it."""

    @property
    def words(self) -> str:
        """The gap in words."""
        return gap_description(self.gap) if self.whole else f"mostly {gap_description(self.gap)}"


def main_gap(
    chosen: Sequence[RankGaps], others: Sequence[RankGaps], components: Sequence[Component]
) -> MainGap | None:
    """The gap with most of this kind of work of the ``chosen`` ranks, in excess of the median of the ``others``; None if no gap has
    more than half of it."""
    kinds = {gap for rank in chosen for gap in rank.times if gap_component(gap) in components}
    beyond = {gap: float(np.mean([rank.ns_in(gap) for rank in chosen])) for gap in kinds}
    if others:
        beyond = {
            gap: ns - float(np.median([rank.ns_in(gap) for rank in others])) for gap, ns in beyond.items()
        }
    elsewhere = float(np.mean([rank.elsewhere_ns for rank in chosen]))
    if others:
        elsewhere -= float(np.median([rank.elsewhere_ns for rank in others]))
    everywhere = max(elsewhere, 0.0) + sum(max(ns, 0.0) for ns in beyond.values())
    most = max(beyond, key=lambda gap: beyond[gap], default=None)
    if most is None or beyond[most] <= _TUNING.most * everywhere:
        return None
    return MainGap(most, beyond[most] >= _TUNING.whole * everywhere)
