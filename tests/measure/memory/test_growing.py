"""Which series of memory grow without end: made ones, of all kinds that jobs have."""

from __future__ import annotations

import numpy as np
import pytest

from ddpdoctor.measure.memory import rise_of

MB = float(1 << 20)
SEEDS = range(40)


def readings(random, seconds):
    """Once a second, as telemetry does."""
    return np.arange(float(seconds)) + random.uniform(0, 0.05, seconds)


def steady(times, random):
    return 900 + random.normal(0, 3, len(times))


def bursts(times, random):
    """Memory that steps take and give back, read at any moment."""
    return 900 + 200 * random.random(len(times)) ** 3


def settles(times, random):
    """An allocator that fragments more and more slowly."""
    return (
        900 + 150 * (1 - np.exp(-times / times[-1] * random.uniform(4, 20))) + random.normal(0, 1, len(times))
    )


def logarithmic(times, random):
    return 900 + 40 * np.log1p(times) + random.normal(0, 1, len(times))


def fills(times, random):
    """A cache that is full after a part of the time."""
    return (
        500
        + 4000 * np.minimum(times / times[-1] / random.uniform(0.1, 0.7), 1)
        + random.normal(0, 1, len(times))
    )


def passes(times, random):
    """Grows in each pass over the data, and gives back at its end."""
    period = max(2.5, times[-1] * random.uniform(0.05, 0.45))
    return 800 + 1000 * (times % period) / period


def evaluations(times, random):
    """Outputs pile up in an evaluation."""
    period = random.uniform(8, 30)
    inside = times % period > 0.7 * period
    return 800 + np.where(inside, 500 * (times % period) / period, 0) + random.normal(0, 2, len(times))


def jumps(times, random):
    """A few times more is taken, and kept: a checkpoint's buffers, a longer sequence than before."""
    at = np.sort(random.uniform(0, times[-1], 4))
    return 900 + 200 * np.searchsorted(at, times) + random.normal(0, 1, len(times))


HEALTHY = [steady, bursts, settles, logarithmic, fills, passes, evaluations, jumps]


@pytest.mark.parametrize("seconds", [20, 60, 600, 3000])
@pytest.mark.parametrize("kind", HEALTHY)
def test_what_a_healthy_job_does_is_no_growth(kind, seconds):
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        times = readings(random, seconds)
        assert rise_of(times, kind(times, random) * MB) is None, seed


@pytest.mark.parametrize("background", [steady, bursts, evaluations])
@pytest.mark.parametrize("seconds", [60, 600])
def test_a_leak_is_told_with_its_slope(background, seconds):
    told = 0
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        times = readings(random, seconds)
        slope = 3000 / seconds
        found = rise_of(times, (background(times, random) + slope * times) * MB)
        if found is not None:
            told += 1
            assert found.slope == pytest.approx(slope * MB, rel=0.15)
            assert found.low <= found.slope <= found.high
    assert told >= (0.6 if background is evaluations and seconds < 100 else 0.9) * len(SEEDS)


@pytest.mark.parametrize("parts", [2, 4])
def test_a_cache_of_shuffled_data_slows_down(parts):
    """Each rank reads another part in each pass: what is new becomes less and less."""
    times = np.arange(300.0)
    cached = 10_000 * (1 - (1 - 1 / parts) ** (times / 40))
    assert rise_of(times, (800 + cached) * MB, cache=True) is None


def test_little_is_not_told():
    times = np.arange(120.0)
    assert rise_of(times, (900 + 20 * times / 120) * MB) is None
    assert rise_of(times, (10_000 + 150 * times / 120) * MB) is None


def test_a_few_readings_tell_nothing():
    times = np.arange(12.0)
    assert rise_of(times, (900 + 50 * times) * MB) is None


def paces(seconds, random):
    """Steps per second of jobs on machines that others use, too."""
    times = np.arange(float(seconds))
    wandering = np.exp(np.cumsum(random.normal(0, 0.15, seconds)))
    return {
        "five times slower from the middle on": np.where(times < seconds / 2, 20.0, 4.0),
        "five times faster from the middle on": np.where(times < seconds / 2, 4.0, 20.0),
        "slow for a while": np.where((times > 0.4 * seconds) & (times < 0.7 * seconds), 4.0, 20.0),
        "standing for a while": np.where((times > 0.4 * seconds) & (times < 0.6 * seconds), 0.01, 20.0),
        "wandering": 20.0 * np.clip(wandering / np.median(wandering), 0.2, 5.0),
    }


@pytest.mark.parametrize("seconds", [30, 120, 600])
@pytest.mark.parametrize("cache", [False, True])
def test_what_leaks_by_the_step_is_told_whatever_the_pace(cache, seconds):
    told, of = 0, 0
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        for pace in paces(seconds, random).values():
            steps = np.cumsum(pace)
            leak = 3000 / steps[-1]
            found = rise_of(steps, (900 + random.normal(0, 3, seconds) + leak * steps) * MB, cache=cache)
            of += 1
            if found is not None:
                told += 1
                assert found.slope == pytest.approx(leak * MB, rel=0.1)
    assert told >= 0.95 * of


@pytest.mark.parametrize("kind", [steady, settles, logarithmic, fills])
def test_a_job_that_gets_faster_makes_no_growth_of_what_settles(kind):
    """By the clock it would look as steep at the end as at the beginning."""
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        for name, pace in paces(300, random).items():
            steps = np.cumsum(pace)
            assert rise_of(steps, kind(steps, random) * MB) is None, (seed, name)


def test_what_is_full_by_the_clock_is_no_growth_though_few_steps_came_after_it():
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        pace = paces(300, random)["five times slower from the middle on"]
        assert rise_of(np.cumsum(pace), fills(np.arange(300.0), random) * MB) is None, seed
