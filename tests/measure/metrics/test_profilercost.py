"""What the profiler window cost, against steps whose lengths are known."""

from __future__ import annotations

import pytest

from ddpdoctor.measure.metrics import window_cost
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
