"""The cycles in which a rank's excess in one kind of work counts.

It is *persistent* where its median over the cycles stands out of its own scatter, and *sporadic* where single cycles stand out
of the rank's usual ones. Scatter that hits all ranks alike, as on a busy machine, is neither.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ddpdoctor.measure.numerics import Array, Ints, Mask, carried_by_few, median_error, scatter_of


class LatenessTuning(msgspec.Struct, frozen=True):
    """What stands out of a rank's scatter."""

    persistent_sigmas: float = 4.0
    """Standard errors of the median by which a persistent excess must stand out. Were the scatter known, chance would do so once in
    30,000 looks, of which a job has dozens (ranks times kinds of work); of few cycles it is not. Simulated in whole windows of 2 to 8
    ranks alike, whose work scatters by 2 to 10 %: in 2 to 9 % of the windows of four cycles some rank is named, in up to 5 % of
    those of five, 4 % of six, 2 % of eight and ten; of those of 50, in fewer than 1 %."""
    persistent_share: float = 0.01
    """Share of the step below which an excess is not looked at: NVRx and others call a rank slow from a few per cent on."""
    spike_sigmas: float = 6.0
    """Robust standard deviations beyond a rank's own usual excess that make a cycle an outlier (SageMaker's StepOutlier uses 3
    of the plain ones, which the outliers themselves inflate)."""
    spike_share: float = 0.15
    """Share of the median step that an outlier must exceed as well."""
    fewest_spikes: int = 2
    """Outliers of a rank below which it is not late with them: one is some rank's in any case."""
    most_stalls: int = 2
    """Outliers of a rank that is late in every cycle, which are no part of what lasts; three are a pattern, as rules have it."""
    stalls_share: float = 0.1
    """And the part of all cycles that they must be less than: of few cycles none is beyond the usual."""
    stall_weighs: float = 0.25
    """Part of what the rank loses in all other cycles from which on they would spoil its mean: prices are good to a third."""
    fewest_cycles: int = 4
    """Cycles from which on a rank's own scatter is known."""
    few_cycles_share: float = 0.05
    """Share of the step that an excess must reach in a window of fewer cycles; twice that with fewer than four ranks, unless the
    cycles repeat, and twice again in a single cycle."""
    repeats: float = 40.0
    """Times by how much it differs from cycle to cycle that an excess must be in each of a few cycles for these to repeat: of
    two values around zero one pair in a hundred agrees as well (the tail of Cauchy's distribution)."""
    steady: float = 4.0
    """And times the most by which any kind of work differs: as many as standard errors elsewhere, of the largest deviation
    instead of a usual one."""
    counts_as_sign: float = 0.5
    """Part of the usual excess from which on a cycle's, or its opposite, has a sign: noise around zero has none."""
    sign_sigmas: float = 3.0
    """Standard deviations of a sign test by which an excess must keep its sign."""
    sign_share: float = 0.6
    """Or this part of the cycles by which one sign must lead: four of five."""


LATENESS = LatenessTuning()
_COMPARED = 4
"""Ranks from which on the median of the others is never the late one's, so that their scatter can stand for the unknown one over
the cycles. That follows from how they are compared, and is no matter of degree."""


class LateCycles(msgspec.Struct, frozen=True):
    """Where one kind of work makes ranks late."""

    late: Mask
    """[cycles, R]"""
    by_chance: bool
    """Whether there are outliers that strike the ranks by chance."""
    stands_out_in: tuple[int, ...] = ()
    """Steps, where no more speaks for it than that these stand out of a short window."""


def late_cycles(
    more: Array, steps: Ints, step_ns: float, place_chance: float, unsteady_ns: float = np.inf
) -> LateCycles:
    """Where an excess over the other ranks, ``more`` [cycles, R] ns, is persistent or sporadic.

    ``place_chance``: see :func:`ddpdoctor.measure.numerics.carried_by_few`. ``unsteady_ns``: the most by which any kind of work
    differs from cycle to cycle.
    """
    middle = np.median(more, axis=0)
    scatter = scatter_of(more - middle)
    persistent = _is_persistent(more, middle, scatter, step_ns, unsteady_ns)
    # What turns into its opposite in other cycles is no usual excess, and must not hide single ones.
    usual = np.where(persistent & ~_keeps_its_sign(more, middle), 0.0, middle)
    always = (more > 0) & (persistent & (usual > 0))
    beyond = more - np.maximum(usual, 0)
    least = np.maximum(LATENESS.spike_sigmas * scatter, LATENESS.spike_share * step_ns)
    spike = beyond > least
    # Ranks that scatter more have fewer outliers of their own; whose they are is judged by one measure for all.
    struck = beyond > least[spike.any(axis=0)].min(initial=float(least.max()))
    carried = carried_by_few(struck, more, steps, place_chance) & spike
    by_chance = bool((spike & ~always).sum() >= LATENESS.fewest_spikes) and not carried.any()
    sporadic = carried & (carried.sum(axis=0) >= LATENESS.fewest_spikes)
    return LateCycles((always & ~_stalls(more, spike, always)) | sporadic, by_chance)


def _stalls(more: Array, spike: Mask, always: Mask) -> Mask:
    """[cycles, R] where a rank that is late in every cycle stopped once or twice for so long that its mean would tell of that:
    such a stall is no part of what lasts."""
    stalls = spike & always
    lasting_ns = np.where(always & ~stalls, more, 0.0).sum(axis=0)
    lone = (stalls.sum(axis=0) <= LATENESS.most_stalls) & (
        stalls.sum(axis=0) < len(more) * LATENESS.stalls_share
    )
    heavy = np.where(stalls, more, 0.0).sum(axis=0) > LATENESS.stall_weighs * lasting_ns
    alone: Mask = stalls & (lone & heavy)
    return alone


def _is_persistent(more: Array, middle: Array, scatter: Array, step_ns: float, unsteady_ns: float) -> Mask:
    """[R] whose excess stands out of its own scatter and the median rank's; in too few cycles to know these, out of all ranks' together,
    and clearly.

    In few cycles, that nothing in the window differs from cycle to cycle by nearly as much speaks for it as well as what the
    other ranks show, and instead of that where these are too few.
    """
    cycles, world = more.shape
    # Of few cycles, some rank's own scatter is small by chance.
    scatter = np.maximum(scatter, np.median(scatter))
    stands_out: Mask = middle > LATENESS.persistent_sigmas * median_error(scatter, cycles)
    enough: Mask = stands_out & (middle > LATENESS.persistent_share * step_ns)
    if cycles >= LATENESS.fewest_cycles:
        return enough
    repeat = more.min(axis=0) > np.maximum(
        LATENESS.repeats * np.abs(more - middle).max(axis=0), LATENESS.steady * unsteady_ns
    )
    known = repeat & (cycles > 1)
    if world >= _COMPARED:
        beyond_ranks = more.min(axis=0) > LATENESS.persistent_sigmas * scatter_of(more.ravel())
        known = known & enough | beyond_ranks
        enough = known
    share = LATENESS.few_cycles_share * np.where(known, 1, 2) * (1 if cycles > 1 else 2)
    clearly: Mask = enough & (middle > share * step_ns)
    return clearly


def _keeps_its_sign(more: Array, usual: Array) -> Mask:
    """[R] whether a rank's excess does not turn into its opposite in other cycles, as that of ranks that are late in turn
    does: by a sign test of what is half as large as the usual excess or larger, at three sigmas, or in four of five cycles."""
    positive = (more > LATENESS.counts_as_sign * usual).sum(axis=0)
    negative = (more < -LATENESS.counts_as_sign * usual).sum(axis=0)
    both = positive + negative
    needed = np.minimum(LATENESS.sign_sigmas * np.sqrt(both), LATENESS.sign_share * both)
    kept: Mask = positive - negative > needed
    return kept
