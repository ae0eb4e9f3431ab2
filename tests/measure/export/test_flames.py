"""The samples of a rank as a flame graph, of late steps and of usual ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpdoctor.measure.flames import flame_graphs
from ddpdoctor.measure.steplog import read_logs
from ddpdoctor.rundir.reader import RunDirectory
from tests.measure.recorded import Job, measured, plant, record
from tests.measure.steplogs import log_of, span_of, write_lines

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def flames(tmp_path_factory):
    """What ``export --speedscope`` writes of a recorded job whose rank 1 is late in every step."""
    folder = tmp_path_factory.mktemp("flames")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "ddpdoctor",
            "export",
            "fixtures/slow-data-one-rank",
            "--speedscope",
            str(folder),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0 and done.stdout.count("written: ") == 2, done.stderr
    return {rank: json.loads((folder / f"rank-0000{rank}.speedscope.json").read_text()) for rank in range(2)}


def test_the_files_are_what_speedscope_reads(flames):
    for rank, document in flames.items():
        assert document["$schema"] == "https://www.speedscope.app/file-format-schema.json"
        frames, profiles = document["shared"]["frames"], document["profiles"]
        assert frames and all(set(frame) == {"name", "file", "line"} for frame in frames)
        assert profiles[0]["name"].startswith(f"rank {rank}: all steps (")
        for profile in profiles:
            assert (profile["type"], profile["unit"], profile["startValue"]) == ("sampled", "milliseconds", 0)
            assert len(profile["samples"]) == len(profile["weights"]) > 0
            assert sum(profile["weights"]) == pytest.approx(profile["endValue"])
            assert all(0 <= number < len(frames) for stack in profile["samples"] for number in stack)


def test_a_rank_that_is_late_in_every_step_shows_what_makes_it_late(flames):
    def ms_at(document, words):
        """Ms per step in which such a frame is on the stack."""
        (chosen,) = document["profiles"]
        names = [frame["name"] for frame in document["shared"]["frames"]]
        return sum(
            weight
            for stack, weight in zip(chosen["samples"], chosen["weights"], strict=True)
            if any(words in names[number] for number in stack)
        )

    assert ms_at(flames[1], "read_from_slow_storage") > 20
    assert ms_at(flames[0], "read_from_slow_storage") < 5


def test_the_late_steps_are_those_of_the_report(tmp_path):
    folder = record(tmp_path / "run", Job(steps=60, extra=plant(1, every=3, host=30.0)))
    for rank in range(4):
        lines = [{"where": 7, "file": "train.py", "line": 44, "function": "main"}]
        lines += [{"t": t, "s": [[0, 7, 7]]} for t in range(*span_of(folder, rank), 700_000)]
        write_lines(log_of(folder, rank, "samples.jsonl"), lines)
    late, other, _ = measured(folder)[0].drawn.flames
    assert (late.rank, late.which, other.rank, other.which) == (1, "late steps", 1, "other steps")
    (logs,) = read_logs([RunDirectory.open(str(folder))])
    documents = dict(flame_graphs(logs.logs, {}, range(60)))
    assert [profile["name"] for profile in documents[1]["profiles"][1:]] == [
        f"rank 1: late steps ({late.steps}, {late.samples:,} samples; ms per step)",
        f"rank 1: other steps ({other.steps}, {other.samples:,} samples; ms per step)",
    ]
    assert len(documents[0]["profiles"]) == 1
