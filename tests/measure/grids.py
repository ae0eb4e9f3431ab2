"""Grids of cases, of which ``make test`` runs as many as hold every pair of values of two factors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairs_first(*factors: Sequence[Any]) -> list[Any]:
    """All combinations for ``parametrize``: ``slow``, for the night, but for the first, the last, and a choice with every pair."""
    indices = list(product(*(range(len(values)) for values in factors)))
    chosen = {indices[0], indices[-1]}
    missing = {pair for index in indices for pair in _pairs(index)}
    missing -= {pair for index in chosen for pair in _pairs(index)}
    while missing:
        best = max(indices, key=lambda index: len(missing & _pairs(index)))
        chosen.add(best)
        missing -= _pairs(best)
    return [
        pytest.param(
            *(values[i] for values, i in zip(factors, index, strict=True)),
            marks=() if index in chosen else pytest.mark.slow,
        )
        for index in indices
    ]


def _pairs(index: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(enumerate(index), 2))
