"""What is said of recordings that tell little."""

from __future__ import annotations

import pytest

from tests.generator import Config, generate
from tests.measure import traced
from tests.measure.recorded import Job, measured, record


@pytest.mark.parametrize(("steps", "few"), [(5, True), (30, False)])
def test_how_little_of_a_run_was_seen(steps, few, tmp_path):
    _, notes = measured(record(tmp_path / "run", Job(steps=steps)))
    assert any(note.startswith("Only ") and "measured" in note for note in notes) == few


@pytest.mark.parametrize(
    ("unrecorded", "told"),
    [(("kernel", "gpu_memcpy", "gpu_memset"), True), ((), False), (("cuda_runtime",), False)],
)
def test_launches_without_kernels_are_no_healthy_device(unrecorded, told, tmp_path):
    generate(Config(world_size=2, unrecorded=unrecorded), tmp_path / "traces")
    notes = traced.measured(tmp_path / "traces").notes
    assert any("but no kernel" in note for note in notes) == told
