"""Traces in which nothing marks the steps: kernels alone, and launches without operators."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpdoctor import analyze
from tests.generator import Config, HostClock, Plant, generate
from tests.measure.traced import accused, found, measured

EXTENDED = pytest.mark.extended

KERNELS = ("cuda_runtime", "cpu_op", "user_annotation", "gpu_user_annotation")
"""What traces of the devices' kernels lack."""
LAUNCHES = ("cpu_op", "user_annotation", "gpu_user_annotation")
BARE = {"kernel_metadata": False, "operator_metadata": False, "include_seq": False}
JOB = Config(
    forward_us=2500.0,
    backward_us=5000.0,
    forward_kernels=8,
    backward_kernels=16,
    bucket_bytes=(10_000_000,) * 3,
    unrecorded=KERNELS,
    **BARE,
)
HIDDEN = (Plant("slow_forward", ranks=(1,), ms=2.0), Plant("host_work_end_of_step", ms=4.0))
"""A straggler, and what all ranks do in each step, which keeps their computation from going on at a collective's end."""
VARIANTS = {
    "two ranks": {"world_size": 2},
    "eight ranks on two hosts": {
        "world_size": 8,
        "hosts": (4, 4),
        "clocks": (HostClock(), HostClock(-3_000_000_000, 50.0)),
    },
    "windows that begin in other steps": {"window_starts_late": {0: 4, 2: 7}},
    "one bucket": {"bucket_bytes": (30_000_000,)},
    "launches": {"unrecorded": LAUNCHES},
    "ends that are read late": {"end_jitter_us": 60.0},
    "a metric is reduced behind each update": {"metric_allreduce": True},
    "sizes are known": {"kernel_metadata": True, "operator_metadata": True},
}


def saved_ms(truth, plant):
    without = truth.plants[plant].step_us_without
    return truth.mean_step_us / 1e3 - sum(without) / len(without) / 1e3


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "metric" in name else EXTENDED) for name in VARIANTS]
)
def test_steps_are_told_by_their_updates(name, tmp_path):
    truth = generate(replace(JOB, **VARIANTS[name]), tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    assert measurement.facts.steps.seen >= 5 and measurement.facts.steps.marked
    assert measurement.facts.steps.mean_ms == pytest.approx(truth.mean_step_us / 1e3, rel=0.04)
    assert accused(measurement) == {}


@EXTENDED
@pytest.mark.parametrize("name", VARIANTS)
def test_a_straggler_beside_what_all_ranks_do(name, tmp_path):
    """Each step's last bucket holds up the next step, however long all hosts work in between."""
    truth = generate(replace(JOB, plants=HIDDEN, **VARIANTS[name]), tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    late, shared = measurement.facts.late, found(measurement.facts.shared)
    assert accused(measurement) == {"compute": [1]}
    assert late.compute.ms_per_step == pytest.approx(saved_ms(truth, 0), rel=0.2)
    alike = shared["idle"] if "idle" in shared else shared["host"]
    assert alike.ms_per_step == pytest.approx(saved_ms(truth, 1), rel=0.25)


def test_without_kernels_of_an_optimizer_the_window_is_one_step(tmp_path):
    lacking = (*KERNELS, "void at::native::multi_tensor_apply_kernel<BinaryOpListAlphaFunctor>()")
    truth = generate(replace(JOB, unrecorded=lacking), tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    assert measurement.facts.steps.mean_ms > 4 * truth.mean_step_us / 1e3
    assert measurement.facts.steps.marked is False
    assert any("whole recording is measured as one step" in note for note in measurement.notes)
    assert all(finding.speedup_if_fixed is None for finding in analyze([str(tmp_path / "traces")]).findings)


@EXTENDED
@pytest.mark.parametrize("sizes", [False, True])
@pytest.mark.parametrize("recorded", [(), LAUNCHES, KERNELS], ids=["all", "launches", "kernels"])
def test_reductions_behind_the_backward_pass(recorded, sizes, tmp_path):
    known = dict.fromkeys(BARE, sizes)
    job = replace(JOB, unrecorded=recorded, plants=(Plant("no_overlap"),), **known)
    truth = generate(job, tmp_path / "traces")
    facts = measured(tmp_path / "traces").facts
    assert facts.buckets.first_ready_share > 0.9
    assert facts.shared.no_overlap.ms_per_step == pytest.approx(saved_ms(truth, 0), rel=0.33)


@EXTENDED
@pytest.mark.parametrize("recorded", [(), KERNELS], ids=["all", "kernels"])
@pytest.mark.parametrize("job", [{"link_bandwidth_gbps": 6.0}, {"bucket_bytes": (30_000_000,)}])
def test_reductions_beside_it_are_none(recorded, job, tmp_path):
    """Nor is a long last message, nor a single one, of which nothing says that it could have been several."""
    generate(replace(JOB, unrecorded=recorded, **job), tmp_path / "traces")
    assert measured(tmp_path / "traces").facts.shared.no_overlap is None
