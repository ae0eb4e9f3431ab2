"""Jobs drawn at random, with and without a cause: the right rank and cause, or nothing."""

from __future__ import annotations

import pytest

from tests.measure.heldout import judge

FIRST, LAST, TOGETHER = 900_000, 900_200, 20
KNOWN = {
    900_103: "four punctual ranks of 15 are accused beside the one whose data are late",
    900_153: "a rank whose late data cost 23 % of the step is missed",
}
MUCH = 0.08
"""Of the step: what costs so much is found."""
WRONG = ("wrong", "right, and more", "false alarm")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FIRST, LAST, TOGETHER))
def test_random_jobs(first):
    """Never a wrong rank or cause nor a false alarm; a cause is missed only where it costs little."""
    verdicts = [judge(seed) for seed in range(first, first + TOGETHER) if seed not in KNOWN]
    assert [v for v in verdicts if v.outcome in WRONG] == []
    assert [v for v in verdicts if v.outcome == "missed" and v.true_share > MUCH] == []
    errors = sorted(abs(v.cost_error) for v in verdicts)
    assert errors[len(errors) // 2] < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=pytest.mark.xfail(strict=True, reason=why)) for seed, why in KNOWN.items()],
)
def test_what_is_known_to_go_wrong(seed):
    verdict = judge(seed)
    assert verdict.outcome not in WRONG
    assert verdict.outcome != "missed" or verdict.true_share <= MUCH
