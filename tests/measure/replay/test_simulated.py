"""Replays of simulated jobs with something taken out, against the same job simulated without it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ddpdoctor.measure.attribution import component
from ddpdoctor.measure.costs import without_reductions
from ddpdoctor.measure.graph import graph_of_windows
from ddpdoctor.measure.replay import baseline, idle_after, replay, replay_all, without_sync, without_work
from ddpdoctor.measure.taxonomy import WAITING_FOR_DATA, SyncKind
from ddpdoctor.measure.window import with_bucket_sizes
from tests.generator import Config, Plant, cpu_job, generate
from tests.generator.cases import UNEQUAL_BUCKETS
from tests.generator.simulate import simulate
from tests.measure.traced import windows_of

TOLERANCE = 0.05
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


def close(lengths_ns, config):
    return float(lengths_ns.mean()) == pytest.approx(mean_ns(config), rel=TOLERANCE)


@pytest.mark.parametrize("name", JOBS)
def test_with_nothing_changed_it_is_the_measured_job(name, graphs):
    graph = graphs(name)
    for group in graph.groups:
        np.testing.assert_allclose(replay(group, baseline(group)), group.duration, rtol=0.02)


def test_only_the_last_micro_batch_is_reduced(graphs):
    graph = graphs("two backward passes")
    assert close(replay_all(graph, without_reductions(graph)), replace(TWO_BACKWARDS, no_sync=True))


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_data_that_is_always_there(backend, tmp_path):
    job = replace(Config() if backend == "nccl" else cpu_job(), data_us=6000.0, steps=5)
    generate(job, tmp_path / "traces")
    graph, _ = graph_of_windows(windows_of(tmp_path / "traces"))
    waits = [part.clip(0) for part in component([group.work for group in graph.groups], WAITING_FOR_DATA)]
    assert close(replay_all(graph, [without_work(waits)]), replace(job, data_us=1.0))


def test_barriers_gone(tmp_path):
    job = Config(steps=5, plants=(Plant("explicit_barrier", count=3),))
    generate(job, tmp_path / "traces")
    graph, _ = graph_of_windows(windows_of(tmp_path / "traces"))
    without = [
        without_sync(lambda group, k: group.syncs[k].kind == SyncKind.BARRIER),
        without_work(idle_after(graph, [SyncKind.BARRIER])),
    ]
    assert close(replay_all(graph, without), replace(job, plants=()))
