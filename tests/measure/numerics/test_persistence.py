"""When something happens: always, for a stretch, every k steps, now and then."""

from __future__ import annotations

import numpy as np
import pytest

from ddpdoctor.measure.numerics import periodic_share, persistence

STEPS = np.arange(100, 160)


def hits(*steps):
    return np.isin(STEPS, steps)


@pytest.mark.parametrize(
    ("hit", "kind", "first", "last", "period"),
    [
        (np.ones(60, bool), "always", 100, 159, None),
        (STEPS % 7 != 0, "always", 100, 159, None),
        (hits(*range(120, 140)), "range", 120, 139, None),
        (hits(*(s for s in range(120, 140) if s != 130)), "range", 120, 139, None),
        (STEPS % 5 == 0, "periodic", 100, 155, 5),
        (hits(*(s for s in range(100, 160, 5) if s not in (115, 140))), "periodic", 100, 155, 5),
        (hits(*range(100, 160, 5), 117), "periodic", 100, 155, 5),
        (hits(103, 108, 120, 121, 139, 150), "random", 103, 150, None),
        (hits(110, 150), "random", 110, 150, None),
        (hits(110), "random", 110, 110, None),
    ],
)
def test_kinds(hit, kind, first, last, period):
    found = persistence(STEPS, hit)
    assert (found.kind, found.first, found.last, found.period) == (kind, first, last, period)
    assert (found.hit, found.seen) == (int(hit.sum()), 60)


def test_nothing_happens():
    found = persistence(STEPS, np.zeros(60, bool))
    assert (found.hit, found.seen, found.first, found.last, found.period) == (0, 60, None, None, None)
    assert persistence(STEPS[:0], np.zeros(0, bool)).seen == 0


def test_a_period_is_seen_through_steps_that_were_not_measured():
    measured = np.array([s for s in range(200) if not 60 <= s < 75])
    assert persistence(measured, measured % 8 == 0).period == 8


def test_later_steps_of_which_few_are_measured_count_as_much():
    """Of steps 0 to 99 all are measured, of 100 to 399 one block of 8 in four; it happens in steps 0 to 119."""
    steps = np.array([n for n in range(400) if n < 100 or n // 8 % 4 == 0])
    found = persistence(steps, steps < 120)
    assert (found.kind, found.first) == ("range", 0) and found.hit > 0.5 * found.seen
    found = persistence(steps, steps < 300)
    assert found.kind == "range"


@pytest.mark.parametrize(
    ("happens", "lacks"),
    [
        (lambda steps: steps % 10 == 0, lambda steps: np.isin(steps, (40, 50, 120))),
        (lambda steps: steps % 10 == 7, lambda steps: steps < 25),
        (lambda steps: (steps % 10 == 0) & (steps >= 100), lambda steps: np.isin(steps, (90, 110, 111, 112))),
        (lambda steps: (steps % 10 == 3) & (steps % 30 != 3), lambda steps: (steps > 40) & (steps < 60)),
        (lambda steps: (steps % 10 == 0) | (steps == 44), lambda steps: np.isin(steps, (30, 70, 71))),
    ],
    ids=["throughout", "not yet measured", "from the middle on", "two of three", "and once more"],
)
def test_something_periodic_is_as_frequent_in_steps_that_were_not_measured(happens, lacks):
    steps = np.arange(4, 204)
    measured = steps[~lacks(steps)]
    share = periodic_share(measured, measured[happens(measured)], 10)
    assert share == pytest.approx(happens(steps).mean(), rel=0.07)
