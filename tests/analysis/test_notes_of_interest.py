"""What could not be read of GPUs is told of a job that uses one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ddpdoctor import analyze

HEALTHY = Path(__file__).parents[2] / "fixtures" / "healthy"
NO_GPU = "No GPU telemetry: NVML Shared Library Not Found (NVML)."


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_missing_readings_of_gpus_are_missed_by_a_job_on_gpus(tmp_path, device):
    run = tmp_path / "run"
    shutil.copytree(HEALTHY, run)
    for file in run.glob("ranks/*/rank.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "device": device}))
    said = analyze(str(run)).notes
    assert any(NO_GPU in note for note in said) is (device != "cpu"), said


def test_what_is_said_of_several_ranks_is_said_once_and_names_them(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(HEALTHY, run)
    for rank in range(2):
        (run / "ranks" / f"{rank:05d}" / "rank.json").write_text("{")
        (run / "ranks" / f"{rank:05d}" / "trace.json.gz").unlink()
    (note,) = (note for note in analyze(str(run)).notes if "rank.json" in note)
    assert note.startswith("Ranks 0 and 1: ") and "/ranks/*/rank.json" in note
