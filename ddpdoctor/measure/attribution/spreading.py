"""From verdicts on whole cycles back to the segments in which the excess arose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ddpdoctor.measure.numerics import Array, Mask
from ddpdoctor.measure.taxonomy import LateCause

from .comparison import COLUMNS


def in_columns(shape: tuple[int, ...], marked: Iterable[tuple[LateCause, Mask]]) -> Mask:
    """[cycles, R, C] (``shape``): the cycles of each kind of work, [cycles, R], marked in all its components."""
    mask = np.zeros(shape, bool)
    for cause, where in marked:
        mask[:, :, COLUMNS[cause]] = where[:, :, None]
    return mask


def net_within(more: Array, causes: Iterable[LateCause]) -> Array:
    """``more`` [cycles, R, C] ns with the components of each kind of work scaled to add up to the kind's excess: what one gains
    and another loses is none."""
    net = np.copy(more)
    for cause in causes:
        own = more[:, :, COLUMNS[cause]]
        positive = np.clip(own, 0, None)
        net[:, :, COLUMNS[cause]] = positive * _factor(own.sum(axis=2), positive.sum(axis=2))[:, :, None]
    return net


def net_of_all(net: Array, more: Array, marked: Mask) -> Array:
    """``net`` [cycles, R, C] ns scaled so that what is ``marked`` of it adds up to no more than the cycle's whole excess.

    What a rank does longer in one component and shorter in another does not make it late. ``more``: its excess, as measured.
    """
    positive = np.where(marked, np.clip(net, 0, None), 0.0)
    scaled = np.copy(net)
    scaled *= _factor(more.sum(axis=2), positive.sum(axis=2))[:, :, None]
    return scaled


def _factor(wanted: Array, whole: Array) -> Array:
    """By which ``whole`` must be multiplied to be no more than ``wanted``; 0 where there is nothing to multiply."""
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.where(whole > 0, np.clip(wanted, 0, None) / whole, 0.0)
    return np.minimum(1.0, factor)


def spread(differences: Sequence[Array], net: Array, marked: Mask) -> list[Array]:
    """[N, K, R, C] ns per group: each cycle's ``net`` excess, where it is ``marked`` (both [cycles, R, C]), in the segments in
    which it arose."""
    ends = np.cumsum([len(difference) for difference in differences])
    segments = []
    for end, difference in zip(ends, differences, strict=True):
        cycles = slice(end - len(difference), end)
        positive = np.clip(difference, 0, None)
        wanted = np.where(marked[cycles], np.clip(net[cycles], 0, None), 0.0)
        segments.append(positive * _factor(wanted, positive.sum(axis=1))[:, None])
    return segments
