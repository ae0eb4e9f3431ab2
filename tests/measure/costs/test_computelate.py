"""A late rank's extra computation: more samples, lowered clocks, or a CPU it had to wait for."""

from __future__ import annotations

import pytest

from ddpdoctor.measure.attribution import attribute
from ddpdoctor.measure.costs import Context, costs_under, late_work
from tests.measure.made import NoLines, graph_of, on, simple

WORLD = 4


def refined(
    throttled=(), samples=None, elements=None, run_delay_ms=None, cpu_ms=(15.0,) * WORLD, **components_ms
):
    group = simple(WORLD, jitter=0.01, **components_ms).groups[0]
    graph = graph_of(group, samples=samples, elements=elements, run_delay_ms=run_delay_ms, cpu_ms=cpu_ms)
    late = late_work(Context(graph, attribute(graph), NoLines(), throttled_ranks=throttled))
    return {name: cost for name, cost in costs_under("late", late).items() if name != "total"}


SLOW = {"backward": 10.0 + on(1, WORLD, 4.0)}


def test_more_samples():
    found = refined(samples=[32, 42, 32, 32], **SLOW)
    assert set(found) == {"uneven"} and found["uneven"].ranks == [1]


@pytest.mark.parametrize(
    "samples", [None, [32, 32, 32, 32], [32, 24, 32, 32], [32, 33, 32, 32], [0, 40, 0, 0]]
)
def test_as_many_samples_or_too_few_more_to_explain_it(samples):
    assert set(refined(samples=samples, **SLOW)) == {"compute"}


def test_lowered_clocks():
    assert set(refined(throttled=[1], **SLOW)) == {"throttled"}
    assert set(refined(throttled=[2], **SLOW)) == {"compute"}, "another rank's clocks explain nothing"


def test_a_cpu_it_had_to_wait_for():
    found = refined(run_delay_ms=[0.1, 4.0, 0.1, 0.1], **SLOW)
    assert set(found) == {"cpu_starved"} and found["cpu_starved"].ranks == [1]
    assert set(refined(run_delay_ms=[0.1, 0.5, 0.1, 0.1], **SLOW)) == {"compute"}
    assert set(refined(run_delay_ms=[4.0, 4.0, 4.0, 4.0], **SLOW)) == {"compute"}, "all ranks alike"


def test_who_computes_longer_on_a_busy_machine_also_waits_longer_for_a_cpu():
    """Every rank waits 2 ms for each that it runs; rank 1 has 4 ms more to compute of its own."""
    found = refined(run_delay_ms=[10, 18, 10, 10], cpu_ms=[5, 9, 5, 5], **SLOW)
    assert set(found) == {"compute"}
    found = refined(run_delay_ms=[10, 18, 10, 10], cpu_ms=[5, 5, 5, 5], **SLOW)
    assert set(found) == {"cpu_starved"}, "it ran no longer than the others"


def test_who_ran_longer_than_it_waited_has_more_to_compute():
    """The others wait for no CPU; rank 1 runs 4 ms longer, and is held up for 2.5 ms meanwhile, or for longer than it runs."""
    assert set(refined(run_delay_ms=[0, 2.5, 0, 0], cpu_ms=[15, 19, 15, 15], **SLOW)) == {"compute"}
    assert set(refined(run_delay_ms=[0, 4.5, 0, 0], cpu_ms=[15, 19, 15, 15], **SLOW)) == {"cpu_starved"}


def test_what_a_rank_waits_for_a_cpu_in_every_step_makes_no_single_step_late():
    """Rank 1 computes 18 ms longer in each eighth step: its device does, or it waits for a CPU just then."""
    now_and_then = on(1, WORLD, 18.0, cycles=40, every=8)
    slow = {"backward": 10.0 + now_and_then}
    for delay_ms in (3.0, 12.0):
        found = refined(run_delay_ms=[0.1, delay_ms, 0.1, 0.1], **slow)
        assert set(found) == {"compute"} and found["compute"].occurrence_ms == pytest.approx(18.0, abs=1.0)
    only_then_ms = 3.0 + now_and_then[:, 0, 1]
    assert set(refined(run_delay_ms=[0.1, only_then_ms, 0.1, 0.1], **slow)) == {"cpu_starved"}


def test_larger_inputs_in_as_many_samples():
    found = refined(samples=[32] * WORLD, elements=[1000, 1400, 1000, 1000], **SLOW)
    assert set(found) == {"uneven"} and found["uneven"].ranks == [1]
    assert set(refined(samples=[32] * WORLD, elements=[1000] * WORLD, **SLOW)) == {"compute"}


def test_host_work_stays_what_it_is():
    """A rank that sleeps or waits for files in the loop also waits to be woken: that is no lack of a CPU."""
    assert set(refined(run_delay_ms=[0, 2.0, 0, 0], host=on(1, WORLD, 5.0))) == {"host"}


def test_host_work_that_only_waits_for_a_cpu_is_starved():
    """All ranks run the same Python code for as long; on rank 1, another program takes the core in between."""
    found = refined(run_delay_ms=[0, 5.0, 0, 0], host=3.0 + on(1, WORLD, 5.0))
    assert set(found) == {"cpu_starved"}


def test_host_work_that_runs_longer_and_waits_for_a_cpu_is_both():
    found = refined(run_delay_ms=[0, 3.0, 0, 0], cpu_ms=[15, 17.5, 15, 15], host=on(1, WORLD, 5.5))
    assert {name: cost.ms_per_step for name, cost in found.items()} == {
        "cpu_starved": pytest.approx(3.0, abs=0.3),
        "host": pytest.approx(2.5, abs=0.3),
    }


def test_waiting_for_data_stays_what_it_is():
    assert set(refined(samples=[32, 64, 32, 32], throttled=[1], data=on(1, WORLD, 5.0))) == {"data"}


def test_nothing_late():
    assert refined(samples=[32, 64, 32, 32], throttled=[1]) == {}
