"""Interval algebra, against literal answers and against a grid of points."""

from __future__ import annotations

import numpy as np
import pytest

from ddpdoctor.measure.numerics import (
    EMPTY,
    clip,
    complement,
    covered,
    intersect,
    subtract,
    total,
    union,
    union_of,
)


def pairs(intervals):
    return [(float(a), float(b)) for a, b in zip(*intervals, strict=True)]


A = union([0, 20], [10, 30])


def test_union_sorts_joins_and_drops_what_is_empty_or_reversed():
    assert pairs(union([20, 0, 5, 40, 60], [30, 10, 12, 40, 50])) == [(0, 12), (20, 30)]
    assert pairs(union([0, 10], [10, 20])) == [(0, 20)], "touching intervals are one"
    assert pairs(union([0, 2], [10, 4])) == [(0, 10)], "one inside another"
    assert pairs(union([], [])) == [] and pairs(union([3], [3])) == []


def test_integers_of_the_size_of_epoch_times_stay_exact():
    epoch = 1_759_308_646_000_000_001
    starts, ends = union(np.array([epoch]), np.array([epoch + 3]))
    assert (int(starts[0]), int(ends[0])) == (epoch, epoch + 3)


def test_total_and_covered():
    assert total(A) == 20 and total(EMPTY) == 0
    assert covered(A, np.full(7, -9), [-5, 0, 5, 10, 15, 25, 99]).tolist() == [0, 0, 5, 10, 10, 15, 20]
    assert covered(A, [5, -10, 12, 29], [25, 100, 18, 29]).tolist() == [10, 20, 0, 0]
    assert covered(A, [25], [5]).tolist() == [0], "reversed windows hold nothing"
    assert np.isnan(covered(A, [np.nan, 0], [5, np.nan])).all()
    assert covered(EMPTY, [0.0], [5.0]).tolist() == [0]
    assert covered(A, np.zeros((2, 3)), np.full((2, 3), 10.0)).shape == (2, 3)


def test_set_operations():
    b = union([5], [25])
    assert pairs(intersect(A, b)) == [(5, 10), (20, 25)]
    assert pairs(intersect(A, EMPTY)) == []
    assert pairs(subtract(A, b)) == [(0, 5), (25, 30)]
    assert pairs(subtract(A, A)) == []
    assert pairs(subtract(A, EMPTY)) == pairs(A) and pairs(subtract(EMPTY, A)) == []
    assert pairs(complement(A, -5, 40)) == [(-5, 0), (10, 20), (30, 40)]
    assert pairs(complement(EMPTY, 0, 3)) == [(0, 3)]
    assert pairs(complement(A, 2, 8)) == []
    assert pairs(clip(A, 5, 22)) == [(5, 10), (20, 22)]
    assert pairs(intersect(union([0], [5]), union([5], [9]))) == [], "ends are exclusive"


@pytest.mark.parametrize("seed", range(5))
def test_operations_agree_with_a_grid_of_points(seed):
    random = np.random.default_rng(seed)

    def draw():
        starts = random.integers(0, 90, 12)
        return union(starts, starts + random.integers(0, 12, 12))

    def grid(intervals):
        cells = np.zeros(120, bool)
        for start, end in pairs(intervals):
            cells[int(start) : int(end)] = True
        return cells

    a, b = draw(), draw()
    assert (grid(intersect(a, b)) == (grid(a) & grid(b))).all()
    assert (grid(subtract(a, b)) == (grid(a) & ~grid(b))).all()
    assert (grid(complement(a, 0, 120)) == ~grid(a)).all()
    assert total(a) == grid(a).sum()
    left = random.integers(0, 60, 8)
    right = left + random.integers(0, 50, 8)
    expected = [grid(a)[x:y].sum() for x, y in zip(left, right, strict=True)]
    assert covered(a, left, right).tolist() == expected


def test_whole_numbers_stay_exact():
    """Nanoseconds since 1970 are beyond what a float can tell apart: its grid there is 256 ns."""
    now = 1_760_000_000_000_000_001
    work = union([now, now + 5_000], [now + 2_001, now + 5_003])
    others = union([now + 1], [now + 1_002])
    for left in (subtract(work, others), union_of(subtract(work, others), EMPTY)):
        assert [end - start for start, end in zip(*left, strict=True)] == [1, 999, 3]
