"""The samples of a rank as a flame graph, of late steps and of usual ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from ddpdoctor.measure.export import COLLECTIVES, STEPS, late_steps

ROOT = Path(__file__).resolve().parents[3]
MS = 1_000_000


def tables(late_ms, ranks=3, steps=10, step_ms=100):
    """A job of which ``late_ms[rank][step]`` says how late a rank arrives at the one collective of a step."""
    rows, collectives = [], []
    for step in range(steps):
        start = step * step_ms * MS
        arrivals = {rank: start + (50 + late_ms.get(rank, {}).get(step, 0)) * MS for rank in range(ranks)}
        last = max(arrivals.values())
        for rank, arrival in arrivals.items():
            rows.append((rank, "step-log", step, start, start + step_ms * MS, ""))
            times = (arrival, last, last + MS, last - arrival, MS)
            collectives.append((rank, "step-log", step, "gradients", "allreduce", "0", *times, 8.0))
    return (
        pl.DataFrame(collectives, schema=COLLECTIVES, orient="row"),
        pl.DataFrame(rows, schema=STEPS, orient="row"),
    )


def test_a_rank_is_late_in_the_steps_in_which_it_comes_after_the_median_rank():
    assert late_steps(*tables({1: {3: 20, 7: 5, 8: 4}})) == {0: set(), 1: {3, 7}, 2: set()}


def test_of_two_ranks_one_is_late_and_of_one_none():
    assert late_steps(*tables({0: {2: 30}}, ranks=2)) == {0: {2}, 1: set()}
    assert late_steps(*tables({}, ranks=1)) == {0: set()}


def test_whom_all_but_one_wait_for_is_late_and_whoever_is_early_is_not():
    early = {rank: dict.fromkeys(range(10), 40) for rank in (0, 2)}
    assert late_steps(*tables(early)) == {0: set(), 1: set(), 2: set()}


def test_what_was_not_matched_makes_nobody_late():
    collectives, steps = tables({1: {3: 20}})
    unmatched = collectives.with_columns(pl.lit(None, pl.Int64).alias("last_arrival_ns"))
    assert late_steps(unmatched, steps) == {0: set(), 1: set(), 2: set()}


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


def test_late_steps_show_what_made_them_late(flames):
    def ms_at(document, words, profile):
        """Ms per step in which such a frame is on the stack."""
        (chosen,) = (each for each in document["profiles"] if f": {profile}" in each["name"])
        names = [frame["name"] for frame in document["shared"]["frames"]]
        return sum(
            weight
            for stack, weight in zip(chosen["samples"], chosen["weights"], strict=True)
            if any(words in names[number] for number in stack)
        )

    assert ms_at(flames[1], "read_from_slow_storage", "late steps") > 20
    assert ms_at(flames[0], "read_from_slow_storage", "all steps") < 5
