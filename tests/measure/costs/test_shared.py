"""What all ranks alike spend, and what only looks alike."""

import numpy as np
import pytest

from ddpdoctor.measure.replay import replay_all
from tests.measure.made import shared_of, simple


def test_operators_of_one_rank_and_waiting_of_another_are_not_common():
    """As long as each other: nobody is late, and yet the two do not do the same."""
    computes, waits = np.array([[[20.0, 0.0]]]), np.array([[[1.0, 21.0]]])
    shared = shared_of(simple(2, outside=computes, host=waits))
    assert shared["outside"].ms_per_step == pytest.approx(1.0)


def test_what_all_do_is_of_both_kinds():
    shared = shared_of(simple(2, outside=12.0, host=8.0))
    assert shared["outside"].ms_per_step == pytest.approx(20.0)


def test_no_scenario_is_replayed_twice(monkeypatch):
    """What exposed transfers cost is asked for by the price of buckets, too."""
    seen = []

    def counting(graph, changes=()):
        lengths = replay_all(graph, changes)
        seen.append(lengths.tobytes())
        return lengths

    monkeypatch.setattr("ddpdoctor.measure.costs.price.replay_all", counting)
    shared = shared_of(simple(2))
    assert shared["communication"].ms_per_step == pytest.approx(2.0)
    assert len(seen) > 1 and len(seen) == len(set(seen))
