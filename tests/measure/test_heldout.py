"""Jobs drawn at random, with and without a cause: the right rank and cause, or nothing."""

from __future__ import annotations

import pytest

from tests.measure.heldout import judge


@pytest.mark.slow
@pytest.mark.parametrize("first", range(900_000, 900_200, 20))
def test_random_jobs(first):
    """Never a wrong rank or cause nor a false alarm; a cause is missed only where it costs little."""
    verdicts = [judge(seed) for seed in range(first, first + 20)]
    assert [v for v in verdicts if v.outcome in ("wrong", "right, and more", "false alarm")] == []
    assert [v for v in verdicts if v.outcome == "missed" and v.true_share > 0.08] == []
    errors = sorted(abs(v.cost_error) for v in verdicts)
    assert errors[len(errors) // 2] < 0.01
