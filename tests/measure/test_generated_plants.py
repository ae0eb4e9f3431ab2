"""Each planted cause: named for what it is, and the step time without it predicted from the job that has it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.generator import SMALL, Config, Plant, cpu_job, generate
from tests.measure.traced import accused, found, measured

pytestmark = pytest.mark.extended

TOLERANCE = 0.03
"""Of the step."""

RANK_PLANTS = {
    "slow_data": ("data", {"ms": 3}),
    "slow_h2d": ("copy", {"ms": 3}),
    "slow_forward": ("compute", {"ms": 3}),
    "slow_backward_kernels": ("compute", {"ms": 3}),
    "throttled": ("compute", {"factor": 1.3}),
    "uneven_work": ("uneven", {"factor": 1.4}),
    "host_gap_forward": ("host", {"ms": 3}),
    "host_gap_backward": ("host", {"ms": 3}),
    "gc_pause": ("host", {"ms": 6}),
    "host_work_end_of_step": ("host", {"ms": 3}),
    "checkpoint": ("checkpoint", {"ms": 6}),
}
JOB_PLANTS = {
    "device_sync_item": ("device_sync", {"count": 8}, {}),
    "explicit_barrier": ("barrier", {"count": 2}, {}),
    "redundant_sync": ("redundant_sync", {}, {"accumulation": 3, "steps": 5}),
    "no_overlap": ("no_overlap", {}, {"steps": 5}),
    "launch_bound": ("launch", {"factor": 6}, {"steps": 3}),
}


def steps_of(kind):
    """Where a pause falls at random within the step, more steps are needed for the mean to settle."""
    return 8 if kind == "gc_pause" else 5


def predicted_ms(measurement, cost):
    return measurement.facts.steps.mean_ms - cost.ms_per_step


def near(truth, value_ms, tolerance=TOLERANCE):
    """The step time of the job without the plant."""
    without_ms = sum(truth.plants[0].step_us_without) / len(truth.plants[0].step_us_without) / 1e3
    return value_ms == pytest.approx(without_ms, abs=tolerance * truth.mean_step_us / 1e3)


SLOW = ("slow_backward_kernels", "throttled", "host_work_end_of_step")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in SLOW else kind for kind in RANK_PLANTS]
)
def test_a_cause_on_one_rank(kind, tmp_path):
    cause, strength = RANK_PLANTS[kind]
    truth = generate(
        Config(**SMALL, steps=steps_of(kind), plants=(Plant(kind, ranks=(2,), **strength),)),
        tmp_path / "traces",
    )
    measurement = measured(tmp_path / "traces")
    assert accused(measurement) == {cause: [2]}
    assert near(truth, predicted_ms(measurement, measurement.facts.late.total))


IN_GAPS = {
    "kernels_before_forward": "between loading the batch and the forward pass",
    "kernels_before_backward": "between the forward pass and backward()",
    "kernels_after_optimizer": "between optimizer.step() and the next batch",
}


@pytest.mark.parametrize("job", [Config, cpu_job])
@pytest.mark.parametrize("kind", IN_GAPS)
def test_operators_between_the_phases_are_no_slower_computation(kind, job, tmp_path):
    truth = generate(job(**SMALL, steps=5, plants=(Plant(kind, ranks=(2,), ms=3),)), tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    assert accused(measurement) == {"host": [2]}
    assert measurement.facts.late.host.gap == IN_GAPS[kind]
    assert near(truth, predicted_ms(measurement, measurement.facts.late.total))


@pytest.mark.parametrize("job", [Config, cpu_job])
def test_a_slower_rank_is_slower_between_the_phases_too(job, tmp_path):
    loss = Plant("kernels_before_backward", ms=4)
    generate(
        job(**SMALL, steps=5, plants=(Plant("throttled", ranks=(2,), factor=1.3), loss)), tmp_path / "traces"
    )
    assert accused(measured(tmp_path / "traces")) == {"compute": [2]}


@pytest.mark.parametrize("job", [Config, cpu_job])
def test_what_all_ranks_do_between_the_phases(job, tmp_path):
    truth = generate(
        job(**SMALL, steps=5, plants=(Plant("kernels_after_optimizer", ms=6),)), tmp_path / "traces"
    )
    measurement = measured(tmp_path / "traces")
    assert accused(measurement) == {}
    outside = measurement.facts.shared.outside
    assert outside.ranks is None and outside.gap == IN_GAPS["kernels_after_optimizer"]
    assert near(truth, predicted_ms(measurement, outside))


# On a CPU a pause inside the forward looks like the forward: the thread is in it, and no device stands idle beside it.
ON_CPUS = {
    "slow_data": "data",
    "slow_forward": "compute",
    "slow_backward_kernels": "compute",
    "throttled": "compute",
    "uneven_work": "uneven",
    "host_gap_forward": "compute",
    "host_gap_backward": "host",
    "gc_pause": "compute",
    "host_work_end_of_step": "host",
}


FAST_ON_CPUS = ("slow_data", "uneven_work", "host_gap_backward")


@pytest.mark.parametrize(
    "kind", [kind if kind in FAST_ON_CPUS else pytest.param(kind, marks=pytest.mark.slow) for kind in ON_CPUS]
)
def test_a_cause_on_one_rank_of_a_cpu_job(kind, tmp_path):
    strength = RANK_PLANTS[kind][1]
    truth = generate(
        cpu_job(**SMALL, steps=steps_of(kind), plants=(Plant(kind, ranks=(2,), **strength),)),
        tmp_path / "traces",
    )
    measurement = measured(tmp_path / "traces")
    assert accused(measurement) == {ON_CPUS[kind]: [2]}
    assert near(truth, predicted_ms(measurement, measurement.facts.late.total))


@pytest.mark.parametrize("kind", JOB_PLANTS)
def test_a_cause_on_all_ranks(kind, tmp_path):
    fact, strength, shape = JOB_PLANTS[kind]
    truth = generate(Config(plants=(Plant(kind, **strength),), **shape), tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    assert accused(measurement) == {}
    cost = found(measurement.facts.shared)[fact]
    assert cost.ranks is None and near(truth, predicted_ms(measurement, cost))


@pytest.mark.parametrize(
    "kind", ["slow_link", pytest.param("communication_bound", marks=pytest.mark.slow), "many_tiny_buckets"]
)
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_causes_in_communication_accuse_nobody_and_are_priced_as_such(kind, backend, tmp_path):
    """All exposed transfer is at least what the plant adds, and no more than that and the healthy job's own."""
    base = Config(**SMALL) if backend == "nccl" else cpu_job()
    strength = {"count": 60} if kind == "many_tiny_buckets" else {"factor": 6}
    truth = generate(replace(base, steps=5, plants=(Plant(kind, **strength),)), tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    assert accused(measurement) == {}
    mean_ms, cost_ms = truth.mean_step_us / 1e3, truth.plants[0].cost_us_per_step / 1e3
    priced = measurement.facts.shared.communication.ms_per_step
    # Issuing many buckets costs a CPU time of its own besides the transfer.
    assert priced >= cost_ms - 0.05 * mean_ms
    own_ms = 0.6 if backend == "nccl" else 1.5
    assert priced <= max(cost_ms, 0.0) + own_ms + TOLERANCE * mean_ms


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_healthy_job_accuses_nobody(backend, world, tmp_path):
    make = Config if backend == "nccl" else cpu_job
    truth = generate(make(**SMALL, world_size=world, jitter=0.1, seed=3, steps=6), tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    assert accused(measurement) == {} and measurement.facts.late.total is None
    assert measurement.facts.steps.mean_ms == pytest.approx(truth.mean_step_us / 1e3, rel=TOLERANCE)


def test_breakdown_adds_up_and_agrees_with_the_truth(tmp_path):
    truth = generate(Config(plants=(Plant("slow_data", ranks=(2,), ms=3),)), tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    assert sum(measurement.facts.breakdown.values()) == pytest.approx(1.0)
    for rank in measurement.drawn.ranks:
        assert sum(rank.breakdown_ms.values()) == pytest.approx(truth.mean_step_us / 1e3, rel=0.01)
        true_ms = (
            sum(step.breakdown_us[rank.rank]["data_wait"] for step in truth.steps) / len(truth.steps) / 1e3
        )
        assert rank.breakdown_ms["data_wait"] == pytest.approx(true_ms, abs=0.02 * truth.mean_step_us / 1e3)


def test_wait_apart_from_transfer_is_that_of_the_truth(tmp_path):
    truth = generate(Config(plants=(Plant("slow_data", ranks=(2,), ms=3),)), tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    last = [c for c in truth.collectives if c.step > 0]
    steps = len(truth.steps) - 1
    transfer_ms = sum(c.transfer_us for c in last) / steps / 1e3
    facts = measurement.facts.communication
    assert facts.total_transfer_ms == pytest.approx(transfer_ms, abs=0.2)
    for exposed_ms, part in ((facts.wait_ms, "comm_wait"), (facts.transfer_ms, "comm_transfer")):
        of_ranks = [of_rank[part] for step in truth.steps[1:] for of_rank in step.breakdown_us]
        assert exposed_ms == pytest.approx(sum(of_ranks) / 4 / steps / 1e3, abs=0.2)
    (point,) = measurement.drawn.bandwidth
    true_bus = truth.config.bucket_bytes[0] * 1.5 / (last[0].transfer_us * 1e3)
    assert point.bus_gb_per_s == pytest.approx(true_bus, rel=0.1)
