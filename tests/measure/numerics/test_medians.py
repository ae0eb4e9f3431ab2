"""Against numpy's own."""

from __future__ import annotations

import warnings
from itertools import product

import numpy as np
import pytest

from ddpdoctor.measure.numerics import nan_median


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_is_numpys(axis):
    random = np.random.default_rng(7)
    for shape, unknown in product([(1, 1, 1), (4, 5, 6), (3, 1, 8), (2, 7, 2)], [0.0, 0.4, 0.9, 1.0]):
        values = random.normal(size=shape)
        values[random.random(shape) < unknown] = np.nan
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            expected = np.nanmedian(values, axis=axis)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            np.testing.assert_array_equal(nan_median(values, axis), expected)
            assert nan_median(values, axis, keepdims=True).shape == np.expand_dims(expected, axis).shape


def test_of_no_rows():
    assert nan_median(np.empty((0, 3, 4)), axis=2).shape == (0, 3)
