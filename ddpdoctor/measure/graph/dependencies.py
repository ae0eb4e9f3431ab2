"""Which collectives the computation of a rank waits for, as the timeline shows it.

DDP's buckets hold up nothing but the end of the backward pass. Those of sharded parameters, or of tensor parallelism,
look alike in a trace and are waited for at once: the next kernel has long been launched, and starts when the collective
is over. That is a dependency, and a replay must keep it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import Array, Intervals


@dataclass(frozen=True)
class Tuning:
    """What shows that a computation stood still for a collective."""

    at_once_ns: float = 50_000.0
    """After the end of a collective: a kernel whose stream waited for it starts within some microseconds; clocks of a
    device's streams are the same."""
    idle_ns: float = 100_000.0
    """A computation that stood still for longer before did so for the collective: gaps between launched kernels are
    shorter."""
    whole: float = 0.9
    """Or for this part of a collective that is itself shorter."""
    mostly: float = 0.5
    """Of the cycles."""
    rounding_ns: float = 1_000.0
    """Clocks are read to the microsecond: a start that is rounded to before the end follows it all the same."""


TUNING = Tuning()


def dependent(computes: Sequence[Intervals], arrival: Array, end: Array) -> NDArray[np.bool_]:
    """[K, R] whether the rank's computation stood still for the collective in most cycles, and went on at its end.

    ``computes`` per rank: the union of its kernels; ``arrival`` and ``end`` [N, K, R] of its own part, in the same unit
    (ns) and origin, NaN where it takes no part.
    """
    waits = np.zeros(arrival.shape[1:], bool)
    for r, (starts, ends) in enumerate(computes):
        takes_part = ~np.isnan(end[:, :, r])
        if not len(starts) or not takes_part.any():
            continue
        over = np.nan_to_num(end[:, :, r])
        index = np.searchsorted(starts, over - TUNING.rounding_ns)
        goes_on = np.where(index < len(starts), starts[np.minimum(index, len(starts) - 1)], np.inf)
        stopped = np.where(index > 0, ends[np.maximum(index - 1, 0)], -np.inf)
        idle = over - stopped
        length = over - np.nan_to_num(arrival[:, :, r])
        long_enough = (idle >= TUNING.idle_ns) | (idle >= TUNING.whole * length)
        stood = takes_part & (goes_on - over <= TUNING.at_once_ns) & (idle >= 0) & long_enough
        waits[:, r] = stood.sum(axis=0) > TUNING.mostly * np.maximum(takes_part.sum(axis=0), 1)
    return waits
