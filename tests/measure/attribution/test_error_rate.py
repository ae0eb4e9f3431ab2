"""How often a rank is named by chance, and how often the one that is late is: the rates that the documentation states."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from ddpdoctor.measure.attribution import attribute
from tests.measure.attribution.drawn import (
    CYCLES,
    LATE_MS,
    STRUCK,
    WORLDS,
    by_a_machine,
    by_chance,
    costliest,
    drifting,
    heavy,
    normal,
    power,
    power_of_pauses,
    wandering,
)
from tests.measure.made import simple

STATED = 0.01
"""Of windows of ranks alike in which one may be named."""
QUICK = 15
LONG = 400
"""Windows of each kind."""


def rates(noise, cycles, windows, **how):
    return np.array([by_chance(noise, n, world, windows, **how) for n, world in product(cycles, WORLDS)])


def most(windows):
    """The stated rate, with two standard errors for so many windows."""
    return STATED + 2 * np.sqrt(STATED * (1 - STATED) / windows)


@pytest.mark.parametrize("noise", [normal, heavy])
def test_few_windows_of_ranks_alike_name_one(noise):
    found = rates(noise, (2, 3, 4, 5, 8, 20), QUICK)
    assert found.mean() <= most(found.size * QUICK)


@pytest.mark.slow
@pytest.mark.parametrize(("short", "numbers"), [(False, CYCLES), (True, (2, 4, 8))])
@pytest.mark.parametrize("noise", [normal, heavy])
def test_no_number_of_cycles_or_ranks_names_more(noise, short, numbers):
    found = rates(noise, numbers, LONG, short=short)
    assert found.mean() <= STATED and np.sort(found)[:-2].max() <= most(LONG)


@pytest.mark.parametrize("windows", [6, pytest.param(LONG // 4, marks=pytest.mark.slow)])
def test_a_busy_machine_s_disturbances_seldom_name_one(windows):
    """Those of ranks that are struck in any part of their cycles: two in a hundred windows. Outliers are judged for each kind of work that
    has some, so that the longest recordings of many ranks have up to five."""
    found = np.array(
        [
            by_a_machine(cycles, world, struck, windows)
            for cycles, world, struck in product((8, 20, 50), WORLDS, STRUCK)
        ]
    )
    assert found.mean() <= 2 * STATED + 2 * np.sqrt(2 * STATED / (found.size * windows))


@pytest.mark.parametrize("world", [8, 16])
def test_nor_of_many_ranks_the_one_that_is_struck_in_most_cycles(world):
    assert by_a_machine(8, world, STRUCK[-1], 60) <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize(("world", "most_named"), [(2, 0.02), (4, 0.04), (8, 0.05), (16, 0.07)])
def test_nor_in_long_recordings(world, most_named):
    assert by_a_machine(200, world, STRUCK[1], LONG // 2) <= most_named


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "cycles", "most_told"), [(normal, 2, 0.03), (heavy, 2, 0.1), (heavy, 4, 0.06), (heavy, 8, 0.03)]
)
def test_what_a_short_window_shows_is_told_more_often(noise, cycles, most_told):
    """As what was seen in these steps: how often it comes is left open."""
    assert rates(noise, (cycles,), LONG // 2, short=True, seen=True).max() <= most_told


# Noise → most windows of 2, 4, 8 and 16 ranks in which one is named, mean over windows of 4 to 20 cycles; the same of 50 cycles.
DRIFT = {
    drifting: ((0.14, 0.14, 0.07, 0.06), (0.06, 0.06, 0.06, 0.07)),
    wandering: ((0.36, 0.42, 0.09, 0.07), (0.09, 0.1, 0.1, 0.1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("noise", DRIFT)
def test_work_that_drifts_names_a_rank_more_often_where_there_are_few(noise):
    """Nothing tells a drift from a fault in a short window of few ranks, so the findings do not say that it lasts
    (``ddpdoctor.diagnose.rule_texts.FEW_STEPS``); of many ranks the others' means do."""
    short, long = DRIFT[noise]
    cycles = (4, 5, 6, 8, 10, 20)
    found = rates(noise, cycles, LONG // 4).reshape(len(cycles), len(WORLDS)).mean(axis=0)
    assert np.all(found <= short), found
    found = rates(noise, (50,), LONG // 2)
    assert np.all(found <= long), found


@pytest.mark.parametrize(
    ("noise", "windows", "most_warn", "most_critical"),
    [
        (drifting, 10, 0.05, 0.01),
        pytest.param(drifting, LONG // 4, 0.05, 0.01, marks=pytest.mark.slow),
        pytest.param(wandering, LONG // 4, 0.12, 0.01, marks=pytest.mark.slow),
    ],
)
def test_what_drifts_in_a_short_window_is_seldom_a_warning_and_never_critical(
    noise, windows, most_warn, most_critical
):
    """By the shares of the step from which rules are. A window of a drift costs what it costs."""
    found = np.array(
        [costliest(noise, cycles, world, windows) for cycles, world in product((5, 8, 20), WORLDS[:3])]
    )
    for share, most_found in ((0.05, most_warn), (0.2, most_critical)):
        assert np.mean(found >= share) <= most_found + 2 * np.sqrt(most_found / found.size)


# Cycles, ranks, scatter → least part of the windows in which just the late rank is named.
FOUND = {
    (3, 4, 0.02): 0.9,
    (5, 2, 0.02): 0.98,
    (5, 2, 0.04): 0.8,
    (5, 4, 0.04): 0.88,
    (5, 8, 0.04): 0.84,
    (5, 4, 0.06): 0.5,
    (8, 2, 0.04): 0.93,
    (8, 2, 0.06): 0.6,
    (10, 2, 0.06): 0.75,
    (10, 8, 0.06): 0.8,
    (20, 2, 0.06): 0.95,
}


@pytest.mark.parametrize(
    ("cycles", "world", "scatter"),
    [each if each[0] < 10 else pytest.param(*each, marks=pytest.mark.slow) for each in FOUND],
)
def test_a_rank_that_is_late_by_a_tenth_of_the_step(cycles, world, scatter):
    assert power(normal, cycles, world, scatter, 100) >= FOUND[cycles, world, scatter]


# Kind of work, part of the cycles in which a machine strikes each rank, pauses in 60 cycles, ranks → as above.
PAUSES = {
    ("host", 0.03, 5, 2): 0.85,
    ("host", 0.1, 5, 8): 0.85,
    ("host", 0.1, 4, 4): 0.7,
    ("backward", 0.03, 8, 2): 0.65,
    ("backward", 0.03, 5, 4): 0.75,
    ("backward", 0.1, 8, 8): 0.65,
    ("backward", 0.1, 20, 16): 0.8,
}


@pytest.mark.parametrize(
    ("kind", "struck", "pauses", "world"),
    [
        each if each[0] == "host" and each[-1] < 8 else pytest.param(*each, marks=pytest.mark.slow)
        for each in PAUSES
    ],
)
def test_a_rank_that_pauses_on_a_busy_machine(kind, struck, pauses, world):
    found = power_of_pauses(60, world, struck, pauses, kind, 50)
    assert found >= PAUSES[kind, struck, pauses, world]


@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_rank_that_is_late_from_some_step_on(world):
    """In three of five cycles of a long recording."""
    late_ms = np.where(np.arange(150) < 60, 0.0, LATE_MS)[:, None, None] * (np.arange(world) == world - 1)
    noise = 1 + 0.03 * np.random.default_rng(world).standard_normal((150, 1, world))
    graph = simple(world, 150, forward=5.0 * noise, backward=10.0 * noise + late_ms)
    assert attribute(graph).stragglers == {"compute": [world - 1]}
