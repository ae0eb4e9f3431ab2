"""When something happens: always, in a stretch of steps, every k steps, or now and then."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from .arrays import Ints, Mask


class PersistenceTuning(msgspec.Struct, frozen=True):
    """From where on occurrences make a pattern."""

    always_share: float = 0.8
    """Share of the steps, or of those of a stretch, that is as good as all: outliers and noise hide one in five."""
    regular_share: float = 0.75
    """Share of the distances between occurrences that must be multiples of the most frequent one."""
    fewest_of_pattern: int = 3
    """Occurrences from which on there is a pattern: two have a distance, three have two that agree."""


PERSISTENCE = PersistenceTuning()


class Persistence(msgspec.Struct, frozen=True):
    """How occurrences spread over the steps."""

    kind: str
    """"always", "range", "periodic" or "random"."""
    hit: int
    seen: int
    first: int | None
    last: int | None
    period: int | None = None

    def as_facts(self) -> dict[str, Any]:
        """The fields of a :class:`ddpdoctor.measure.facts.Cost` that say when it occurs."""
        return {
            "steps_hit": self.hit,
            "steps_seen": self.seen,
            "first_step": self.first,
            "last_step": self.last,
            "persistence": self.kind,
            "period_steps": self.period,
        }


def persistence(steps: Ints, hit: Mask) -> Persistence:
    """Say how something that happened in the ``hit`` ones of the ``steps`` spreads over them.

    ``steps`` [N] are step numbers in rising order.
    """
    times, seen = steps[hit], len(steps)
    if not len(times):
        return Persistence("random", 0, seen, None, None)
    first, last, period = int(times[0]), int(times[-1]), None
    between = int(((steps >= first) & (steps <= last)).sum())
    patterned = len(times) >= PERSISTENCE.fewest_of_pattern
    if len(times) >= PERSISTENCE.always_share * seen:
        kind = "always"
    elif patterned and len(times) >= PERSISTENCE.always_share * between:
        kind = "range"
    else:
        period = _period(times) if patterned else None
        kind = "random" if period is None else "periodic"
    return Persistence(kind, len(times), seen, first, last, period)


def _period(times: Ints) -> int | None:
    """The distance from one of the ``times`` to the next, where most distances are multiples of it; None without one.

    A missed or unmeasured occurrence leaves a gap of a multiple of the period.
    """
    gaps = np.diff(times)
    values, counts = np.unique(gaps, return_counts=True)
    period = int(values[counts.argmax()])
    regular = float((gaps % period == 0).mean()) >= PERSISTENCE.regular_share
    return period if period > 1 and regular else None
