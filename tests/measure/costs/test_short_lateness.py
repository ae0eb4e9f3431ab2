"""Ranks that are late in a short window by more than chance, though no kind of work alone stands out of it."""

from __future__ import annotations

from itertools import product

import numpy as np

from ddpdoctor.measure.costs import regularly_late
from tests.measure.attribution.drawn import heavy, normal, window
from tests.measure.made import simple


def test_chance_makes_no_rank_late():
    """Of ranks whose work scatters by a fifth, in windows of two to four steps: one in a hundred windows, and two standard errors."""
    windows = [
        bool(regularly_late(window(noise, cycles, world, 0.2, seed)))
        for noise, cycles, world, seed in product((normal, heavy), (2, 3, 4), (2, 3, 4, 8), range(12))
    ]
    assert np.mean(windows) <= 0.01 + 2 * np.sqrt(0.01 * 0.99 / len(windows))


def test_a_rank_that_is_late_by_as_much_in_each_of_two_steps():
    extra = np.zeros((2, 1, 4))
    extra[:, 0, 2] = (5.0, 4.5)
    noise = 1 + 0.01 * np.random.default_rng(1).standard_normal((2, 1, 4))
    assert regularly_late(simple(4, 2, forward=5.0 * noise, backward=10.0 * noise, host=extra)) == [2]


def test_a_rank_that_is_late_in_one_of_two_steps_may_be_so_by_chance():
    extra = np.zeros((2, 1, 4))
    extra[1, 0, 2] = 9.0
    assert regularly_late(simple(4, 2, forward=5.0, backward=10.0, host=extra)) == []
