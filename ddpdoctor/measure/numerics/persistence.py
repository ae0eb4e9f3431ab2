"""When something happens: always, in a stretch of steps, every k steps, or now and then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALWAYS_SHARE = 0.8
_REGULAR = 0.75
"""Share of distances between occurrences that must equal the most frequent one."""


@dataclass(frozen=True)
class Persistence:
    """How occurrences spread over the steps."""

    kind: str
    """"always", "range", "periodic" or "random"."""
    hit: int
    seen: int
    first: int | None
    last: int | None
    period: int | None = None

    def as_facts(self) -> dict[str, Any]:
        """The fields of a :class:`~.facts.Cost` that say when it occurs."""
        return {
            "steps_hit": self.hit,
            "steps_seen": self.seen,
            "first_step": self.first,
            "last_step": self.last,
            "persistence": self.kind,
            "period_steps": self.period,
        }


def persistence(steps: NDArray[np.int64], hit: NDArray[np.bool_]) -> Persistence:
    """Classify; ``steps`` [N] are step numbers in rising order, ``hit`` [N] says in which of them it
    happened."""
    times = np.asarray(steps)[np.asarray(hit, bool)]
    seen = len(steps)
    if not len(times):
        return Persistence("random", 0, seen, None, None)
    first, last = int(times[0]), int(times[-1])
    if len(times) >= ALWAYS_SHARE * seen:
        return Persistence("always", len(times), seen, first, last)
    between = int(((steps >= first) & (steps <= last)).sum())
    if len(times) >= 3 and len(times) >= ALWAYS_SHARE * between:
        return Persistence("range", len(times), seen, first, last)
    if len(times) >= 3:
        gaps = np.diff(times)
        values, counts = np.unique(gaps, return_counts=True)
        period = int(values[counts.argmax()])
        # A missed or unmeasured occurrence leaves a gap of a multiple of the period.
        if period > 1 and float((gaps % period == 0).mean()) >= _REGULAR:
            return Persistence("periodic", len(times), seen, first, last, period)
    return Persistence("random", len(times), seen, first, last)
