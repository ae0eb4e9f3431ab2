"""What is said of one kind of work: who straggles with it, who is late in turn, or that chance had it so.

Where recorded work comes late by chance (a batch now here, now there), its cost is real, but it is common to the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from ddpdoctor.measure.graph import Graph, RankSteps
from ddpdoctor.measure.numerics import Array, Mask, chance_of_places, shares_of_step
from ddpdoctor.measure.taxonomy import LATE_COMPONENTS, RECORDED, LateCause

from .attribution import component
from .comparison import COLUMNS, Comparison
from .lateness import LATENESS, LateCycles, is_of_one, late_cycles, most_of
from .standout import StandingOut, all_starve, standing_out
from .turns import made_by_the_job, rotate, turns


class Evidence(msgspec.Struct, frozen=True):
    """What is known of all kinds of work together, before each is judged."""

    step_share: dict[LateCause, float]
    """Part of a usual step that this kind of work takes."""
    place_chance: dict[LateCause, float]
    """Probability that a machine's disturbances fall into this kind of work as the job's do."""
    standing_out: StandingOut
    """What stands out of a short window."""
    starving: Mask
    """[cycles] in which all ranks of a short window wait for data."""
    waits_ns: Array
    """[cycles, R] for data."""


def evidence_of(graph: Graph, comparison: Comparison, *, short: bool) -> Evidence:
    """Look at all kinds of work together. ``short``: the graph is a window on devices, and all that is known of the job."""
    waits = component([group.work for group in graph.groups], LATE_COMPONENTS[LateCause.DATA])
    waits_ns = np.concatenate([of_group.sum(axis=1) for of_group in waits])
    least_ns = LATENESS.spike_share * comparison.step_ns
    shares = shares_of_step(COLUMNS, comparison.work)
    return Evidence(
        step_share=shares,
        place_chance=chance_of_places(COLUMNS, shares, comparison.more, least_ns),
        standing_out=standing_out(comparison) if short else StandingOut({}, {}),
        starving=all_starve(waits_ns, comparison.step_ns) & short,
        waits_ns=waits_ns,
    )


class Turns(msgspec.Struct, frozen=True):
    """Ranks that are late in turn with one kind of work."""

    where: Mask
    """[cycles, R]"""
    proven: bool
    """Whether more speaks for it than that these cycles stand out of a short window."""
    rotate: bool
    """Whether the step number tells whose turn it is."""


class Verdict(msgspec.Struct, frozen=True):
    """What is said of one kind of work. Ranks straggle with it, or are late in turn, or neither."""

    cause: LateCause
    late: Mask | None = None
    """[cycles, R] where stragglers are late; None where there are none."""
    stragglers: tuple[int, ...] = ()
    """Positions, those with most excess first."""
    turns: Turns | None = None
    by_chance: bool = False
    """Whether it takes long now on this rank, now on that one, as chance has it."""
    stands_out_in: tuple[int, ...] = ()
    """Steps, where no more speaks for it than that these stand out of a short window."""


def judge(
    cause: LateCause, comparison: Comparison, evidence: Evidence, ranks: Sequence[RankSteps]
) -> Verdict:
    """Judge one kind of work. ``ranks`` tell how much work each rank was given in which step."""
    seen = _seen_late(cause, comparison, evidence)
    more = comparison.more_of(cause)
    excess = np.clip(more, 0, None)
    carried_ns = np.where(seen.late, excess, 0.0).sum(axis=0)
    recorded = cause in RECORDED
    if carried_ns.any():
        return Verdict(
            cause,
            late=seen.late,
            stragglers=most_of(carried_ns),
            by_chance=recorded and seen.by_chance,
            stands_out_in=seen.stands_out_in,
        )
    where = turns(comparison.work_of(cause), more, comparison.step_ns)
    if recorded:
        by_chance = seen.by_chance or bool(where.any())
        return Verdict(cause, by_chance=by_chance, stands_out_in=seen.stands_out_in)
    # What one rank makes the others lose, less than chance forbids to call it a straggler, is not all ranks'.
    of_several = not is_of_one(np.where(where, more, 0.0).sum(axis=0))
    proven = of_several and made_by_the_job(where, comparison.steps, ranks, evidence.place_chance[cause])
    chosen = where if proven else evidence.standing_out.in_turn.get(cause)
    if chosen is None:
        return Verdict(cause, stands_out_in=seen.stands_out_in)
    in_turn = Turns(chosen, proven, rotate(chosen, comparison.steps))
    return Verdict(cause, turns=in_turn, stands_out_in=seen.stands_out_in)


def _seen_late(cause: LateCause, comparison: Comparison, evidence: Evidence) -> LateCycles:
    """Where ranks are late with this kind of work, by all that speaks for and against it."""
    place_chance = 1.0 if cause in RECORDED else evidence.place_chance[cause]
    seen = late_cycles(
        comparison.more_of(cause),
        comparison.work_of(cause),
        comparison.steps,
        comparison.step_ns,
        place_chance,
        evidence.step_share[cause],
        drifts=not comparison.on_device and cause not in RECORDED,
    )
    if cause == LateCause.CHECKPOINT:
        seen = _or_of_few(seen, comparison)
    if cause in evidence.standing_out.of_few:
        seen = _or_standing_out(seen, comparison, evidence.standing_out.of_few[cause])
    if cause == LateCause.DATA and evidence.starving.any():
        seen = _but_starving(seen, comparison, evidence)
    return seen


def _or_of_few(seen: LateCycles, comparison: Comparison) -> LateCycles:
    """Where no rank stands out: checkpoints of the few ranks, half of all at most, that alone ever save one.

    What a rank is seen to do, and the others never, is no chance, however seldom.
    """
    if seen.late.any():
        return seen
    doers = (comparison.work_of(LateCause.CHECKPOINT) > 0).sum(axis=0) > 0
    if 2 * doers.sum() > len(doers):
        return seen
    noticed = comparison.more_of(LateCause.CHECKPOINT) > LATENESS.persistent_share * comparison.step_ns
    late = doers & noticed
    return LateCycles(late, by_chance=seen.by_chance and not late.any())


def _or_standing_out(seen: LateCycles, comparison: Comparison, where: Mask) -> LateCycles:
    """What stands out of a short window, where no other cycle is late anyway."""
    if (seen.late & ~where).any():
        return seen
    steps = sorted(comparison.steps[where.any(axis=1)].tolist())
    return LateCycles(where, by_chance=False, stands_out_in=tuple(steps))


def _but_starving(seen: LateCycles, comparison: Comparison, evidence: Evidence) -> LateCycles:
    """Without the steps in which all ranks wait for data, one a little longer than another, and without those in which the
    rank itself waits for nothing: that makes no rank late."""
    waiting = evidence.waits_ns > LATENESS.persistent_share * comparison.step_ns
    late = seen.late & ~evidence.starving[:, None] & waiting
    return replace(seen, late=late, by_chance=seen.by_chance or not late.any())
