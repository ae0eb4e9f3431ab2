"""What ranks compute after they are ready for a step's last reduction is the next step's, whether they wait there or come late.

Only in few cycles does it matter: over many, what a cycle gives to the next one it has from the one before.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpdoctor.measure.graph import graph_of_windows
from ddpdoctor.measure.numerics import covered
from ddpdoctor.measure.taxonomy import DEVICE_WORK, INDEX
from tests.generator import Config, Plant, When, generate
from tests.measure.grids import pairs_first
from tests.measure.traced import accused, measured, windows_of

pytestmark = pytest.mark.extended

LATE_MS = 3.0
JOB = Config(bucket_bytes=(10_000_000,) * 3, bucket_position=(0.2, 0.4, 0.6))
"""The last bucket is reduced beside two fifths of the backward pass, 3.2 ms."""
KERNELS = ("cuda_runtime", "cpu_op", "user_annotation", "gpu_user_annotation")
KINDS = {"host_gap_forward": "host", "host_gap_backward": "host", "slow_forward": "compute"}


@pytest.mark.parametrize(("kind", "cycles", "world"), pairs_first(tuple(KINDS), (2, 3), (2, 4, 8)))
def test_a_rank_that_is_late_since_the_window_began(kind, cycles, world, tmp_path):
    """In the step before it was not: all had computed alike ahead of the first cycle."""
    plant = Plant(kind, ranks=(1,), ms=LATE_MS, when=When(first=1))
    generate(
        replace(JOB, world_size=world, steps=cycles + 1, seed=world, plants=(plant,)), tmp_path / "traces"
    )
    measurement = measured(tmp_path / "traces")
    assert measurement.facts.steps.measured == cycles
    assert accused(measurement) == {KINDS[kind]: [1]}
    cost = measurement.facts.late.total
    assert cost.ms_per_step == pytest.approx(LATE_MS, rel=0.05)


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_stops_being_late_has_the_price_of_the_steps_in_which_it_was(world, tmp_path):
    plant = Plant("slow_forward", ranks=(1,), ms=LATE_MS, when=When(first=0, last=4))
    generate(replace(JOB, world_size=world, steps=8, plants=(plant,)), tmp_path / "traces")
    measurement = measured(tmp_path / "traces")
    assert accused(measurement) == {"compute": [1]}
    assert measurement.facts.late.total.ms_per_step == pytest.approx(LATE_MS * 4 / 7, rel=0.05)


@pytest.mark.parametrize("recorded", [(), KERNELS], ids=["all", "kernels"])
def test_nobody_is_late_in_few_cycles_of_a_healthy_job(recorded, tmp_path):
    generate(replace(JOB, steps=3, unrecorded=recorded), tmp_path / "traces")
    assert accused(measured(tmp_path / "traces")) == {}


def test_each_cycles_work_is_that_from_ready_to_ready(tmp_path):
    """Nothing counts twice and nothing is left out, where a rank's part was queued as well."""
    plant = Plant("slow_forward", ranks=(1,), ms=LATE_MS, when=When(every=2))
    generate(replace(JOB, bucket_position=(0.5, 0.55, 0.6), plants=(plant,)), tmp_path / "traces")
    graph, windows = graph_of_windows(windows_of(tmp_path / "traces"))
    origin = min(window.span[0] for window in windows)
    (group,) = graph.groups
    columns = [INDEX[component] for component in DEVICE_WORK]
    work_ns = group.with_overlap(group.work)[..., columns].sum(axis=(1, 3))
    for r, window in enumerate(windows):
        ready = group.ready[:, -1, r] + origin
        spent = [
            covered(own, ready[:-1], ready[1:]) for name, own in window.sets.items() if name in DEVICE_WORK
        ]
        assert work_ns[1:, r] == pytest.approx(sum(spent), abs=30_000)
    assert (group.ready[:, -1] < group.arrival[:, -1]).any(), "a part was queued"
