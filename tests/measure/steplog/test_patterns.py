"""Steps that are unlike the others: what is planted is found where it is, and healthy lengths have none."""

from __future__ import annotations

import numpy as np
import pytest

from ddpdoctor.measure.steplog import PatternKind, step_patterns

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


def test_the_distance_of_a_rhythm_is_exact() -> None:
    random = np.random.default_rng(2)
    hits = 0
    for _ in range(RUNS):
        lengths, usual = planted(random)
        every = int(random.integers(2, 25))
        lengths[random.integers(every) :: every] += usual * random.uniform(0.8, 10)
        hits += [(each.kind, each.every) for each in patterns(lengths)] == [(PatternKind.EVERY_NTH, every)]
    assert hits >= 0.95 * RUNS


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


def test_growth_is_no_change() -> None:
    random = np.random.default_rng(4)
    hits = 0
    for _ in range(RUNS):
        lengths, usual = planted(random)
        lengths += usual * random.uniform(0.3, 2) * np.arange(len(lengths)) / len(lengths)
        hits += [each.kind for each in patterns(lengths)] == [PatternKind.GROWING]
    assert hits >= 0.95 * RUNS


def test_few_steps_have_none() -> None:
    assert patterns(np.array([0.01] * 10 + [5.0] + [0.01] * 8)) == []
