"""A rank that computes longer: in one phase of the step alone, or in all of them."""

from __future__ import annotations

import pytest

from tests.measure.made import late_of, on, simple


def slow(world=4, jitter=0.02, **longer_ms):
    """The phases of a job whose rank 1 takes this much longer in each."""
    usual_ms = {"forward": 5.0, "backward": 10.0, "optimizer": 1.0}
    work = {phase: ms + on(1, world, longer_ms.get(phase, 0.0)) for phase, ms in usual_ms.items()}
    return late_of(simple(world, jitter=jitter, **work))["compute"]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("jitter", [0.01, 0.1])
def test_more_work_in_one_phase(world, jitter):
    assert slow(world, jitter, forward=4.0).phase == "the forward pass"
    assert slow(world, jitter, backward=6.0).phase == "backward()"


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("factor", [0.2, 0.5])
def test_a_slower_rank_is_slower_in_all(world, factor):
    assert slow(world, forward=5 * factor, backward=10 * factor, optimizer=factor).phase is None
    assert slow(world, forward=5 * factor, backward=5 * factor).phase is None, "half as much in the other"


def test_phases_that_are_too_short_to_tell():
    assert late_of(simple(4, forward=5.0 + on(1, 4, 4.0), backward=0.5))["compute"].phase is None
