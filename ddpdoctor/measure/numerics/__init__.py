"""Arithmetic that knows nothing of training: sets of intervals, medians, chance, persistence, fair shares.

In: numpy arrays. Out: numpy arrays and numbers. Each function says its formula, its units and its source; whatever is
needed twice and would hold for any time series lives here, so that the rooms above speak of ranks and steps only.
"""

from .arrays import Array, Ints, Mask
from .chance import (
    LEAST_PLACE,
    MOSTLY,
    RULED_OUT,
    by_chance,
    one_sided,
    places,
    rhythm_by_chance,
    scatter_of,
    tail,
)
from .durations import lasting
from .fairness import Value, fair_shares
from .intervals import (
    EMPTY,
    Intervals,
    clip,
    complement,
    covered,
    covered_before,
    intersect,
    subtract,
    total,
    union,
    union_of,
)
from .medians import nan_median, running_median
from .persistence import Persistence, persistence

__all__ = [
    "EMPTY",
    "LEAST_PLACE",
    "MOSTLY",
    "RULED_OUT",
    "Array",
    "Intervals",
    "Ints",
    "Mask",
    "Persistence",
    "Value",
    "by_chance",
    "clip",
    "complement",
    "covered",
    "covered_before",
    "fair_shares",
    "intersect",
    "lasting",
    "nan_median",
    "one_sided",
    "persistence",
    "places",
    "rhythm_by_chance",
    "running_median",
    "scatter_of",
    "subtract",
    "tail",
    "total",
    "union",
    "union_of",
]
