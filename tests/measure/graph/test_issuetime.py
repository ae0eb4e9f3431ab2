"""Hosts that are slower than their devices: whose fault it is, and what mending costs, predicted from the job that is mended."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ddpdoctor.measure.costs import usual_transfer
from ddpdoctor.measure.graph import graph_of_windows, issue_time_ns
from ddpdoctor.measure.replay import replay_all, without_transfer
from ddpdoctor.measure.taxonomy import INDEX
from tests.generator import SMALL, Config, Plant, generate
from tests.measure.made import gain_ns, late_of, shared_of
from tests.measure.traced import accused, measured, windows_of
from tests.measure.window.test_hostwaits import device_step_ms

pytestmark = pytest.mark.extended

ISSUING = Config(item_every=0, launch_us=150.0, steps=7, warmup_steps=6)
"""Issuing a kernel takes longer than the kernel, and no host ever waits."""
FREE = 8.0
"""us per launch that no device waits for."""
TOLERANCE = 0.03
"""Of the step."""


def slower(rank, ms):
    """One host that needs ``ms`` more for each step."""
    return Plant("host_work_end_of_step", ranks=(rank,), ms=ms, drain=False)


def issuing_ms(config):
    """ms of each step that go with the launches."""
    return device_step_ms(config) - device_step_ms(replace(config, launch_us=FREE))


def traced(config, folder):
    """(graph, windows) of the job's traces."""
    generate(config, folder / "traces")
    windows = windows_of(folder / "traces")
    return graph_of_windows(windows)[0], windows


@pytest.mark.parametrize("share", [0.03, pytest.param(0.05, marks=pytest.mark.slow)])
def test_a_host_that_is_slower_by_a_hair_costs_that_hair(share, tmp_path):
    ms = share * device_step_ms(ISSUING)
    config = replace(ISSUING, world_size=4, plants=(slower(2, ms),))
    graph, _ = traced(config, tmp_path)
    late, step_ms = late_of(graph), graph.mean_cycle_ns / 1e6
    assert set(late) <= {"host", "total"}
    if "host" in late:
        assert late["host"].ranks == [2]
        assert late["host"].ms_per_step == pytest.approx(ms, abs=0.02 * step_ms)
        assert late["host"].own_ms - late["host"].typical_ms < ms + 0.02 * step_ms
    assert shared_of(graph)["launch"].ms_per_step == pytest.approx(issuing_ms(ISSUING), rel=0.3)
    # Only this rank's device is seen to idle.
    idle = graph.groups[0].work[..., INDEX["launch"]].sum(axis=1).mean(axis=0)
    assert idle.argmax() == 2
    assert np.delete(idle, 2).max() < 0.5 * idle[2]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_equal_hosts_accuse_nobody(seed, tmp_path):
    config = replace(ISSUING, seed=seed)
    generate(config, tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    assert {cause: ranks for cause, ranks in accused(measurement).items() if cause != "turns"} == {}
    assert measurement.facts.shared.launch.ms_per_step == pytest.approx(issuing_ms(config), rel=0.3)


def test_two_slow_hosts_of_four(tmp_path):
    """The others' devices do not idle, but would not be quicker either."""
    ms = 0.05 * device_step_ms(ISSUING)
    config = replace(ISSUING, plants=(slower(2, ms), slower(3, ms)))
    graph, _ = traced(config, tmp_path)
    late = late_of(graph)
    assert late["host"].ranks == [2, 3]
    assert late["host"].ms_per_step == pytest.approx(ms, rel=0.2)
    assert shared_of(graph)["launch"].ms_per_step == pytest.approx(issuing_ms(ISSUING), rel=0.35)


@pytest.mark.parametrize("item_every", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_host_work_of_one_rank_costs_all_of_it_where_the_devices_set_the_pace(item_every, tmp_path):
    config = Config(**SMALL, item_every=item_every, plants=(slower(1, 25.0),), steps=10, warmup_steps=8)
    generate(config, tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    assert accused(measurement) == {"host": [1]}
    truth_ms = device_step_ms(config) - device_step_ms(replace(config, plants=()))
    assert truth_ms > 10
    assert measurement.facts.late.host.ms_per_step == pytest.approx(truth_ms, rel=0.1)


@pytest.mark.parametrize("queue_depth", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_a_slow_device_for_which_all_hosts_wait_in_full_queues(queue_depth, tmp_path):
    """Then a host needs as long for a step as the slowest device, and that is not its own pace."""
    config = Config(
        **SMALL | {"queue_depth": queue_depth},
        item_every=0,
        plants=(Plant("throttled", (2,), factor=1.4),),
        warmup_steps=20,
    )
    graph, windows = traced(config, tmp_path)
    assert max(issue_time_ns(window) for window in windows) < 0.2 * graph.mean_cycle_ns
    truth_ms = device_step_ms(config) - device_step_ms(replace(config, plants=()))
    late = late_of(graph)
    assert late["compute"].ranks == [2]
    assert late["compute"].ms_per_step == pytest.approx(truth_ms, rel=0.15)
    assert not any("host" in group.standalone_ns for group in graph.groups)


def test_free_communication_gains_nothing_where_the_hosts_set_the_pace(tmp_path):
    """Between its launches a device has time for what is left of the transfer."""
    config = replace(ISSUING, link_bandwidth_gbps=5.0)
    free = replace(config, link_bandwidth_gbps=1e6, link_latency_us=0.1)
    hosts_ms = device_step_ms(replace(free, forward_us=10.0, backward_us=10.0, optimizer_us=10.0))
    graph, windows = traced(config, tmp_path)
    step_ms = graph.mean_cycle_ns / 1e6
    assert max(issue_time_ns(window) for window in windows) / 1e6 == pytest.approx(hosts_ms, rel=0.03)
    communication = gain_ns(graph, without_transfer([usual_transfer(group) for group in graph.groups])) / 1e6
    truth_ms = step_ms - device_step_ms(free)
    assert communication == pytest.approx(truth_ms, abs=TOLERANCE * step_ms)


def test_unchanged_the_replay_gives_the_measured_times(tmp_path):
    graph, _ = traced(replace(ISSUING, plants=(slower(1, 1.0),)), tmp_path)
    durations = np.concatenate([group.duration for group in graph.groups])
    np.testing.assert_allclose(replay_all(graph), durations, rtol=1e-9)


def test_one_marked_step_tells_no_pace(tmp_path):
    generate(replace(ISSUING, steps=1, world_size=2), tmp_path / "traces")
    assert all(np.isnan(issue_time_ns(window)) for window in windows_of(tmp_path / "traces"))
