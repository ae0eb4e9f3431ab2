"""Whose outliers they are: how seldom a rank is accused by mistake, and how few pauses name the one that is to blame."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest

from ddpdoctor.measure.attribution import attribute
from ddpdoctor.measure.numerics import (
    above_others,
    above_zero,
    binomial_tail,
    chance_of_period,
    chance_of_ranks,
    outliers_of_few_ranks,
)
from tests.measure.made import late_of, simple

JOBS = 60


def times(world, cycles, at, ms=30.0):
    """[cycles, 1, world] ms in these (cycle, rank) places."""
    values = np.zeros((cycles, 1, world))
    for cycle, rank in at:
        values[cycle, 0, rank] = ms
    return values


def accused_share(make):
    """Share of jobs, one for each seed, that accuse a rank."""
    return (
        sum(bool(attribute(make(np.random.default_rng(seed), seed)).stragglers) for seed in range(JOBS))
        / JOBS
    )


@pytest.mark.parametrize(
    ("world", "pauses"),
    [(2, 3), (4, 5), (4, 20)]
    + [
        pytest.param(*each, marks=pytest.mark.slow)
        for each in ((2, 2), (2, 5), (2, 8), (2, 20), (4, 2), (4, 3), (4, 8))
    ],
)
def test_code_that_pauses_on_any_rank_seldom_accuses_one(world, pauses):
    """The limit that is accepted: 10 %, see ddpdoctor.measure.numerics.significance."""

    def job(random, seed):
        cycles = random.choice(40, pauses, replace=False)
        at = zip(cycles, random.integers(0, world, pauses), strict=True)
        return simple(world, 40, jitter=0.03, seed=seed, host=0.5 + times(world, 40, at))

    assert accused_share(job) <= 0.12


@pytest.mark.parametrize(("world", "pauses"), [(2, 5), (4, 3), (8, 3)])
def test_a_few_pauses_where_a_machine_s_would_not_fall_name_the_rank(world, pauses):
    at = [(n, 1) for n in (3, 5, 17, 26, 39)[:pauses]]
    late = late_of(simple(world, 40, jitter=0.03, host=0.5 + times(world, 40, at)))
    assert set(late) == {"host", "total"}
    assert (late["host"].ranks, late["host"].steps_hit) == ([1], pauses)


def test_as_few_in_the_largest_part_of_the_step_may_be_the_machine_s():
    at = [(n, 1) for n in (3, 5, 17)]
    assert late_of(simple(4, 40, jitter=0.03, backward=10.0 + times(4, 40, at))) == {}


def test_two_pauses_say_nothing():
    at = [(n, 1) for n in (3, 17)]
    assert late_of(simple(4, 40, jitter=0.03, host=0.5 + times(4, 40, at))) == {}


def test_a_pause_of_another_rank_among_a_few_leaves_it_open():
    at = [(3, 1), (5, 1), (17, 1), (30, 2)]
    assert late_of(simple(4, 40, jitter=0.03, host=0.5 + times(4, 40, at))) == {}


@pytest.mark.parametrize(("theirs", "total", "few", "world"), [(3, 3, 1, 4), (9, 11, 1, 4), (6, 7, 2, 8)])
def test_the_chance_is_a_bound(theirs, total, few, world):
    """Against a simulation of disturbances that strike at random."""
    random = np.random.default_rng(5)
    counts = np.sort(random.multinomial(total, [1 / world] * world, size=20_000), axis=1)
    share = float((counts[:, -few:].sum(axis=1) >= theirs).mean())
    assert share <= chance_of_ranks(theirs, total, few, world) + 0.005
    assert chance_of_ranks(theirs, total, few, world) <= 3 * share + 0.005


@pytest.mark.parametrize("rate", [0.05, 0.3])
def test_pauses_without_a_period_have_none(rate):
    random = np.random.default_rng(7)
    found = [chance_of_period(np.flatnonzero(random.random(80) < rate)) <= 0.02 for _ in range(500)]
    assert np.mean(found) <= 0.04


def test_a_period_is_seen_though_an_occurrence_is_missing():
    assert chance_of_period(np.array([4, 14, 24, 44, 54])) < 0.002
    assert chance_of_period(np.array([4, 14])) == chance_of_period(np.array([4])) == 1.0


def test_tail():
    assert (
        binomial_tail(0, 5, 0.3) == pytest.approx(1.0)
        and binomial_tail(5, 5, 0.5) == pytest.approx(1 / 32)
        and binomial_tail(1, 0, 0.5) == 0.0
    )


def test_of_thousands_of_trials_the_tail_is_a_number():
    """Their coefficients are beyond any float."""
    assert binomial_tail(1_000, 2_000, 0.5) == pytest.approx(0.5, abs=0.01)
    assert binomial_tail(5_200, 10_000, 0.5) == pytest.approx(3.3e-5, rel=0.1)
    assert binomial_tail(9_000, 10_000, 0.1) == 0.0
    assert 0.0 <= chance_of_ranks(4_000, 5_000, 500, 1_024) <= 1.0


@pytest.mark.parametrize("probability", [0.03, 0.4, 0.9])
def test_the_tail_by_logarithms_is_the_tail(probability):
    exact = [comb(40, n) * probability**n * (1 - probability) ** (40 - n) for n in range(41)]
    for hits in range(41):
        assert binomial_tail(hits, 40, probability) == pytest.approx(sum(exact[hits:]), rel=1e-9, abs=1e-300)


def sizes(random, kind, world):
    """[60, world] of disturbances that strike at random, 0 where there is none."""
    struck = random.random((60, world)) < 0.15
    drawn = {
        "alike": np.ones(struck.shape),
        "lognormal": random.lognormal(0.0, 0.7, struck.shape),
        "pareto": 1.0 + random.pareto(1.3, struck.shape),
    }[kind]
    return np.where(struck, drawn, 0.0)


@pytest.mark.parametrize("kind", ["alike", "lognormal", "pareto"])
def test_disturbances_of_any_sizes_are_seldom_one_rank_s(kind):
    """The limit is 2 %, and up to 4 % with the period that some have."""
    named = []
    for world in (2, 4, 8, 16):
        random = np.random.default_rng(world)
        for _ in range(200):
            lost = sizes(random, kind, world)
            named.append(outliers_of_few_ranks(lost > 0, lost, np.arange(60)).any())
    assert np.mean(named) <= 0.03


@pytest.mark.parametrize(
    ("world", "pauses", "times", "least"), [(2, 10, 10, 0.95), (4, 8, 3, 0.7), (8, 4, 10, 0.95)]
)
def test_one_rank_s_long_pauses_among_those_of_all(world, pauses, times, least):
    """So many, so many times as long as the usual one of the others."""
    named = []
    for seed in range(100):
        random = np.random.default_rng(seed)
        lost = sizes(random, "lognormal", world) * (random.random((60, world)) < 0.67)
        lost[random.choice(60, pauses, replace=False), 1] += times
        named.append(outliers_of_few_ranks(lost > 0, lost, np.arange(60)).any(axis=0).tolist())
    assert np.mean([each == [rank == 1 for rank in range(world)] for each in named]) >= least


@pytest.mark.parametrize(
    ("quantile", "cycles", "tail"),
    [(318.31, 2, 0.001), (5.8409, 4, 0.005), (2.7764, 5, 0.025), (7.1732, 5, 0.001)],
)
def test_the_chance_of_one_column_s_mean_is_student_s(quantile, cycles, tail):
    noise = np.random.default_rng(0).standard_normal((cycles, 1))
    scaled = (noise - noise.mean()) / noise.std(ddof=1)
    above = scaled + quantile / np.sqrt(cycles)
    assert above_zero(above, 1.001 * tail).all() and not above_zero(above, 0.999 * tail).any()
    assert not above_zero(scaled - 1.0, 0.999).any()


def test_a_mean_is_no_chance_where_the_columns_scatter_by_less():
    noise = np.random.default_rng(0).standard_normal((20, 4))
    assert above_zero(noise + np.array([0.0, 0.0, 0.0, 3.0]), 0.01).tolist() == [False, False, False, True]
    assert not above_zero(noise[:1], 0.01).any(), "of one cycle nothing is known"


def test_two_ranks_scatter_by_what_each_does():
    """Of the difference of two ranks in three cycles nearly nothing is known; of the work of each of them twice as much."""
    work = np.array([[10.0, 11.0], [10.1, 11.0], [10.0, 11.1]])
    excess = work - work[:, ::-1]
    assert not above_zero(excess, 0.0001).any() and above_zero(excess, 0.01, work).tolist() == [False, True]
    both_long = np.array([[1.0], [5.0], [9.0]])
    assert above_zero(excess, 0.02, work + both_long).tolist() == [False, True], (
        "what both do makes no difference"
    )


def test_of_many_ranks_that_drift_one_must_stand_out_of_the_others_means():
    means = np.array([-1.1, -0.8, -0.3, 0.0, 0.2, 0.4, 0.9, 1.2])
    noise = 0.1 * np.random.default_rng(0).standard_normal((10, 8))
    assert not above_others(noise + means, 0.01, noise).any()
    late = noise + means + np.array([0, 0, 0, 0, 0, 0, 8.0, 9.0])
    assert np.flatnonzero(above_others(late, 0.01, noise)).tolist() == [6, 7]


def test_one_that_stands_out_of_the_others_is_late_however_much_it_scatters():
    noise = np.random.default_rng(0).standard_normal((8, 8)) * np.array([1, 1, 1, 1, 1, 1, 1, 30])
    noise[:, -1] += 20
    assert np.flatnonzero(above_others(noise, 0.01, noise)).tolist() == [7]


@pytest.mark.parametrize("probability", [0.1, 0.4])
def test_the_tail_goes_on_smoothly_between_whole_numbers(probability):
    tails = [binomial_tail(hits, 12.5, probability) for hits in np.arange(0.5, 12.6, 0.25)]
    assert np.all(np.diff(tails) < 0) and 0.0 < tails[-1] < tails[0] < 1.0
