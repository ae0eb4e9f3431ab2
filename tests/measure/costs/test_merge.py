"""One price for each cause, and what all lateness costs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

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


def sure(ms, side=1.0):
    return replace(cost(ms), low_ms_per_step=ms - side, high_ms_per_step=ms + side)


def test_the_total_is_no_less_sure_than_the_causes_that_stand():
    """One cause, which replaces a smaller price of its own: the total is that, with its range."""
    for priced in ([{"late.data": sure(5.0)}], [{"late.data": sure(3.0, 2.0)}, {"late.data": sure(5.0)}]):
        total = merge(priced, 100.0)["late.total"]
        assert (total.low_ms_per_step, total.ms_per_step, total.high_ms_per_step) == pytest.approx((4, 5, 6))
    both = merge([{"late.data": sure(5.0, 3.0)}, {"late.host": sure(2.0, 4.0)}], 100.0)["late.total"]
    assert (both.ms_per_step, both.high_ms_per_step) == pytest.approx((7.0, 12.0))


@pytest.mark.parametrize("name", ["compute", "uneven", "throttled", "cpu_starved"])
def test_computing_longer_counts_once_by_whatever_name(name):
    window = {f"late.{name}": cost(3.0), "late.total": cost(3.0)}
    assert merge([window, {"late.compute": cost(2.0)}], 100.0)["late.total"].ms_per_step == 3.0
    assert merge([window, {"late.compute": cost(5.0)}], 100.0)["late.total"].ms_per_step == 5.0
