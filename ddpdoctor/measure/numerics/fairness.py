"""Shapley values: the share of each of several causes in their common cost, where they hide each other.

Example: rank 0 is 3 ms late because of data, rank 3 is 5 ms late because of its own Python work. Without the work a step is
2 ms shorter, without the data as long as before, without both 5 ms shorter. So the causes cost 5 ms work, but 2 ms and
0 ms alone. A cause's share is its saving, averaged over all orders in which the causes can be removed (Shapley, "A value for
n-person games", 1953; for a cost set by the largest one, Littlechild and Owen, "A simple expression for the Shapley value in a
special case", 1973). Shares add up to the common saving; a cause that no other hides gets what it saves alone. Here: 1.5 ms for
the data, 3.5 ms for the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from math import factorial
from typing import TypeVar

import msgspec

from .stats import Array

_Cause = TypeVar("_Cause", bound=str)


class Value(msgspec.Struct, frozen=True):
    """Cost of one cause, ns per step."""

    first_ns: float
    """Saving when it alone is removed."""
    part_ns: float
    """Its share of the common cost of all causes (Shapley value)."""
    last_ns: float
    """Saving when it is removed after all others."""


def fair_shares(
    removed: Mapping[_Cause, list[Array]], gain_ns: Callable[[list[Array]], float]
) -> dict[_Cause, Value]:
    """The value of each cause. Evaluates all 2^n subsets: for a few causes only.

    ``removed`` is the work of each cause, per group of the graph; ``gain_ns`` returns the saving per step without some work.
    """
    causes = list(removed)
    gains_ns = {frozenset[_Cause](): 0.0}
    for size in range(1, len(causes) + 1):
        for chosen in combinations(causes, size):
            work = [sum(parts) for parts in zip(*(removed[cause] for cause in chosen), strict=True)]
            gains_ns[frozenset(chosen)] = max(0.0, gain_ns(work))
    everything = frozenset(causes)
    return {
        cause: Value(
            first_ns=gains_ns[frozenset((cause,))],
            part_ns=_part_ns(cause, gains_ns),
            last_ns=gains_ns[everything] - gains_ns[everything - {cause}],
        )
        for cause in causes
    }


def _part_ns(cause: _Cause, gains_ns: Mapping[frozenset[_Cause], float]) -> float:
    """The mean, over all orders of the causes, of what this one adds to the gain of those before it."""
    count = max(len(chosen) for chosen in gains_ns)
    return sum(
        factorial(len(chosen))
        * factorial(count - len(chosen) - 1)
        / factorial(count)
        * (gains_ns[chosen | {cause}] - gain_ns)
        for chosen, gain_ns in gains_ns.items()
        if cause not in chosen
    )
