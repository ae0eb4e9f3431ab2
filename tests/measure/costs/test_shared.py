"""What all ranks alike spend, and what only looks alike."""

import numpy as np
import pytest

from ddpdoctor.measure.replay import replay_all
from ddpdoctor.measure.steplog import PatternKind, StepPattern
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


HOST_MS = {
    "every 10th": np.where(np.arange(60) % 10 == 3, 106.0, 6.0),
    "since": np.where(np.arange(60) >= 40, 26.0, 6.0),
    "until": np.where((np.arange(60) < 20) & (np.arange(60) > 0), 26.0, 6.0),
    "growing": 6.0 + 0.5 * np.clip(np.arange(60) - 14, 0, None),
}


@pytest.mark.parametrize(
    ("when", "kind", "first", "last"),
    [("every 10th", "periodic", 3, 53), ("since", "range", 40, 59), ("until", "range", 1, 19)],
)
def test_a_cost_is_in_the_steps_in_which_it_has_its_typical_size(when, kind, first, last):
    """Of 6 ms in all steps and much more in some, it is not said to be in every step."""
    cost = shared_of(simple(2, cycles=60, data=HOST_MS[when][:, None, None]))["data"]
    assert (cost.persistence, cost.first_step, cost.last_step) == (kind, first, last)


def test_a_cost_that_scatters_is_in_every_step():
    scattered = np.random.default_rng(1).lognormal(2.0, 0.5, 60)[:, None, None]
    assert shared_of(simple(2, cycles=60, data=scattered))["data"].persistence == "always"


@pytest.mark.parametrize(
    ("when", "pattern"),
    [
        ("every 10th", StepPattern(PatternKind.EVERY_NTH, list(range(3, 60, 10)), 0.6, every=10)),
        ("since", StepPattern(PatternKind.FROM_STEP, [40, 59], 0.4, before_ms=8.0, after_ms=28.0)),
        ("until", StepPattern(PatternKind.FROM_STEP, [20, 59], 0.4, before_ms=28.0, after_ms=8.0)),
        ("growing", StepPattern(PatternKind.GROWING, [0, 59], 0.7, before_ms=8.0, after_ms=30.0)),
    ],
)
def test_the_script_s_own_code_is_priced_without_what_a_pattern_of_the_run_adds(when, pattern):
    graph = simple(2, cycles=60, host=HOST_MS[when][:, None, None])
    cost = shared_of(graph, [pattern])["host"]
    assert cost.ms_per_step == pytest.approx(6.0) and cost.persistence == "always"
    assert shared_of(graph)["host"].ms_per_step == pytest.approx(HOST_MS[when].mean())
