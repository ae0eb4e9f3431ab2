"""What the profiler window cost, against steps whose lengths are known."""

from __future__ import annotations

import pytest

from ddpdoctor.measure.attribution import attribute
from ddpdoctor.measure.costs import Context, costs_under, price_all
from ddpdoctor.measure.metrics import added_by_profiler, critical_breakdown, window_cost
from tests.measure.made import MS, NoLines, on, simple
from tests.measure.steplog.test_selection import log

MARKS = {
    10: ["profiler_open", "profiled"],
    11: ["profiled"],
    12: ["profiled"],
    20: ["profiler_close"],
    21: ["profiler_save"],
}


def test_all_that_the_window_touched_is_counted():
    lengths = [10.0] * 30
    lengths[10], lengths[11], lengths[12], lengths[20], lengths[22] = 40.0, 15.0, 17.0, 14.0, 11.0
    found = window_cost([log(lengths, marks=MARKS), log([10.0] * 30, rank=1, marks=MARKS)], 10.0)
    assert found is not None and (found.first, found.last) == (10, 12)
    assert found.step_ms == pytest.approx(16.0)
    assert found.extra_ms == pytest.approx(30 + 5 + 7 + 4 + 1)


def test_a_window_of_one_step_and_none():
    one = {10: ["profiler_open", "profiled"]}
    lengths = [10.0] * 10 + [40.0] + [10.0] * 9
    found = window_cost([log(lengths, marks=one)], 10.0)
    assert found is not None and (found.step_ms, found.extra_ms) == (40.0, 30.0)
    assert window_cost([log([10.0] * 20)], 10.0) is None
    assert window_cost([log(lengths, marks=one)], None) is None
    assert window_cost([], 10.0) is None


def test_a_profiler_of_the_job_is_not_ours():
    assert window_cost([log([10.0] * 20, marks={5: ["user_profiler"]})], 10.0) is None


def test_a_window_that_was_asked_for_later_is_not_the_first_ones_cost():
    marks = {**MARKS, 26: ["profiler_open", "profiled"], 27: ["profiled"]}
    lengths = [10.0] * 30
    lengths[10], lengths[26] = 40.0, 90.0
    found = window_cost([log(lengths, marks=marks)], 10.0)
    assert found is not None and (found.first, found.last) == (10, 12)
    assert found.extra_ms == pytest.approx(30.0)


def in_window(**more):
    """A job whose device computes for 12 ms and waits for its host for 17: of these, the profiler adds 8 to the usual 21 ms."""
    work = {"forward": 12.0, "backward": 0.0, "launch": 11.0, "host": 6.0, **more}
    return simple(1, cycles=6, transfer_ms=0.0, **work)


def test_what_the_profiler_adds_is_no_waiting_of_the_job():
    window, usual = in_window(), simple(1, transfer_ms=0.0, forward=21.0, backward=0.0)
    added_ns = added_by_profiler(window, usual)
    assert added_ns == pytest.approx(8 * MS)
    shares = critical_breakdown(window, added_ns)
    assert (shares["compute"], shares["host"]) == (pytest.approx(12 / 21), pytest.approx(9 / 21))
    context = Context(
        window, attribute(window), NoLines(), mean_step_ms=21.0, host_timed=False, profiler_ns=added_ns
    )
    costs = costs_under("shared", price_all(context))
    assert costs["launch"].ms_per_step == pytest.approx(11 * 9 / 17) and costs[
        "host"
    ].ms_per_step == pytest.approx(6 * 9 / 17)
    assert costs["launch"].share == pytest.approx(costs["launch"].ms_per_step / 21)
    assert costs["launch"].own_ms == pytest.approx(costs["launch"].ms_per_step)


@pytest.mark.parametrize(
    ("of_window", "usual_ms"),
    [
        ({"forward": 4.0}, 21.0),
        ({"forward": 22.0, "launch": 2.0, "host": 1.0}, 21.0),
        ({"checkpoint": on(0, 1, 40.0, 6, 6)}, 29.0),
    ],
    ids=["no longer than usual", "more computation in its steps", "a checkpoint in one of its steps"],
)
def test_longer_steps_that_the_profiler_does_not_explain_stay_as_they_are(of_window, usual_ms):
    usual = simple(1, transfer_ms=0.0, forward=usual_ms, backward=0.0)
    assert added_by_profiler(in_window(**of_window), usual) == 0.0
