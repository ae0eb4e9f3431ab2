"""Whose outliers they are: how seldom a rank is accused by mistake, and how few pauses name the one that is to blame."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest

from ddpdoctor.measure.attribution import attribute
from ddpdoctor.measure.numerics import binomial_tail, chance_of_ranks, chance_of_rhythm
from tests.measure.made import late_of, simple

USUAL = {"forward": 5.0, "backward": 10.0, "host": 0.5}
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


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("rate", [0.03, 0.1])
def test_a_busy_machine_accuses_nobody(world, rate):
    """Pauses with a heavy tail strike all ranks, in proportion to the time that each kind of work takes."""

    def job(random, seed):
        struck = random.random((40, 1, world)) < rate
        pause = np.where(struck, 8.0 * (1.0 + random.pareto(1.5, struck.shape)), 0.0)
        place = random.choice(
            len(USUAL), p=np.array([*USUAL.values()]) / sum(USUAL.values()), size=struck.shape
        )
        parts = {name: ms + pause * (place == i) for i, (name, ms) in enumerate(USUAL.items())}
        return simple(world, 40, jitter=0.03, seed=seed, **parts)

    assert accused_share(job) <= 0.05


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
def test_pauses_without_a_rhythm_have_none(rate):
    random = np.random.default_rng(7)
    found = [chance_of_rhythm(np.flatnonzero(random.random(80) < rate)) <= 0.02 for _ in range(500)]
    assert np.mean(found) <= 0.04


def test_a_rhythm_is_seen_though_an_occurrence_is_missing():
    assert chance_of_rhythm(np.array([4, 14, 24, 44, 54])) < 0.002
    assert chance_of_rhythm(np.array([4, 14])) == chance_of_rhythm(np.array([4])) == 1.0


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
