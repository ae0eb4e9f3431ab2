"""Slopes of made series."""

from __future__ import annotations

import numpy as np
import pytest

from ddpdoctor.measure.numerics import trend


def test_a_line_is_itself():
    found = trend(np.arange(8.0), 3 + 2 * np.arange(8.0), 0.9)
    assert (found.slope, found.low, found.high) == (2.0, 2.0, 2.0)
    assert found.z_score > 3


def test_one_outlier_counts_little():
    values = np.arange(20.0)
    values[7] = 1000.0
    assert trend(np.arange(20.0), values, 0.9).slope == pytest.approx(1.0, abs=0.1)


def test_the_range_holds_the_slope_as_often_as_it_says():
    random = np.random.default_rng(1)
    times = np.arange(24.0)
    found = [trend(times, 0.5 * times + random.normal(0, 3, 24), 0.9) for _ in range(300)]
    assert 0.85 < np.mean([each.low <= 0.5 <= each.high for each in found]) < 0.96


def test_noise_has_no_trend():
    random = np.random.default_rng(2)
    sure = [trend(np.arange(24.0), random.normal(size=24), 0.9).z_score for _ in range(300)]
    assert np.mean(np.array(sure) > 3) < 0.01
