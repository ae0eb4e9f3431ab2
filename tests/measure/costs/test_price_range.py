"""The range of a price: nine times in ten what is saved lies in it, and it says when nothing can be said."""

from __future__ import annotations

import numpy as np
import pytest

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.measure.costs import price_range
from ddpdoctor.measure.facts import RANGE_LEVEL
from ddpdoctor.measure.numerics import mean_error, normal
from tests.measure.recorded import Job, record


def ar1(random, count, memory, scatter=1.0):
    """A series whose neighbours resemble each other, of mean 0 and this standard deviation."""
    noise = random.normal(0.0, scatter * np.sqrt(1 - memory**2), count)
    values = np.empty(count)
    values[0] = random.normal(0.0, scatter)
    for n in range(1, count):
        values[n] = memory * values[n - 1] + noise[n]
    return values


@pytest.mark.parametrize(("count", "memory", "least"), [(5, 0.0, 0.86), (20, 0.5, 0.75), (200, 0.8, 0.8)])
def test_the_mean_of_a_series_lies_in_its_error_nine_times_in_ten(count, memory, least):
    """Less often where few values hang together so much that they are little more than one, which no arithmetic can tell."""
    random = np.random.default_rng(count)
    inside = 0
    for _ in range(400):
        values = ar1(random, count, memory)
        inside += abs(values.mean()) <= normal(RANGE_LEVEL) * mean_error(values, RANGE_LEVEL)
    assert inside >= least * 400


def test_of_two_values_no_scatter_is_known():
    assert np.isnan(mean_error(np.array([1.0, 2.0]), RANGE_LEVEL))
    assert price_range(np.ones(2), np.ones(2)) is None


@pytest.mark.parametrize("missed", [0.0, 0.08])
def test_a_fixed_and_an_unfixed_run_differ_by_what_lies_in_the_range(missed):
    """Two recordings, one with the cause: both scatter, both starts differ, and replays miss by as much as they do."""
    random, inside = np.random.default_rng(7), 0
    for _ in range(400):
        left = 50.0 + ar1(random, 80, 0.6, 2.0)
        gains = np.clip(20.0 + ar1(random, 80, 0.3, 4.0), 0, None)
        after = (50.0 + ar1(random, 80, 0.6, 2.0)).mean() * (1 + random.normal(0.0, 0.01))
        saved = (left + gains).mean() - after + gains.mean() * random.normal(0.0, missed)
        low, high = price_range(gains, left)
        inside += low <= saved <= high
    assert inside >= 0.88 * 400


def test_cycles_that_are_shorter_by_less_than_the_replay_takes_out_of_them_make_the_low_end_lower():
    """Half of what the replay takes out of a cycle comes back in the rest of it."""
    random = np.random.default_rng(3)
    gains = np.where(np.arange(200) % 4 == 0, 40.0, 0.0)
    rest = 50.0 + random.normal(0.0, 0.5, 200)
    true = price_range(gains, rest)
    hidden = price_range(gains, rest - 0.5 * gains)
    assert 7.0 < true[0] < 10.0 < true[1] < 13.0
    assert hidden[0] < 5.0 < true[0] and hidden[1] < 13.0


def test_the_range_lies_between_nothing_and_the_whole_step():
    random = np.random.default_rng(1)
    low, high = price_range(np.abs(random.normal(0.0, 1.0, 10)), np.full(10, 0.5))
    assert 0.0 <= low <= high <= 1.5
    assert price_range(np.full(9, 0.1), 50.0 + random.normal(0.0, 9.0, 9))[0] == 0.0


def test_the_same_cycles_give_the_same_range():
    values = np.random.default_rng(2).gamma(2.0, 3.0, 30)
    assert price_range(values, values[::-1]) == price_range(values.copy(), values[::-1].copy())


def test_how_often_a_periodic_cause_comes_is_not_uncertain():
    """Every tenth of 60 cycles takes 40 ms longer, more or less: the range is that of the 40 ms."""
    random, inside, widths = np.random.default_rng(11), 0, []
    hit = np.arange(60) % 10 == 0
    for _ in range(400):
        gains = np.where(hit, random.normal(40.0, 6.0, 60), random.normal(0.2, 0.1, 60))
        rest = 20.0 + random.normal(0.0, 1.0, 60)
        after = (20.0 + random.normal(0.0, 1.0, 60)).mean() * (1 + random.normal(0.0, 0.01))
        future = np.where(hit, random.normal(40.0, 6.0, 60), random.normal(0.2, 0.1, 60)).mean()
        saved = rest.mean() + future - after
        low, high = price_range(gains, rest, periodic=hit)
        before = price_range(gains, rest)
        inside += low <= saved <= high
        widths.append((high - low) / (before[1] - before[0]))
    assert inside >= 0.88 * 400 and np.median(widths) < 0.6


@pytest.mark.parametrize("excluded", [(), (20, 21), (40, 41, 80, 81)], ids=["all", "one", "two"])
def test_a_periodic_cause_costs_the_same_whichever_of_its_steps_are_measured(tmp_path, excluded):
    """100 ms on rank 1 in every tenth step; in some of these steps a profiler is closed."""
    job = Job(
        world=2,
        steps=120,
        extra=lambda rank, step: {"host": 100.0 * (rank == 1 and step % 10 == 0)},
        marks=lambda rank, step: ["profiler_close"] if step in excluded else [],
    )
    facts = analyze(str(record(tmp_path / "run", job)), Options(cache=False, jobs=1)).facts
    cost = facts["late"]["host"]
    assert cost["persistence"] == "periodic" and cost["ms_per_step"] == pytest.approx(10.0, rel=0.06)
    assert facts["late"]["total"]["ms_per_step"] == pytest.approx(cost["ms_per_step"], rel=0.05)
