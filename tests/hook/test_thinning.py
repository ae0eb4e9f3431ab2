"""Which steps are recorded in full, by what that costs."""

from __future__ import annotations

import pytest

from ddpdoctor.hook.thinning import BLOCK_STEPS, EARLY_STEPS, MOST_SHARE, MOST_THINNED, Thinning


def blocks(thinning: Thinning, first: int, last: int, cost_us: float, step_ms: float) -> list[int]:
    """First steps of the blocks that are recorded in full, where recording a step costs ``cost_us``."""
    chosen = []
    full = first // BLOCK_STEPS % thinning.every == 0
    for step in range(first + BLOCK_STEPS, last, BLOCK_STEPS):
        full = thinning.next_block(step, int(cost_us * 1e3) if full else None, int(step_ms * 1e6))
        if full:
            chosen.append(step)
    return chosen


@pytest.mark.parametrize(
    ("cost_us", "early", "later"), [(50.0, 1, 1), (100.0, 1, 2), (200.0, 2, 4), (1000.0, 8, 16)]
)
def test_a_block_in_so_many_is_recorded_in_full(cost_us, early, later):
    thinning = Thinning()
    blocks(thinning, 0, EARLY_STEPS, cost_us, 20.0)
    assert thinning.every == early
    chosen = blocks(thinning, EARLY_STEPS, 8192, cost_us, 20.0)
    assert thinning.every == later
    assert {b - a for a, b in zip(chosen[-9:], chosen[-8:], strict=False)} == {later * BLOCK_STEPS}
    assert cost_us / 20e3 / later <= MOST_SHARE / 2 or later == MOST_THINNED


def test_longer_steps_are_recorded_in_full_again():
    thinning = Thinning()
    blocks(thinning, 0, 2048, 400.0, 5.0)
    assert thinning.every > 8
    blocks(thinning, 2048, 8192, 400.0, 500.0)
    assert thinning.every == 1


def test_ranks_that_thin_differently_share_steps():
    cheap, dear = Thinning(), Thinning()
    both = [set(blocks(each, 0, 4096, us, 20.0)[-200:]) for each, us in ((cheap, 150.0), (dear, 600.0))]
    last = {step for step in both[1] if step > 3000}
    assert cheap.every < dear.every and last and last <= both[0]


def test_one_long_reading_of_the_clock_changes_little():
    thinning = Thinning()
    blocks(thinning, 0, 256, 50.0, 20.0)
    thinning.next_block(256, 50_000_000, 20_000_000)
    assert thinning.every == 1 and thinning.cost_us < 60
