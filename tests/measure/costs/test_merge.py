"""One price for each cause, and what all lateness costs."""

from __future__ import annotations

import pytest

from ddpdoctor.measure.attribution import attribute
from ddpdoctor.measure.costs import Context, merge, price_all
from ddpdoctor.measure.facts import Cost
from tests.measure.made import NoLines, simple


def cost(ms: float) -> Cost:
    return Cost(ms_per_step=ms, share=ms / 100.0, speedup=100.0 / (100.0 - ms))


def test_of_two_prices_of_one_cause_the_larger_stands():
    merged = merge(
        [{"shared.data": cost(3.0)}, {"shared.data": cost(5.0)}, {"shared.data": cost(4.0)}], 100.0
    )
    assert merged == {"shared.data": cost(5.0)}


def test_what_comes_now_and_then_is_late_besides():
    """The window's pricer knows its total; what the log of the whole run adds, or has more of, makes it grow."""
    window = {"late.data": cost(3.0), "late.total": cost(3.0)}
    merged = merge([window, {"late.data": cost(5.0), "late.checkpoint": cost(2.0)}], 100.0)
    assert merged["late.total"].ms_per_step == pytest.approx(7.0)
    assert merged["late.total"].share == pytest.approx(0.07)


def test_without_a_window_the_total_is_of_what_there_is():
    assert merge([{"late.data": cost(5.0)}], 100.0)["late.total"].ms_per_step == pytest.approx(5.0)


@pytest.mark.parametrize("cause", ["evaluation", "uneven"])
def test_another_reading_of_the_same_time_is_not_late_twice(cause):
    window = {"late.compute": cost(3.0), "late.total": cost(3.0)}
    assert merge([window, {f"late.{cause}": cost(2.0)}], 100.0)["late.total"] == cost(3.0)


def test_a_run_without_a_measured_cycle_has_no_prices_of_replays():
    graph = simple(2)
    graph.groups.clear()
    assert price_all(Context(graph, attribute(graph), NoLines())) == {}
