"""What is said of recordings that tell little."""

from __future__ import annotations

import gzip
import json

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


def test_what_traces_without_the_job_s_name_leave_unknown_is_told(tmp_path):
    generate(Config(world_size=2), tmp_path)
    for file, name in zip(sorted(tmp_path.iterdir()), "ab", strict=True):
        text = json.loads(gzip.decompress(file.read_bytes()))
        del text["distributedInfo"]
        file.unlink()
        (tmp_path / f"{name}.json").write_text(json.dumps(text))
    notes = [note for note in traced.measured(tmp_path).notes if "no distributedInfo" in note]
    assert len(notes) == 1 and notes[0].endswith("so world size and backend are unknown."), notes
