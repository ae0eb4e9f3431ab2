"""Traces that lack what the hosts did: converted ones, filtered ones. Absent is neither work nor waiting."""

from __future__ import annotations

import gzip
from dataclasses import replace

import numpy as np
import pytest

from ddpdoctor.measure.graph import issue_time_ns
from ddpdoctor.measure.taxonomy import INDEX, Component
from tests.generator import Config, HostClock, Plant, generate
from tests.measure.traced import accused, found, measured, windows_of

EXTENDED = pytest.mark.extended

KERNELS_ONLY = ("cuda_runtime", "cpu_op")
"""Marks of the steps, and what the devices did."""
LATE = Plant("slow_forward", ranks=(1,), ms=2.0)
"""In a step of some ten milliseconds."""
JOB = Config(
    forward_us=2500.0,
    backward_us=5000.0,
    forward_kernels=8,
    backward_kernels=16,
    bucket_bytes=(10_000_000,) * 3,
    unrecorded=KERNELS_ONLY,
)
BARE = {"kernel_metadata": False, "operator_metadata": False, "include_seq": False}
VARIANTS = {
    "two ranks": {"world_size": 2},
    "three ranks": {"world_size": 3},
    "four ranks": {},
    "eight ranks": {"world_size": 8},
    "another host's clock": {"hosts": (2, 2), "clocks": (HostClock(), HostClock(-3_000_000_000, 50.0))},
    "windows that are cut": {"window_starts_late": {0: 4, 2: 7}},
    "events lost": {"dropped_event_fraction": 0.01, "dropped_scope": "all"},
    "a rank missing": {"missing_ranks": (3,)},
    "one bucket": {"bucket_bytes": (30_000_000,)},
}


def near(truth, cost_ms):
    """Within a twentieth of the step."""
    true_ms = truth.plants[0].cost_us_per_step / 1e3
    return cost_ms == pytest.approx(true_ms, abs=0.05 * truth.mean_step_us / 1e3)


@EXTENDED
@pytest.mark.parametrize("name", VARIANTS)
def test_a_slower_rank_is_named_by_its_kernels_alone(name, tmp_path):
    config = replace(JOB, plants=(LATE,), **BARE, **VARIANTS[name])
    truth = generate(config, tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    assert accused(measurement) == {"compute": [1]}
    assert near(truth, measurement.facts.late.compute.ms_per_step)
    assert any("contain no host events" in note for note in measurement.notes)


def test_why_a_device_idles_is_not_known_without_its_host(tmp_path):
    """It is late all the same; and its idle time is nobody's Python."""
    config = replace(JOB, plants=(Plant("host_gap_backward", ranks=(1,), ms=3.0),))
    truth = generate(config, tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    assert accused(measurement) == {"unknown": [1]}
    assert near(truth, measurement.facts.late.unknown.ms_per_step)
    assert not {"host", "launch", "device_sync"} & set(found(measurement.facts.shared))
    assert measurement.facts.breakdown["host"] == 0.0 and measurement.facts.breakdown["other"] > 0.15


@pytest.mark.parametrize(
    "lacking", [pytest.param((0, 2), id="two others"), pytest.param((1,), id="the late one", marks=EXTENDED)]
)
@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=EXTENDED) for kind in (None, "slow_forward")), "host_gap_backward"]
)
def test_some_ranks_hosts_are_recorded(kind, lacking, tmp_path):
    """What is known of some is not held against those of whom nothing is, nor the other way round."""
    plants = () if kind is None else (Plant(kind, ranks=(1,), ms=3.0),)
    truth = generate(replace(JOB, plants=plants, unrecorded_on=lacking), tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    known = "host" if 1 not in lacking else "unknown"
    cause = {None: None, "slow_forward": "compute", "host_gap_backward": known}[kind]
    assert accused(measurement) == ({} if cause is None else {cause: [1]})
    if cause is not None:
        assert near(truth, measurement.facts.late.total.ms_per_step)


@EXTENDED
def test_a_healthy_job_stays_healthy(tmp_path):
    generate(replace(JOB, jitter=0.05, **BARE), tmp_path / "traces")
    assert accused(measured(tmp_path / "traces")) == {}


@EXTENDED
def test_operators_stand_for_calls_that_were_not_recorded(tmp_path):
    config = replace(
        JOB, plants=(Plant("host_gap_backward", ranks=(1,), ms=3.0),), unrecorded=("cuda_runtime",)
    )
    generate(config, tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    assert accused(measurement) == {"host": [1]}
    groups = measurement.graphs.primary.groups
    assert not any(group.work[..., INDEX[Component.IDLE]].any() for group in groups)


def test_steps_that_only_the_devices_mark(tmp_path):
    """Kineto frames annotations of the host on the device's streams, too."""
    lacking = (*KERNELS_ONLY, "Optimizer.step#SGD.step")
    generate(replace(JOB, plants=(LATE,), unrecorded=lacking), tmp_path / "traces")
    for path in (tmp_path / "traces").iterdir():
        text = gzip.decompress(path.read_bytes()).decode()
        moved = text.replace(
            '"cat":"user_annotation","name":"ProfilerStep', '"cat":"gpu_user_annotation","name":"ProfilerStep'
        )
        path.write_bytes(gzip.compress(moved.encode(), 1))
    assert all(len(window.steps) == JOB.steps for window in windows_of(tmp_path / "traces"))
    assert accused(measured(tmp_path / "traces")) == {"compute": [1]}


COUPLED = replace(
    JOB,
    item_every=0,
    reads_last_step=True,
    steps=10,
    plants=(LATE,),
    unrecorded=("cudaEventSynchronize", "cudaDeviceSynchronize"),
)
"""Each host waits for its device, which waits for the others', in a call that the trace lacks."""


@EXTENDED
def test_the_length_of_a_step_is_no_host_s_pace(tmp_path):
    generate(COUPLED, tmp_path / "traces")
    step_ns = measured(tmp_path / "traces").graphs.primary.mean_cycle_ns
    paces_ns = np.array([issue_time_ns(window) for window in windows_of(tmp_path / "traces")])
    assert (paces_ns < 0.5 * step_ns).all()


@EXTENDED
def test_hosts_that_wait_unseen_bound_no_price(tmp_path):
    truth = generate(COUPLED, tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    assert accused(measurement) == {"compute": [1]}
    assert near(truth, measurement.facts.late.compute.ms_per_step)
