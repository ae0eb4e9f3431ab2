"""Statistics and interval algebra without domain types: intervals, medians, significance, persistence, Shapley values.

In: numpy arrays. Out: numpy arrays and numbers. Each function states its formula, its units and its source.
"""

from .intervals import (
    EMPTY,
    Intervals,
    clip,
    complement,
    covered,
    holds,
    intersect,
    place_in,
    subtract,
    total,
    union,
    union_of,
)
from .significance import (
    CHANCE,
    PERSISTENCE,
    Persistence,
    above_others,
    above_zero,
    binomial_tail,
    chance_of_period,
    chance_of_places,
    chance_of_ranks,
    outliers_of_few_ranks,
    periodic_share,
    persistence,
    shares_of_step,
)
from .stats import (
    Array,
    Ints,
    Mask,
    Value,
    best_split,
    fair_shares,
    format_duration,
    mean_error,
    median,
    median_error,
    nan_median,
    normal,
    running,
    running_median,
    scatter_of,
    trend,
    undisturbed,
)
