"""What a host's waiting costs its device: the step time without it, predicted from the job that waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.generator import SMALL, Config, Plant, cpu_job, generate
from tests.generator.simulate import simulate
from tests.measure.traced import accused, found, measured

TOLERANCE = 0.03
"""Of the step."""
HOST_WORK = Plant("host_work_end_of_step", ms=4)
BARRIER = Plant("explicit_barrier")
KINDS = ("device_sync", "barrier", "collective")


def device_step_ms(config, steps=6):
    """ms from one step's end on the accelerator to the next one's, in the true run: a host that runs ahead ends its own
    steps earlier."""
    ends = [
        max(
            program.machine.compute_free_us
            for program in simulate(replace(config, steps=count), record=False).programs
        )
        for count in (2 * steps, 3 * steps)
    ]
    return (ends[1] - ends[0]) / steps / 1e3


def waiting(config, folder):
    """(shared facts, prices of the three kinds of waiting, mean step in ms)."""
    generate(config, folder / "traces")
    measurement = measured(folder / "traces")
    assert accused(measurement) == {}
    shared = found(measurement.facts.shared)
    prices = {kind: shared[kind].ms_per_step if kind in shared else 0.0 for kind in KINDS}
    return shared, prices, measurement.facts.steps.mean_ms


@pytest.mark.parametrize(
    ("kind", "config", "without"),
    [
        pytest.param("device_sync", Config(**SMALL, plants=(HOST_WORK,)), {"item_every": 0}, id="item"),
        pytest.param(
            "barrier",
            Config(**SMALL, item_every=0, plants=(HOST_WORK, BARRIER)),
            {"plants": (HOST_WORK,)},
            id="barrier",
        ),
        pytest.param(
            "collective",
            Config(**SMALL, metric_allreduce=True, plants=(HOST_WORK,)),
            {"item_every": 0, "metric_allreduce": False},
            id="metric that is read",
        ),
        pytest.param(
            "device_sync",
            Config(**SMALL, world_size=1, plants=(HOST_WORK,)),
            {"item_every": 0},
            id="one rank",
        ),
        pytest.param(
            "device_sync",
            Config(**SMALL, plants=(replace(HOST_WORK, ms=16),)),
            {"item_every": 0},
            id="a host that needs longer than its device",
        ),
    ],
)
def test_a_host_that_waits_in_every_step_and_works_between(kind, config, without, tmp_path):
    shared, prices, mean_ms = waiting(config, tmp_path)
    truth_ms = device_step_ms(config) - device_step_ms(replace(config, **without))
    assert prices[kind] == pytest.approx(truth_ms, abs=TOLERANCE * mean_ms)
    assert truth_ms > 0.15 * mean_ms
    assert all(prices[other] < 0.01 * mean_ms for other in KINDS if other != kind)
    assert shared[kind].operation == {"device_sync": "aten::item", "collective": "allreduce"}.get(kind, kind)
    # The work itself has its own price: without it the device would not idle either.
    assert shared["host"].ms_per_step == pytest.approx(config.plants[0].ms, abs=TOLERANCE * mean_ms)


def test_a_host_too_slow_to_run_ahead_gains_little_by_waiting_less(tmp_path):
    """Issuing one kernel takes longer than the kernel: the device idles in between, and hardly after the wait."""
    config = Config(launch_us=150.0)
    shared, prices, mean_ms = waiting(config, tmp_path)
    truth_ms = device_step_ms(config) - device_step_ms(replace(config, item_every=0))
    assert truth_ms < 0.05 * mean_ms
    assert prices["device_sync"] == pytest.approx(truth_ms, abs=TOLERANCE * mean_ms)
    assert shared["launch"].ms_per_step > 0.2 * mean_ms


def test_waiting_for_what_is_long_done_costs_nothing(tmp_path):
    """The host waits, and most of each step, but always has a step issued behind what it waits for."""
    _, prices, mean_ms = waiting(
        Config(**SMALL, item_every=0, reads_last_step=True, plants=(HOST_WORK,)), tmp_path
    )
    assert max(prices.values()) < 0.01 * mean_ms


@pytest.mark.parametrize(
    "config", [Config(**SMALL, item_every=0), Config(**SMALL, item_every=0, plants=(HOST_WORK,))]
)
def test_a_host_that_never_waits(config, tmp_path):
    """But at the window's end, where the profiler does."""
    _, prices, _ = waiting(config, tmp_path)
    assert not any(prices.values())


def test_a_host_that_hardly_works_between(tmp_path):
    """The queue runs empty in every step, and is filled again at once."""
    _, prices, mean_ms = waiting(Config(**SMALL), tmp_path)
    assert 0 < prices["device_sync"] < 0.04 * mean_ms


def test_only_steps_in_which_it_waits_count(tmp_path):
    every, third = (
        waiting(Config(**SMALL, steps=12, item_every=count, plants=(HOST_WORK,)), tmp_path / str(count))[1]
        for count in (1, 3)
    )
    assert third["device_sync"] == pytest.approx(every["device_sync"] / 3, rel=0.25)


def test_a_loader_that_is_too_slow_is_waited_for_in_any_case(tmp_path):
    """A host that did not wait for its device would wait for the same batch."""
    config = Config(**SMALL, plants=(Plant("slow_data", ms=15), HOST_WORK))
    shared, prices, mean_ms = waiting(config, tmp_path)
    assert shared["data"].ms_per_step == pytest.approx(15, abs=TOLERANCE * mean_ms)
    assert max(prices.values()) < 0.02 * mean_ms


def test_one_rank_that_works_longer_is_late_and_no_fault_of_the_waiting(tmp_path):
    generate(Config(**SMALL, plants=(replace(HOST_WORK, ranks=(2,)),)), tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    assert accused(measurement) == {"host": [2]}
    assert measurement.facts.shared.device_sync.ms_per_step < 0.04 * measurement.facts.steps.mean_ms


def test_a_host_without_a_device_runs_ahead_of_nothing(tmp_path):
    _, prices, _ = waiting(cpu_job(plants=(HOST_WORK,)), tmp_path)
    assert prices["device_sync"] == 0.0
