"""From trials to verdicts: how often they are right, of trials whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from ddpdoctor.experiment.judging import Round, change_of, parity, ratios, verdict
from ddpdoctor.experiment.running import Trial
from ddpdoctor.experiment.settings import Results


def trial(step_ms: np.ndarray, **known: object) -> Trial:
    return Trial(step_ms, {}, known.get("parameters"), list(known.get("losses", [])), 1.0)


def rounds_of(count: int, change: float, random: np.random.Generator, between: float = 0.02) -> list[Round]:
    """Trials of 50 steps of 20 ms, each trial slower or quicker as a whole by ``between``, the variant by ``change`` besides."""

    def drawn(factor: float) -> Trial:
        level = 20.0 * factor * np.exp(random.normal(0, between))
        return trial(level * np.exp(random.normal(0, 0.05, 50)))

    baselines = [drawn(1.0) for _ in range(count + 1)]
    return [Round(baselines[i], drawn(1 + change), baselines[i + 1]) for i in range(count)]


def test_no_difference_is_rarely_called_one():
    random = np.random.default_rng(1)
    wrong = sum(
        verdict(change_of(ratios(rounds_of(5, 0.0, random)))[1]) in ("faster", "slower") for _ in range(400)
    )
    assert wrong < 0.08 * 400


def test_more_rounds_are_not_more_false_verdicts():
    """One change at a time, so that each baseline's trial stands in two rounds."""
    random, most, wrong = np.random.default_rng(5), 20, 0
    for _ in range(400):
        baselines, variants = random.normal(0, 0.1, most + 1), random.normal(0, 0.1, most)
        logs = variants - (baselines[1:] + baselines[:-1]) / 2
        verdicts = (verdict(change_of(logs[:count])[1]) for count in range(3, most + 1))
        wrong += next(filter(None, verdicts), "same") != "same"
    assert wrong < 0.08 * 400


def test_a_large_difference_is_found_in_three_rounds():
    random = np.random.default_rng(2)
    found = [verdict(change_of(ratios(rounds_of(3, -0.3, random)))[1]) for _ in range(100)]
    assert found.count("faster") >= 95
    assert found.count("slower") == 0


def test_the_interval_holds_the_truth():
    random = np.random.default_rng(3)
    held = 0
    for _ in range(400):
        low, high = change_of(ratios(rounds_of(4, 0.1, random)))[1]
        held += low <= 0.1 <= high
    assert held >= 0.92 * 400


def test_what_is_in_some_steps_only_shows_in_their_mean():
    stalls = np.full(40, 20.0)
    stalls[::10] = 120.0
    found = [Round(trial(stalls), trial(np.full(40, 20.0)), trial(stalls))] * 3
    assert change_of(ratios(found))[0] == 0.0
    assert abs(change_of(ratios(found, rare=True))[0] - (20 / 30 - 1)) < 1e-9


def test_two_rounds_decide_nothing():
    change, ends = change_of(ratios(rounds_of(2, -0.5, np.random.default_rng(4))))
    assert change < -0.3
    assert ends is None
    assert verdict(ends) is None


def test_a_machine_that_slows_down_meanwhile_is_no_difference():
    levels = [20.0 * 1.1**number for number in range(9)]
    trials = [trial(np.full(50, level)) for level in levels]
    found = [Round(trials[i - 1], trials[i], trials[i + 1]) for i in range(1, 8, 2)]
    assert abs(change_of(ratios(found))[0]) < 0.01


SEEDED = [trial(np.ones(3), parameters={"sha256": "a", "norm": 2.0})] * 2


@pytest.mark.parametrize(
    ("norm", "results", "unexpected", "says"),
    [
        (2.0 * (1 + 1e-7), Results.LAST_BITS, False, "in their last bits (their norms by 1e-07)"),
        (2.1, Results.LAST_BITS, True, "by more than their last bits (their norms by 5e-02)"),
        (2.1, Results.OTHER, False, "The parameters differ (their norms by 5e-02)."),
        (2.0, Results.SAME, True, "something in the job depends on it"),
        (float("nan"), Results.OTHER, True, "no numbers any more"),
        (float("inf"), Results.SAME, True, "infinite"),
    ],
)
def test_a_model_that_differs_is_told_by_what_the_setting_may_do_to_it(norm, results, unexpected, says):
    found = parity(SEEDED, [trial(np.ones(3), parameters={"sha256": "b", "norm": norm})], results)
    assert found is not None
    assert (found.same_bits, found.unexpected) == (False, unexpected)
    assert says in found.says


def test_parity():
    one, other = {"sha256": "a", "norm": 2.0}, {"sha256": "b", "norm": 2.2}
    plain = [trial(np.ones(3), parameters=one, losses=[1.0, 0.5])] * 2
    assert parity(plain, [trial(np.ones(3), parameters=one)]).same_bits is True
    differs = parity(plain, [trial(np.ones(3), parameters=other, losses=[1.0, 0.6])])
    assert differs.same_bits is False
    assert differs.norm_differs is not None and abs(differs.norm_differs - 0.1) < 1e-9
    assert differs.losses == [[1.0, 1.0], [0.5, 0.6]]
    unseeded = [trial(np.ones(3), parameters=one), trial(np.ones(3), parameters=other)]
    assert parity(unseeded, [trial(np.ones(3), parameters=one)]).same_bits is None
    assert parity([trial(np.ones(3))], [trial(np.ones(3), parameters=one)]) is None
