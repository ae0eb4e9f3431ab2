"""How much work each rank was given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ddpdoctor.measure.graph import RankSteps
from ddpdoctor.measure.numerics import Array, Ints


def amounts_given(ranks: Sequence[RankSteps], steps: Ints) -> Iterator[Array]:
    """[cycles, R] samples, then elements of inputs, that each rank was given in these steps; NaN where unknown.

    Left out is what is not known of every rank.
    """
    samples = [of_rank.samples for of_rank in ranks]
    elements = [of_rank.elements for of_rank in ranks if of_rank.elements is not None]
    for amounts in (samples, elements):
        if len(amounts) == len(ranks):
            columns = [
                _in_steps(of_rank.steps, amount, steps)
                for of_rank, amount in zip(ranks, amounts, strict=True)
            ]
            yield np.stack(columns, axis=1)


def _in_steps(numbers: Ints, values: Array, steps: Ints) -> Array:
    """[cycles] the values of these steps; NaN where there is none."""
    known = dict(zip(numbers.tolist(), values.tolist(), strict=True))
    return np.array([known.get(int(step), np.nan) for step in steps])
