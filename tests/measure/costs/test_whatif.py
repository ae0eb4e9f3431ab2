"""Scenarios: the same job simulated with the change made, against the step time predicted without it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from ddpdoctor.measure.costs import whatif as whatif
from ddpdoctor.measure.graph import graph_of_windows
from ddpdoctor.measure.metrics import message_cost
from ddpdoctor.measure.replay import length_ns, transmissions_of
from ddpdoctor.measure.window import with_bucket_sizes
from tests.generator import Config, Plant, cpu_job, generate
from tests.generator.cases import UNEQUAL_BUCKETS
from tests.generator.simulate import simulate
from tests.measure.traced import windows_of

TOLERANCE = 0.05
HOSTS = ["host"] * 16
PLACES = tuple((np.cumsum(UNEQUAL_BUCKETS) / sum(UNEQUAL_BUCKETS)).tolist())
BALANCED = Config(bucket_bytes=UNEQUAL_BUCKETS, bucket_position=PLACES, link_bandwidth_gbps=12.0, steps=5)
"""Half of the transfer hides behind the backward pass, in which gradients become ready evenly."""
BOUND = replace(BALANCED, bucket_bytes=tuple(4 * size for size in UNEQUAL_BUCKETS))
"""The link is the bottleneck from the second bucket on."""
HIDDEN = replace(BALANCED, link_bandwidth_gbps=100.0)
LATE = replace(BALANCED, plants=(Plant("slow_data", ranks=(2,), ms=3.0),))
TWO_BACKWARDS = replace(BALANCED, accumulation=2, no_sync=False, steps=4)
ON_CPUS = cpu_job(bucket_bytes=(500_000, 3_000_000, 1_500_000), steps=5)
JOBS = {
    "balanced": BALANCED,
    "bound": BOUND,
    "hidden": HIDDEN,
    "one rank late": LATE,
    "two backward passes": TWO_BACKWARDS,
    "metric": replace(BALANCED, metric_allreduce=True),
    "all at the end": replace(BALANCED, overlap=False),
    "on CPUs": ON_CPUS,
}


def mean_ns(config):
    """Simulated, over the steps that the graph measures."""
    return float(np.mean(simulate(config, record=False).step_us()[1:])) * 1e3


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    made = {}

    def graph(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("traces")
            config = JOBS[name]
            generate(config, folder)
            windows = windows_of(folder)
            if config.backend == "gloo":
                windows = with_bucket_sizes(windows, config.bucket_bytes)
            made[name] = graph_of_windows(windows)[0]
        return made[name]

    return graph


def close(predicted_ns, config):
    return predicted_ns == pytest.approx(mean_ns(config), rel=TOLERANCE)


@pytest.mark.parametrize("name", JOBS)
def test_with_nothing_changed_it_is_the_measured_job(name, graphs):
    graph = graphs(name)
    for group in graph.groups:
        np.testing.assert_allclose(length_ns(group, transmissions_of(group)), group.duration, rtol=0.02)
    assert whatif.faster_link(graph, 1.0, 0.0) == pytest.approx(graph.mean_cycle_ns, rel=0.02)


# Not slower on CPUs: the generator gives Gloo's two threads a link each.
@pytest.mark.parametrize(
    ("times", "name"),
    [
        pytest.param(times, name, marks=pytest.mark.slow if times == 2.0 else ())
        for times in (0.5, 2.0, 8.0)
        for name in JOBS
        if (times, name) != (0.5, "on CPUs")
    ],
)
def test_a_faster_link(name, times, graphs):
    graph, job = graphs(name), JOBS[name]
    latency_us, _ = message_cost(graph, HOSTS)
    predicted = whatif.faster_link(graph, times, latency_us * 1e3)
    assert close(predicted, replace(job, link_bandwidth_gbps=times * job.link_bandwidth_gbps))


@pytest.mark.parametrize("name", ["balanced", "hidden", "one rank late", "all at the end", "on CPUs"])
def test_perfect_overlap_is_a_link_that_takes_no_time(name, graphs):
    job = replace(JOBS[name], link_bandwidth_gbps=1e9, link_latency_us=0.0)
    assert close(whatif.perfect_overlap(graphs(name)), job)


def test_perfect_overlap_cannot_beat_a_link_that_is_busy_all_the_time(graphs):
    transfer_ns = sum(1.5 * size / 12.0 for size in BOUND.bucket_bytes)
    assert whatif.perfect_overlap(graphs("bound")) == pytest.approx(transfer_ns, rel=TOLERANCE)


@pytest.mark.parametrize("name", ["balanced", "bound", "hidden", "one rank late", "two backward passes"])
@pytest.mark.parametrize(
    "count", [1, pytest.param(2, marks=pytest.mark.slow), 10, pytest.param(60, marks=pytest.mark.slow)]
)
def test_other_buckets(name, count, graphs):
    graph, job = graphs(name), JOBS[name]
    total = sum(job.bucket_bytes)
    latency_us, rate = message_cost(graph, HOSTS)
    predicted = whatif.with_buckets(graph, total / count, latency_us * 1e3, rate, job.backward_us * 1e3)
    assert close(predicted, replace(job, bucket_bytes=(total // count // 4 * 4,) * count, bucket_position=()))


def test_only_the_last_micro_batch_is_reduced(graphs):
    assert close(whatif.no_sync(graphs("two backward passes")), replace(TWO_BACKWARDS, no_sync=True))
    assert whatif.no_sync(graphs("balanced")) is None


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_data_that_is_always_there(backend, tmp_path):
    job = replace(Config() if backend == "nccl" else cpu_job(), data_us=6000.0, steps=5)
    generate(job, tmp_path / "traces")
    graph, _ = graph_of_windows(windows_of(tmp_path / "traces"))
    assert close(whatif.instant_data(graph), replace(job, data_us=1.0))


def test_barriers_gone(tmp_path):
    job = Config(steps=5, plants=(Plant("explicit_barrier", count=3),))
    generate(job, tmp_path / "traces")
    graph, _ = graph_of_windows(windows_of(tmp_path / "traces"))
    assert close(whatif.no_barriers(graph), replace(job, plants=()))


def test_what_is_not_there_cannot_be_taken_out(graphs):
    assert whatif.no_barriers(graphs("balanced")) is None
    assert whatif.perfect_overlap(msgspec.structs.replace(graphs("balanced"), groups=[])) is None
