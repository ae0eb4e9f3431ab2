"""Ranks that are late in turn: all of them wait, no rank alone is to blame.

Rank *step mod R* writes the log, or each batch is long on another rank: the job waits in every step, yet a rank's own mean
and median say nothing. What a rank does beyond the others in single cycles is taken for such a turn where

- it stands out of the rank's own undisturbed cycles (those of its lowest quarter: its turns may be more than half of all),
  and of the others in the same cycle;
- no rank is accused of this kind of work by itself;
- it is not the noise of a busy machine: the turns rotate (step mod R tells whose it is), or they fall into a place where a
  machine's disturbances hardly would (:mod:`.chance`), or the rank was given more to compute than the others in those steps.

Ranks whose forward or backward takes long at random, with the same amount of work, are not told from a machine whose cores
share a cache, a clock or a hypervisor: waiting for a CPU is recorded, that is not. Nothing is said about them. On devices
kernels tell: see :mod:`.levels`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.graph import RankSteps
from ddpdoctor.measure.numerics import LEAST_PLACE, RULED_OUT, Array, tail

TURN_SIGMAS = 6.0
TURN_SHARE = 0.05
"""Share of the median step that a turn takes at least: what rules warn of when it happens in each step."""
FEWEST_TURNS = 5
FEWEST_ROUNDS = 3
"""Rounds over all ranks from which a rotation is believed."""
ROTATES = 0.9
"""Part of the turns that must be at the rank whose residue of the step number it is."""
_UNEVEN = 1.02
_MOSTLY = 0.5
"""Part of the turns in which the rank must have had more to do."""
_QUARTER, _FIFTH = 0.674, 1.645
"""Standard deviations from the mean of a normal distribution to its quantiles 0.25 and 0.05."""


def turns(own: Array, difference: Array, step_ns: float) -> NDArray[np.bool_]:
    """[cycles, R] where a rank has its turn; none where there are too few.

    ``own`` [cycles, R] ns is each rank's work of one kind, ``difference`` the part beyond the median of the others.
    """
    lowest, low = np.quantile(own, (0.05, 0.25), axis=0)
    scatter = (low - lowest) / (_FIFTH - _QUARTER)
    usual = low + _QUARTER * scatter
    least = np.maximum(TURN_SIGMAS * scatter, TURN_SHARE * step_ns)
    found: NDArray[np.bool_] = (difference > least) & (own > usual + least)
    if found.sum() < FEWEST_TURNS or (found.sum(axis=0) > 0).sum() < 2:
        return np.zeros_like(found)
    return found


def rotate(found: NDArray[np.bool_], steps: NDArray[np.int64]) -> bool:
    """Whether the step number, modulo the number of ranks, tells whose turn it is."""
    world = found.shape[1]
    if found.sum() < FEWEST_ROUNDS * world:
        return False
    by_residue = np.array([found[steps % world == residue].sum(axis=0) for residue in range(world)])
    leaders = by_residue.argmax(axis=1)
    return len(set(leaders.tolist())) == world and bool(
        by_residue.max(axis=1).sum() >= ROTATES * by_residue.sum()
    )


def made_by_the_job(
    found: NDArray[np.bool_], steps: NDArray[np.int64], ranks: Sequence[RankSteps], place: float
) -> bool:
    """Whether the turns are the job's own, and no noise of the machine; see the module's text."""
    return (
        rotate(found, steps)
        or place <= RULED_OUT
        or _given_more(found, steps, [(of.steps, of.samples) for of in ranks])
        or _given_more(found, steps, [(of.steps, of.elements) for of in ranks if of.elements is not None])
    )


def _given_more(
    found: NDArray[np.bool_], steps: NDArray[np.int64], amounts: Sequence[tuple[NDArray[np.int64], Array]]
) -> bool:
    """Whether the ranks had more to do than the median of all in most of their turns, and more often than else: samples, or
    elements."""
    if len(amounts) != found.shape[1]:
        return False
    known = [dict(zip(numbers.tolist(), values.tolist(), strict=True)) for numbers, values in amounts]
    given = np.array([[of.get(int(step), np.nan) for of in known] for step in steps])
    # Of two ranks the lesser is the measure.
    usual = np.sort(given, axis=1)[:, (given.shape[1] - 1) // 2, None]
    more = given > _UNEVEN * usual
    hits, turns_seen = int(more[found].sum()), int(found.sum())
    else_share = min(1.0, max(LEAST_PLACE, float(more[~found].mean()) if (~found).any() else 0.0))
    return hits >= _MOSTLY * turns_seen and tail(hits, turns_seen, else_share) <= RULED_OUT
