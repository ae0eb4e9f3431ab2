"""Ranks that are late in turn: all of them wait, and no rank alone is a straggler.

Rank *step mod R* writes the log, or each batch is long on another rank: the job waits in every step, yet a rank's own mean
and median say nothing. What a rank does beyond the others in single cycles is taken for such a turn where

- it stands out of the rank's own undisturbed cycles (those of its lowest quarter: its turns may be more than half of all),
  and of the others in the same cycle;
- no rank is a straggler with this kind of work by itself;
- it is not the noise of a busy machine: the turns rotate (step mod R tells whose it is), or they fall into a place where a
  machine's disturbances hardly would (:mod:`ddpdoctor.measure.numerics.significance`), or the rank was given more to compute than
  the others in those steps.

Ranks whose forward or backward takes long at random, with the same amount of work, are not told from a machine whose cores
share a cache, a clock or a hypervisor: waiting for a CPU is recorded, that is not. Nothing is said about them. On devices
kernels tell: see :mod:`.levels`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.graph import RankSteps
from ddpdoctor.measure.numerics import CHANCE, Array, Ints, Mask, binomial_tail

from .lateness import LATENESS
from .levels import amounts_given

_QUARTER, _TWENTIETH = 0.25, 0.05
"""The quantiles that tell a rank's undisturbed work, and by their distance how much that scatters: it is a standard deviation of a normal
distribution. A turn in three cycles of four reaches neither."""


class TurnsTuning(msgspec.Struct, frozen=True):
    """What is a turn, and what makes turns the job's own."""

    step_share: float = 0.05
    """Share of the median step that a turn takes at least: what rules warn of when it happens in each step."""
    fewest: int = 5
    """Turns below which nothing is said: three to four outliers of any rank are what a busy machine makes in a short run."""
    fewest_rounds: int = 3
    """Rounds over all ranks from which on a rotation is believed."""
    rotating_share: float = 0.9
    """Part of the turns that must be at the rank whose residue of the step number it is."""
    more_work: float = 1.02
    """Times the median rank's amount of work from which on a rank was given more: by less, sizes differ at an epoch's end."""
    mostly: float = 0.5
    """Part of the turns in which the rank must have been given more."""


TURNS = TurnsTuning()


def turns(work: Array, more: Array, step_ns: float) -> Mask:
    """[cycles, R] where a rank has its turn; none where there are too few, or of one rank alone.

    ``work`` [cycles, R] ns is each rank's work of one kind, ``more`` the part beyond the median of the others.
    """
    twentieth, quarter = np.quantile(work, (_TWENTIETH, _QUARTER), axis=0)
    least = np.maximum(LATENESS.spike_sigmas * (quarter - twentieth), TURNS.step_share * step_ns)
    where: Mask = (more > least) & (work > quarter + least)
    if where.sum() < TURNS.fewest or np.count_nonzero(where.any(axis=0)) == 1:
        return np.zeros_like(where)
    return where


def rotate(where: Mask, steps: Ints) -> bool:
    """Whether the step number, modulo the number of ranks, tells whose turn it is."""
    world = where.shape[1]
    if where.sum() < TURNS.fewest_rounds * world:
        return False
    by_residue = np.array([where[steps % world == residue].sum(axis=0) for residue in range(world)])
    leaders = by_residue.argmax(axis=1)
    theirs, all_turns = by_residue.max(axis=1).sum(), by_residue.sum()
    return len(set(leaders.tolist())) == world and bool(theirs >= TURNS.rotating_share * all_turns)


def made_by_the_job(where: Mask, steps: Ints, ranks: Sequence[RankSteps], place_chance: float) -> bool:
    """Whether the turns are the job's own, and no noise of the machine; see the module's text."""
    return (
        rotate(where, steps)
        or place_chance <= CHANCE.ruled_out
        or any(_had_more_to_do(where, given) for given in amounts_given(ranks, steps))
    )


def _had_more_to_do(where: Mask, given: Array) -> bool:
    """Whether the ranks were given more than the median of all in most of their turns, and more often than else.

    ``given`` [cycles, R]: samples, or elements.
    """
    # Of two ranks the lesser is the measure.
    usual = np.sort(given, axis=1)[:, (given.shape[1] - 1) // 2, None]
    more = given > TURNS.more_work * usual
    hits, all_turns = int(more[where].sum()), int(where.sum())
    elsewhere = float(more[~where].mean()) if (~where).any() else 0.0
    chance = binomial_tail(hits, all_turns, min(1.0, max(CHANCE.least_place, elsewhere)))
    return hits >= TURNS.mostly * all_turns and chance <= CHANCE.ruled_out
