"""Steps that are unlike the others: what is planted is found where it is, and healthy lengths have none."""

from __future__ import annotations

import time

import numpy as np
import pytest

from ddpdoctor.measure.steplog import PatternKind, step_patterns, without_run_ahead

RUNS = 40


def healthy(random: np.random.Generator, count: int, kind: str) -> np.ndarray:
    """Seconds of ``count`` steps of a job in which nothing happens."""
    noise = random.standard_normal(count)
    of_kind = {
        "normal": 0.06 * noise,
        "heavy tails": 0.04 * np.abs(random.standard_t(3, count)),
        "neighbours alike": 0.05 * noise
        + 0.05 * np.convolve(random.standard_normal(count + 19), np.full(20, 0.22), "valid"),
        "slow drift": 0.05 * noise
        + 0.03 * np.sin(np.arange(count) / count * 2 * np.pi * random.uniform(0.3, 2)),
        "spikes": 0.05 * noise + (random.random(count) < 0.03) * random.uniform(0.3, 2.0, count),
    }
    lengths: np.ndarray = random.uniform(0.01, 0.3) * np.maximum(1 + of_kind[kind], 0.5)
    return lengths


def patterns(lengths: np.ndarray) -> list:
    return step_patterns(np.arange(len(lengths)), lengths, np.ones(len(lengths), bool))


KINDS = ["normal", "heavy tails", "neighbours alike", "slow drift", "spikes"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_run_has_none(kind: str) -> None:
    random = np.random.default_rng(39)
    found = [patterns(healthy(random, int(random.integers(30, 1500)), kind)) for _ in range(RUNS)]
    assert sum(map(bool, found)) <= 1


@pytest.mark.parametrize(
    "kind", ["two lengths", "three lengths", "work of any length", "few steps, neighbours alike"]
)
def test_lengths_of_other_kinds_have_neither_period_nor_change(kind: str) -> None:
    random = np.random.default_rng(41)
    false = 0
    for _ in range(RUNS):
        count = int(random.integers(40, 80) if kind.startswith("few") else random.integers(200, 3000))
        noise = random.standard_normal(count)
        alike = np.array([0.9**lag for lag in range(60)])
        lengths = {
            "two lengths": np.where(random.random(count) < 0.5, 1.0, 1.6) + 0.03 * noise,
            "three lengths": 1 + np.where(random.random(count) < 0.3, 1, 0) + 0.03 * noise,
            "work of any length": 1 + 0.05 * noise + random.pareto(2, count),
            "few steps, neighbours alike": 1
            + 0.03 * np.convolve(random.standard_normal(count + 59), alike, "valid"),
        }[kind]
        found = patterns(0.1 * np.maximum(lengths, 0.3))
        false += any(each.kind is not PatternKind.ONCE for each in found)
    assert false <= 2


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 0.02])
def test_equal_lengths_have_none(seconds: float) -> None:
    assert patterns(np.full(400, seconds)) == []


@pytest.mark.parametrize("count", [40, 200, 1001])
def test_lengths_that_alternate_are_a_period(count: int) -> None:
    (found,) = patterns(np.tile([0.01, 0.05], count)[:count])
    assert (found.kind, found.every, found.hits) == (PatternKind.EVERY_NTH, 2, count // 2)


def test_lengths_that_alternate_in_a_short_run_with_some_in_between_are_a_period() -> None:
    """The usual length then lies between the short ones and the long ones."""
    lengths = np.tile([0.0208, 0.0130], 19)[:37] + 2e-4 * np.random.default_rng(1).standard_normal(37)
    lengths[[7, 13, 19, 25, 31]] = 0.0154
    (found,) = patterns(lengths)
    assert (found.kind, found.every, found.hits) == (PatternKind.EVERY_NTH, 2, 19)


@pytest.mark.parametrize("end", [0, -1])
def test_a_short_step_at_an_end_hides_no_pause(end: int) -> None:
    lengths = np.full(200, 0.02) + 1e-4 * np.random.default_rng(1).standard_normal(200)
    lengths[end], lengths[100] = 0.0, 5.0
    (found,) = patterns(lengths)
    assert (found.kind, found.steps) == (PatternKind.ONCE, [100])


def test_a_pause_in_a_step_of_a_period_is_a_pause() -> None:
    lengths = np.full(500, 0.02) + 1e-4 * np.random.default_rng(1).standard_normal(500)
    lengths[3::10] += 0.2
    lengths[303] += 20.0
    period, pause = patterns(lengths)
    assert (period.every, period.hits, period.extra_s) == (10, 49, pytest.approx(9.8, rel=0.01))
    assert (pause.kind, pause.steps) == (PatternKind.ONCE, [303])


def test_a_growth_that_accelerates_begins_with_no_negative_length() -> None:
    lengths = 0.001 + np.linspace(0, 1, 1000) ** 2
    (found,) = patterns(lengths)
    assert found.kind is PatternKind.GROWING and found.before_ms is not None
    assert found.before_ms >= 0.0 and found.extra_s <= lengths.sum()


def planted(random: np.random.Generator) -> tuple[np.ndarray, float]:
    lengths = healthy(random, int(random.integers(150, 1500)), KINDS[random.integers(len(KINDS))])
    return lengths, float(np.median(lengths))


def test_one_or_two_pauses_are_found() -> None:
    random = np.random.default_rng(1)
    hits = 0
    for count in [1, 2] * (RUNS // 2):
        lengths, usual = planted(random)
        at = random.choice(np.arange(10, len(lengths) - 5), count, replace=False)
        lengths[at] += max(20 * usual, 4.0)
        (found,) = [each for each in patterns(lengths) if each.kind is PatternKind.ONCE]
        hits += found.steps == sorted(at.tolist()) and found.extra_s == pytest.approx(
            count * max(20 * usual, 4.0), rel=0.1
        )
    assert hits >= RUNS - 1


def test_the_distance_of_a_period_is_exact() -> None:
    random = np.random.default_rng(2)
    hits = 0
    for _ in range(RUNS):
        lengths, usual = planted(random)
        every = int(random.integers(2, 25))
        lengths[random.integers(every) :: every] += usual * random.uniform(0.8, 10)
        hits += [(each.kind, each.every) for each in patterns(lengths)] == [(PatternKind.EVERY_NTH, every)]
    assert hits >= 0.95 * RUNS


def test_a_period_in_a_part_of_the_run_has_its_first_and_last_step() -> None:
    random = np.random.default_rng(6)
    hits = 0
    for _ in range(RUNS):
        lengths, usual = planted(random)
        every = int(random.integers(2, 12))
        first, last = sorted(random.choice(len(lengths), 2, replace=False).tolist())
        last = min(max(last, first + 8 * every), len(lengths))
        lengths[first:last:every] += usual * random.uniform(1.5, 10)
        wanted = list(range(first, last, every))
        found = [each for each in patterns(lengths) if each.kind is PatternKind.EVERY_NTH]
        seen = [(each.every, each.steps[0], each.steps[-1]) for each in found]
        hits += len(wanted) < 6 or seen == [(every, wanted[0], wanted[-1])]
    assert hits >= 0.9 * RUNS


@pytest.mark.parametrize(("first", "every", "extra_s"), [(153, 10, 0.15), (4, 2, 0.02)])
def test_a_period_among_steps_that_scatter_widely(first: int, every: int, extra_s: float) -> None:
    """As on a busy machine: four of ten steps are longer than the others by up to twice the usual length."""
    random = np.random.default_rng(8)
    hits = 0
    for _ in range(RUNS):
        lengths = 0.0065 + 2e-4 * np.abs(random.standard_normal(300))
        lengths += np.where(random.random(300) < 0.4, random.uniform(0.0, 0.009, 300), 0.0)
        lengths[first::every] += extra_s
        found = [each for each in patterns(lengths) if each.kind is PatternKind.EVERY_NTH]
        hits += [(each.every, each.steps[0]) for each in found] == [(every, first)]
    assert hits >= 0.95 * RUNS


def test_long_steps_of_a_long_run_take_little_time() -> None:
    random = np.random.default_rng(7)
    lengths = np.tile([0.01, 0.05], 50_000) + 1e-4 * random.standard_normal(100_000)
    numbers = np.cumsum(random.integers(1, 9, len(lengths)))
    started = time.process_time()
    step_patterns(numbers, lengths, np.ones(len(lengths), bool))
    assert time.process_time() - started < 20.0


@pytest.mark.parametrize("slower_first", [True, False])
def test_the_step_of_a_change_is_found_within_two_per_cent_of_the_run(slower_first: bool) -> None:
    random = np.random.default_rng(3)
    hits = 0
    for _ in range(RUNS):
        lengths, usual = planted(random)
        cut = int(random.uniform(0.2, 0.8) * len(lengths))
        lengths[slice(0, cut) if slower_first else slice(cut, None)] += usual * random.uniform(0.25, 1.5)
        found = patterns(lengths)
        assert all(each.extra_s >= 0.0 for each in found)
        hits += [each.kind for each in found] == [PatternKind.FROM_STEP] and abs(
            found[0].steps[0] - cut
        ) <= 0.02 * len(lengths)
    assert hits >= 0.95 * RUNS


def test_pauses_behind_a_change_are_none_of_its_seconds() -> None:
    lengths = np.full(300, 0.010) + 1e-4 * np.random.default_rng(1).standard_normal(300)
    lengths[150:] += 0.005
    lengths[[80, 170, 260]] += 2.0
    pauses, found = patterns(lengths)
    assert pauses.kind is PatternKind.ONCE and pauses.steps == [80, 170, 260] and pauses.recurs
    assert found.kind is PatternKind.FROM_STEP and found.extra_s == pytest.approx(0.75, rel=0.05)


def test_growth_is_no_change() -> None:
    random = np.random.default_rng(4)
    hits = 0
    for _ in range(RUNS):
        lengths, usual = planted(random)
        lengths += usual * random.uniform(0.3, 2) * np.arange(len(lengths)) / len(lengths)
        hits += [each.kind for each in patterns(lengths)] == [PatternKind.GROWING]
    assert hits >= 0.95 * RUNS


def test_other_jobs_that_come_and_go_are_no_growth() -> None:
    """As recorded beside other work: each level for 20 steps, the last one as short as the first."""
    levels = [*[1.0] * 8, 1.02, 1.1, 1.5, 1.25, 1.7, 1.65, 1.4, 1.13, 1.4, 1.95, 1.4, 1.03]
    random = np.random.default_rng(47)
    kinds = [
        each.kind
        for _ in range(RUNS)
        for each in patterns(0.02 * np.repeat(levels, 20) * (1 + 0.2 * random.standard_normal(400)))
    ]
    assert PatternKind.GROWING not in kinds


def test_few_steps_have_none() -> None:
    assert patterns(np.array([0.01] * 10 + [5.0] + [0.01] * 8)) == []


def test_a_host_that_runs_ahead_of_its_device_has_no_period():
    """Its steps take 1 ms, and every tenth one, which logs a loss, until the device has done all ten of 20 ms."""
    numbers, noise = np.arange(300), np.random.default_rng(1).normal(0.0, 0.0002, 300)
    lengths = np.where(numbers % 10 == 9, 0.191, 0.001) + np.abs(noise)
    spread = without_run_ahead(numbers, lengths)
    assert spread.sum() == pytest.approx(lengths.sum())
    assert np.median(spread) == pytest.approx(0.02, rel=0.05)
    assert not step_patterns(numbers, spread, np.ones(300, bool))
    lengths[159] += 5.0
    (pause,) = step_patterns(numbers, without_run_ahead(numbers, lengths), np.ones(300, bool))
    assert pause.kind is PatternKind.ONCE and pause.steps == [159]
    assert pause.extra_s == pytest.approx(5.0, rel=0.4)


def test_a_checkpoint_every_fifty_steps_is_no_host_that_runs_ahead():
    """If its time were spread over the steps before it, the steps after the last one would seem shorter."""
    numbers, noise = np.arange(240), np.random.default_rng(1).normal(0.0, 0.0002, 240)
    saves = numbers % 50 == 49
    lengths = np.where(saves, 0.9, 0.018) + np.abs(noise)
    spread = without_run_ahead(numbers, lengths, saves)
    assert (spread == lengths).all()
    kinds = [pattern.kind for pattern in step_patterns(numbers, spread, np.ones(240, bool))]
    assert kinds == [PatternKind.EVERY_NTH]


def test_the_slower_side_of_a_change_reaches_over_all_slower_levels():
    """The machine becomes busier while the work is there, and the work ends with step 217."""
    numbers = np.arange(400)
    lengths = np.select([numbers < 194, numbers < 218], [0.026, 0.040], 0.017)
    lengths = lengths + 2e-4 * np.random.default_rng(1).standard_normal(400)
    (change,) = step_patterns(numbers, lengths, np.ones(400, bool))
    assert change.kind is PatternKind.FROM_STEP and change.steps == [218, 399]
    assert change.extra_s == pytest.approx(194 * 0.009 + 24 * 0.023, rel=0.05)
    assert change.before_ms == pytest.approx(26.0, rel=0.02) and change.after_ms == pytest.approx(
        17.0, rel=0.02
    )


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.02), (0.02, 0.0)])
def test_steps_without_a_length(before, after):
    """Of a damaged log."""
    lengths = np.where(np.arange(400) < 200, before, after)
    (change,) = step_patterns(np.arange(400), lengths, np.ones(400, bool))
    assert change.kind is PatternKind.FROM_STEP and change.steps == [200, 399]
    assert (change.before_ms, change.after_ms) == (1e3 * before, 1e3 * after)
